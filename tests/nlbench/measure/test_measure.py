import math
import statistics
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nlbench
from nlbench.errors import PluginError, RequestError, Undefined
from nlbench.measure import (
    Accumulator,
    Measure,
    PooledMeasure,
    Result,
    Value,
    site_measure,
    summarize,
)
from nlbench.measure.result import MIN_DEFINED_FRACTION
from nlbench.options import Option
from nlbench.probes.sites.site import Site, SiteBatch


def observation(place, x, y, batch=0):
    return SiteBatch(Site(place, "relu", 0, (x.shape[1],), 1), batch, x, y)


@site_measure(options={"factor": Option(1.0)})
def mean_change(x, y, factor):
    """Mean change."""
    if len(x) < 2:
        raise Undefined("needs 2 samples")
    return factor * (y - x).mean()


def read(measure, observations):
    measure.reset()
    for one in observations:
        measure.update(one)
    return measure.compute()


def test_function_measure_has_mean_and_deviation_over_batches():
    batches = [torch.randn(8, 3) for _ in range(4)]
    result = read(mean_change(), [observation("a", x, x.relu(), i) for i, x in enumerate(batches)])
    scores = [(x.relu() - x).mean().item() for x in batches]
    (value,) = result.values
    assert value.statistics["value"] == pytest.approx(statistics.fmean(scores))
    assert value.statistics["std"] == pytest.approx(np.std(scores))
    assert value.n == 32
    assert result.status == "ok"


class _Total(Accumulator):
    alive: ClassVar = weakref.WeakSet()

    def __init__(self):
        self.sum = 0.0
        self.alive.add(self)

    def add(self, x, y):
        self.sum += y.sum().item()

    def statistics(self):
        return {"value": self.sum}


class _Totals(PooledMeasure):
    def accumulator(self):
        return _Total()


class _MostAlive(_Totals):
    """Record how many accumulators exist at once."""

    most = 0

    def update(self, observation):
        super().update(observation)
        _MostAlive.most = max(_MostAlive.most, len(_Total.alive))


@pytest.mark.parametrize(("batch", "most"), [(8, 0), (4, 3)])
def test_sites_release_state_after_last_batch(batch, most):
    _MostAlive.most = 0
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.ReLU())
    x = torch.randn(8, 3)
    settings = {"sites.batch": batch}
    run = nlbench.evaluate(model, x, [_MostAlive], errors="none", settings=settings)
    assert _MostAlive.most == most
    outputs = (x.relu(), x.relu().tanh(), x.relu().tanh())
    values = [value.statistics["value"] for value in run[_MostAlive.name].values]
    assert values == pytest.approx([output.sum().item() for output in outputs], rel=1e-5)


def test_an_option_reaches_the_function():
    x = torch.randn(8, 3)
    once = read(mean_change(), [observation("a", x, x.relu())]).summary["value"]
    twice = read(mean_change(factor="2"), [observation("a", x, x.relu())]).summary["value"]
    assert twice == pytest.approx(2 * once)


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(RequestError, match="'factor'"):
        mean_change(facter=1.0)


def test_undefined_place_is_left_out_of_summary():
    x = torch.randn(8, 3)
    observations = [observation("a", x, x.relu()), observation("b", x[:1], x[:1])]
    result = read(mean_change(), observations)
    assert [value.status for value in result.values] == ["ok", "undefined"]
    assert result.values[1].reason == "needs 2 samples"
    assert result.summary["value"] == result.values[0].statistics["value"]


def some_undefined(measured, total):
    missing = [Value.missing(f"m{i}", "undefined", "constant output", 8) for i in range(total)]
    return Result.of(
        [Value(f"p{i}", {"value": 1.0}, 8) for i in range(measured)] + missing[measured:]
    )


def test_partial_summary_counts_its_places():
    result = some_undefined(3, 4)
    assert (result.status, result.summary["value"]) == ("ok", 1.0)
    assert result.places == (3, 4)
    assert result.reason == "mean of 3 of 4 places (1 undefined)"


def test_complete_summary_has_no_remark():
    result = some_undefined(4, 4)
    assert (result.places, result.reason) == ((4, 4), "")


@given(st.integers(1, 40), st.data())
def test_too_few_places_have_no_summary(total, data):
    measured = data.draw(st.integers(1, total))
    result = some_undefined(measured, total)
    assert result.places == (measured, total)
    if measured < MIN_DEFINED_FRACTION * total:
        assert (result.status, result.summary) == ("undefined", {})
        assert result.reason == f"{measured} of {total} places: constant output"
        assert sum(value.status == "ok" for value in result.values) == measured
    else:
        assert result.status == "ok"


def test_reading_without_defined_place_is_undefined():
    x = torch.randn(1, 3)
    result = read(mean_change(), [observation("a", x, x)])
    assert (result.status, result.reason, result.summary) == ("undefined", "needs 2 samples", {})


def test_reasons_with_other_numbers_stand_once():
    reasons = ["64 rows for 128 inputs", "64 rows for 256 inputs", "constant output"]
    values = [Value.missing(f"{i}", "undefined", reason) for i, reason in enumerate(reasons)]
    expected = "64 rows for 128 inputs (and 1 alike with other numbers); constant output"
    assert Result.of([*values, values[0]]).reason == expected


