import pytest
import torch
from torch import nn

import nlbench
from nlbench.introspection.batch_independence import (
    CHANGES,
    DEPENDS_ON_BATCH,
    check_memory,
    describe_outputs,
)
from nlbench.introspection.memory import MAX_UNLIMITED, MIN_LIMITED_SAMPLES, SampleLimit

SAMPLES = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Counter:
    """Squares its input, and records the sizes of batches."""

    def __init__(self):
        self.sizes = []

    def __call__(self, x):
        self.sizes.append(len(x))
        return x.square()


def test_few_samples_show_that_results_are_independent():
    rows = Counter()
    assert describe_outputs(rows, SAMPLES) == ""
    assert rows.sizes == [4, 2, 2, 1, 1]


def test_known_results_are_not_computed_again():
    rows = Counter()
    assert describe_outputs(rows, SAMPLES, SAMPLES.square()) == ""
    assert rows.sizes == [2, 2, 1, 1]


@pytest.mark.parametrize("samples", [SAMPLES[:1], SAMPLES[:2], SAMPLES[:1].expand(4, 3)])
def test_one_or_equal_samples_are_independent(samples):
    assert describe_outputs(torch.square, samples) == ""


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x - x.mean(0),
        lambda x: x - x[:1],
        lambda x: x / len(x),
        lambda x: x.cumsum(0),
        lambda x: x if bool((x == SAMPLES[1]).any()) else 2 * x,
    ],
    ids=["mean", "first", "number", "sum", "exit"],
)
def test_dependence_on_the_batch_is_found(rows):
    assert describe_outputs(rows, SAMPLES) == DEPENDS_ON_BATCH


@pytest.mark.parametrize(
    "rows", [lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x + x.roll(1, 0)]
)
def test_copies_of_a_sample_show_dependence(rows):
    assert check_memory(rows, SAMPLES[:2]) == DEPENDS_ON_BATCH


class Standardised(nn.Module):
    """Divides by zero where an activation is zero for all samples of a small batch."""

    def forward(self, x):
        h = torch.relu(x - 1)
        return (h - h.mean(0)) / h.std(0)


@pytest.mark.parametrize("measure", ["norm", "accuracy", "absdev"])
def test_nan_among_few_samples_only_is_dependence(measure):
    x = torch.zeros(60, 3)
    x[[5, 6, 7]] = torch.tensor([2.0, 3.0, 5.0])[:, None]
    model = nn.Sequential(Standardised(), nn.Linear(3, 3), nn.ReLU())
    run = nlbench.evaluate(model, x, [measure], labels=torch.arange(60) % 3)
    assert DEPENDS_ON_BATCH in run.records[0].result.reason


def test_own_nan_of_sample_is_not_dependence():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    x[0] = -1
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.register_forward_hook(lambda module, args, output: output + args[0].sqrt() * 0)
    run = nlbench.evaluate(model, x, ["norm"])
    assert DEPENDS_ON_BATCH not in run.records[0].result.reason


def test_small_noise_is_found():
    generator = torch.Generator().manual_seed(0)

    def rows(x):
        return x + 1e-3 * torch.randn(x.shape, generator=generator)

    assert describe_outputs(rows, SAMPLES) == CHANGES


@pytest.mark.parametrize(("offset", "reason"), [(0.0, ""), (1.0, DEPENDS_ON_BATCH)])
def test_networks_without_single_samples_are_checked(offset, reason):
    def rows(x):
        if len(x) == 1:
            raise RuntimeError("one sample is too few")
        return x.square() - offset * x.mean(0)

    assert describe_outputs(rows, SAMPLES) == reason


def test_a_small_job_runs_few_samples_in_addition():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    sizes = []
    handle = model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    nlbench.evaluate(model, torch.randn(64, 3), ["norm"])
    handle.remove()
    # Two of the samples are those of the copy in float64.
    assert sorted(sizes) == [1, 1, 2, 2, 2, 4, 64]


@pytest.mark.parametrize(
    ("samples", "elements", "is_limited"),
    [
        (MIN_LIMITED_SAMPLES, 2**14, False),
        (MIN_LIMITED_SAMPLES + 1, 2**14, True),
        (2, MAX_UNLIMITED // 2 + 1, True),
    ],
)
def test_only_large_batches_are_limited_by_default(samples, elements, is_limited):
    batch = torch.zeros(samples, elements)
    limit = SampleLimit({}, nn.Flatten(), "a forward pass", batch, None).limit
    assert (limit is not None) == is_limited
