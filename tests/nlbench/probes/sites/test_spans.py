"""Spans of blocks: their places, scores, and the cost of replacing them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.errors import RequestError, Undefined
from nlbench.measures.linearity import linearity_statistics
from nlbench.probes.sites.modules import find_places
from nlbench.probes.sites.sites_observation import observe_sites
from nlbench.probes.sites.sites_probe import parse_lengths, parse_places

WIDTH = 6


class Block(nn.Module):
    def __init__(self, is_affine=False):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.is_affine = is_affine

    def forward(self, x):
        branch = self.layer(x)
        return x + self.mix(branch if self.is_affine else branch.tanh())


class Stack(nn.Module):
    """Blocks of tokens; those in `affine` are affine."""

    def __init__(self, count=4, affine=()):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i in affine) for i in range(count))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(count=4, affine=()):
    torch.manual_seed(0)
    return Stack(count, affine).double().eval()


def tokens(n=40, length=7):
    return torch.randn(n, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def streams(model, x):
    values = [x]
    for block in model.blocks:
        values.append(block(values[-1]))
    return [value.detach() for value in values]


def statistics(model, x, measure, **settings):
    run = nlbench.evaluate(model, before_drawing(x), measure, settings=settings)
    result = run[measure]
    assert result.status == "ok", result.reason
    return {value.place: value.statistics for value in result.values}


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ("spans:1", ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ("spans:3", ["blocks.0..2", "blocks.1..3"]),
        ("spans:3..4", ["blocks.0..2", "blocks.0..3", "blocks.1..3"]),
    ],
)
def test_spans_are_named_by_first_and_last_block(of, names):
    assert [place.name for place in find_places(stack(), tokens(2), of)] == names


def test_spans_stay_inside_one_list():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ModuleList(Block() for _ in range(2))
            self.second = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in (*self.first, *self.second):
                x = block(x)
            return x

    places = find_places(Two().double(), tokens(2), "spans:2")
    assert [place.name for place in places] == ["first.0..1", "second.0..1"]


def test_spans_with_one_end_share_its_stream():
    model, x = stack(), tokens()
    sides = {}

    def record(observation):
        sides[observation.place] = observation.x, observation.y

    observe_sites(model, [x], record, of="spans:1..3")
    values = streams(model, x)
    for name, (before, after) in sides.items():
        first, _, last = name.removeprefix("blocks.").partition("..")
        first = int(first)
        last = int(last or first)
        assert torch.equal(before, values[first].flatten(0, 1))
        assert torch.equal(after, values[last + 1].flatten(0, 1))
    assert len({id(after) for _, after in sides.values()}) == len(model.blocks)


def test_span_linearity_does_not_depend_on_batches():
    model, x = stack(), tokens()
    whole = nlbench.evaluate(model, x, "linearity", settings={"sites.of": "spans:1..3"})
    settings = {"sites.of": "spans:1..3", "sites.batch": 10}
    parts = nlbench.evaluate(model, x, "linearity", settings=settings)
    for value, other in zip(*(run["linearity"].values for run in (whole, parts)), strict=True):
        assert value.place == other.place
        assert value.replicates == pytest.approx(other.replicates, rel=1e-9)
        assert value.statistics == pytest.approx(other.statistics, rel=1e-9)


def test_span_linearity_equals_that_of_its_streams():
    model, x = stack(), tokens()
    measured = statistics(model, x, "linearity", **{"sites.of": "spans:2..3"})
    values = streams(model, x)
    sample_index = torch.arange(len(x)).repeat_interleave(x.shape[1])
    for name, (first, last) in {"blocks.0..1": (0, 2), "blocks.1..3": (1, 4)}.items():
        sides = (values[i].reshape(-1, WIDTH) for i in (first, last))
        expected = linearity_statistics(*sides, sample_index=sample_index)
        assert measured[name]["value"] == pytest.approx(expected["value"], rel=1e-9)
        assert measured[name]["branch_value"] == pytest.approx(expected["branch_value"], rel=1e-9)


def test_span_influence_equals_that_of_its_streams():
    model, x = stack(), tokens()
    measured = statistics(model, x, "influence", **{"sites.of": "spans:2"})
    values = streams(model, x)
    cosine = F.cosine_similarity(values[1].flatten(0, 1), values[3].flatten(0, 1))
    assert measured["blocks.1..2"]["value"] == pytest.approx(1 - cosine.mean().item())


def test_span_costs_equal_those_of_manual_maps():
    model, x = stack(), tokens()
    options = {"replacement.of": "spans:2", "substitution.cost": "squared"}
    measured = statistics(model, x, "substitution", **options)
    assert list(measured) == ["blocks.0..1", "blocks.1..2", "blocks.2..3"]
    values = streams(model, x)
    fitted, judged = slice(0, None, 2), slice(1, None, 2)
    rows = values[1][fitted].reshape(-1, WIDTH).numpy()
    rows = np.hstack([rows, np.ones((len(rows), 1))])
    weights, *_ = np.linalg.lstsq(rows, values[3][fitted].reshape(-1, WIDTH).numpy(), rcond=None)
    weights = torch.from_numpy(weights)
    with torch.no_grad():
        outputs = model(x[judged])
        spread = (outputs - outputs.mean(0)).square().sum()
        for name, stream in {
            "value": values[1][judged] @ weights[:-1] + weights[-1],
            "identity": values[1][judged],
        }.items():
            changed = model.head(model.blocks[3](stream))
            expected = (changed - outputs).square().sum() / spread
            assert measured["blocks.1..2"][name] == pytest.approx(expected.item(), rel=1e-6)


def test_span_of_affine_blocks_costs_nothing():
    model, x = stack(affine=(1, 2)), tokens()
    costs = statistics(model, x, "substitution", **{"replacement.of": "spans:2"})
    assert costs["blocks.1..2"]["value"] == pytest.approx(0, abs=1e-12)
    assert costs["blocks.0..1"]["value"] > 1e-6
    scores = statistics(model, x, "linearity", **{"sites.of": "spans:2"})
    assert scores["blocks.1..2"]["value"] == pytest.approx(1, abs=1e-12)


def test_batches_change_no_cost():
    model, x = stack(), tokens()
    first, second = (
        statistics(model, x, "substitution", **{"replacement.of": "spans:1..3", **batch})
        for batch in ({}, {"replacement.batch": 10})
    )
    for place, values in first.items():
        assert second[place] == pytest.approx(values, rel=1e-9, abs=1e-12)


def test_too_few_blocks_are_undefined():
    with pytest.raises(Undefined):
        find_places(stack(), tokens(2), "spans:5")


@pytest.mark.parametrize("of", ["spans:", "spans:0", "spans:3..2", "spans:a", "spans:1..", "spans"])
def test_bad_lengths_are_refused(of):
    with pytest.raises(RequestError):
        parse_places(of)


def test_lengths_include_both_ends():
    assert list(parse_lengths("spans:2..8")) == [2, 3, 4, 5, 6, 7, 8]