def test_non_finite_score_fails_and_names_the_place():
    x = torch.full((4, 2), math.nan)
    good = torch.randn(4, 2)
    result = read(mean_change(), [observation("a", good, good), observation("b", x, x)])
    assert result.status == "failed"
    assert result.reason.startswith("b: ")
    assert result.summary == {}
    assert result.values[0].status == "ok"


def test_batch_without_value_is_left_out_with_remark():
    x = torch.randn(8, 3)
    result = read(mean_change(), [observation("a", x, x.relu()), observation("a", x[:1], x[:1], 1)])
    (value,) = result.values
    assert value.status == "ok"
    assert value.statistics["batches"] == 1
    assert "needs 2 samples" in value.reason


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_summary_statistics_agree_with_numpy(numbers):
    summary = summarize(numbers)
    expected = {
        "value": np.mean(numbers),
        "std": np.std(numbers),
        "min": np.min(numbers),
        "max": np.max(numbers),
        "median": np.median(numbers),
        "spread": np.ptp(numbers),
    }
    assert summary == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_reading_of_a_mapping_keeps_order_and_counts():
    result = Result.of({"second": 2.0, "first": 1.0}, n=7)
    assert [value.place for value in result.values] == ["second", "first"]
    assert result.n == 7


def test_class_measure_returning_infinity_fails():
    result = Result.of([Value("a", {"value": math.inf}), Value("b", {"value": 1.0})])
    assert result.status == "failed"


def test_abstract_measure_cannot_be_instantiated():
    class Half(Measure):
        probe = "sites"

    with pytest.raises(TypeError):
        Half()


def test_class_name_is_the_default_name():
    class Jump(mean_change):
        pass

    class Other(mean_change):
        name = "another"

    assert (Jump.name, Other.name) == ("jump", "another")


def test_parts_are_spelled_for_tables():
    parts = {"segment": [np.float32(1), torch.tensor(2.0)], "site": {"a/relu": 3}}
    value = Value("path0", {"value": 3}, parts=parts)
    assert value.parts == {"segment": (1.0, 2.0), "site": {"a/relu": 3.0}}
    assert value.numbers == {"value": 3.0, "segment0": 1.0, "segment1": 2.0, "site:a/relu": 3.0}
    assert Result({"value": 3}, parts=parts).numbers == value.numbers


def test_non_finite_part_fails_the_place():
    assert Result.of([Value("a", {"value": 1.0}, parts={"p": [math.nan]})]).status == "failed"


class Largest(Accumulator):
    def __init__(self):
        self.largest = -math.inf

    def add(self, x, y):
        if len(x) == 3:
            raise Undefined("three samples")
        self.largest = max(self.largest, float((y - x).max()))

    def statistics(self):
        if self.largest == -math.inf:
            raise Undefined("no samples")
        return {"value": self.largest}


class Peaks(PooledMeasure):
    """Largest change."""

    def accumulator(self):
        return Largest()


def test_pooled_measure_has_one_value_per_site():
    xs = [torch.randn(8, 3) for _ in range(4)]
    result = read(Peaks(), [observation("a", x, x.relu(), i) for i, x in enumerate(xs)])
    (value,) = result.values
    assert value.statistics == {"value": max((x.relu() - x).max().item() for x in xs)}
    assert (value.n, value.status, value.reason) == (32, "ok", "")


def test_pooled_measure_lists_undefined_sites_with_reasons():
    x, few = torch.randn(8, 3), torch.randn(3, 3)
    result = read(Peaks(), [observation("a", x, x.relu()), observation("b", few, few)])
    assert [(v.status, v.reason) for v in result.values] == [
        ("ok", ""),
        ("undefined", "three samples"),
    ]


@pytest.mark.parametrize(
    ("returned", "mend"),
    [
        (None, "returned None, expected one number; end it with `return`"),
        (torch.zeros(8), "a Tensor of 8 numbers, expected one number; return its mean()"),
        (np.zeros(3), "a ndarray of 3 numbers, expected one number; return its mean()"),
        ("text", "returned a str, expected one number"),
        (torch.tensor(1j), "returned a complex number, expected one number"),
        (np.complex64(1j), "returned a complex number, expected one number"),
    ],
)
def test_non_numeric_function_raises(returned, mend):
    @site_measure()
    def wrong(x, y):
        return returned

    with pytest.raises(PluginError) as error:
        read(wrong(), [observation("a", torch.zeros(8, 2), torch.zeros(8, 2))])
    assert mend in str(error.value)


def test_site_measure_needs_no_parentheses():
    @site_measure
    def shift(x, y):
        """Mean difference of an activation's output and input."""
        return (y - x).mean()

    x = torch.zeros(8, 2)
    run = nlbench.evaluate(torch.nn.ReLU(), x - 1, measures=[shift])
    assert (shift.name, shift.more_means) == ("shift", "neither")
    assert run.scores.query("statistic == 'value'")["value"].tolist() == [1.0, 1.0]


def test_site_measure_has_a_name_of_its_own():
    assert site_measure(name="mean-shift")(lambda x, y: (y - x).mean()).name == "mean-shift"
