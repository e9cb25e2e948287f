"""Copies of samples add no information: no value gets better by them."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.measures.affine_residual import affine_residual
from nlbench.measures.linearity import linearity_statistics
from nlbench.measures.r2 import r2_score

COPIES = {
    "appended": lambda x: x.repeat(16, *[1] * (x.ndim - 1)),
    "adjacent": lambda x: x.repeat_interleave(16, 0),
    "shuffled": lambda x: x.repeat(16, *[1] * (x.ndim - 1))[
        torch.randperm(16 * len(x), generator=torch.Generator().manual_seed(5))
    ],
}
MEASURES = {
    "r2": {},
    "r2 adjusted": {"r2.kind": "adjusted"},
    "r2 crossvalidated": {"r2.kind": "crossvalidated"},
    "linearity": {},
    "linearity of tokens": {"sites.rows": "tokens"},
    # Leave-one-out, since the probe draws samples in another order.
    "affine-residual": {"affine-residual.folds": 100},
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6), nn.Tanh())


def evaluate(inputs, name, **settings):
    measure = name.split()[0]
    settings = {**MEASURES[name], **settings}
    run = nlbench.evaluate(network(), inputs, [measure], settings=settings, errors="none")
    return run[measure]


def samples(n, name):
    shape = (n, 3, 6) if "tokens" in name else (n, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("n", "order"),
    [(1, "appended"), (8, "shuffled"), (40, "adjacent"), (40, "shuffled")],
)
@pytest.mark.parametrize("name", MEASURES)
def test_copies_of_samples_change_no_value(name, order, n):
    once = evaluate(samples(n, name), name)
    # In several batches, the last of which may be smaller.
    batch = "function.batch" if name == "affine-residual" else "sites.batch"
    repeated = evaluate(COPIES[order](samples(n, name)), name, **{batch: 100})
    assert repeated.status == once.status, repeated.reason
    if once.status != "ok":
        return
    for before, after in zip(once.values, repeated.values, strict=True):
        assert after.status == before.status
    keys = {"value", "error", "adjusted", "null"} & set(once.summary)
    for key in keys:
        # With shuffled copies, other samples share a fold.
        if order == "shuffled" and key != "null":
            continue
        assert repeated.summary[key] == pytest.approx(once.summary[key], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["r2 crossvalidated", "linearity", "affine-residual"])
def test_shuffled_copies_are_held_out_together(name):
    x = samples(20, name)
    limit = evaluate(COPIES["shuffled"](x), name, **{f"{name.split()[0]}.folds": 20})
    single = evaluate(x, name, **{f"{name.split()[0]}.folds": 20})
    assert limit.summary["value"] == pytest.approx(single.summary["value"], rel=1e-4)


@pytest.mark.parametrize("order", ["appended", "adjacent"])
def test_functions_count_distinct_rows(order):
    x = samples(8, "")
    x = torch.cat([x, x.square(), x.exp()], 1)
    y, copy = x.relu().cos(), COPIES[order]
    with pytest.raises(nlbench.Undefined, match="n = 8"):
        r2_score(copy(x), copy(y))
    for score in (
        affine_residual,
        lambda x, y: r2_score(x, y, kind="crossvalidated"),
        lambda x, y: linearity_statistics(x, y)["value"],
    ):
        assert float(score(copy(x), copy(y))) == pytest.approx(float(score(x, y)), rel=1e-6)


def test_rows_with_different_outputs_are_distinct():
    x = torch.arange(2.0).repeat(20)[:, None]
    y = x + torch.randn(40, 1, generator=torch.Generator().manual_seed(2))
    assert 0 < r2_score(x, y) < 1
