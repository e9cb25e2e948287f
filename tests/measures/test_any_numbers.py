"""Whatever the numbers, a site measure gives one that is finite, or the reason why not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import NotFinite, Undefined
from nlbench.measure.contract import validated_result
from nlbench.measures.affinity import Affinity, affinity_score
from nlbench.measures.cka import CKA, linear_cka, rbf_cka
from nlbench.measures.entropy import Entropy
from nlbench.measures.norm import Norm
from nlbench.measures.r2 import R2, r2_score
from nlbench.measures.sparsity import Sparsity

from streams import read

# Few different ones, so that columns are constant, samples equal and channels dead at times.
ordinary = [0.0, 1.0, -1.0, 0.5, 3.0]
extreme = [*ordinary, 1e-3, 1e300, -1e300, 5e-324, 1e-160, 1e154, math.nan, math.inf, -math.inf]

MEASURES = {
    "affinity": Affinity(),
    "affinity without shrinkage": Affinity(shrinkage="none"),
    "affinity without ridge": Affinity(shrinkage="none", ridge=0),
    "cka": CKA(),
    "debiased cka": CKA(debiased=True),
    "gaussian cka": CKA(kernel="rbf"),
    "r2": R2(),
    "adjusted r2": R2(kind="adjusted"),
    "crossvalidated r2": R2(kind="crossvalidated"),
    "norm": Norm(),
    "absolute norm": Norm(kind="absolute"),
    "sparsity": Sparsity(),
    "entropy": Entropy(),
}


@st.composite
def batches(draw, numbers):
    """Up to three batches of an input and an output of one width."""
    width = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, 7))
        values = draw(st.lists(st.sampled_from(numbers), min_size=2 * n * width, max_size=None))
        block = torch.tensor(values[: 2 * n * width], dtype=torch.float64).reshape(2, n, width)
        found.append((block[0], block[1]))
    return found


@pytest.mark.parametrize("name", MEASURES)
@given(data=st.data())
def test_reading_has_a_finite_value_or_a_reason(name, data):
    given_batches = data.draw(batches(data.draw(st.sampled_from([ordinary, extreme]))))
    result = read(MEASURES[name], given_batches)
    (value,) = result.values
    if value.status == "ok":
        measure = MEASURES[name]
        assert validated_result(result, measure.bounds_of(measure.settings)) is result
    else:
        assert value.status in ("undefined", "failed")
        assert value.reason
        assert not result.summary
    bad = any(not torch.isfinite(part).all() for pair in given_batches for part in pair)
    assert not (bad and value.status == "ok")


SCORES = {
    "affinity": affinity_score,
    "cka": linear_cka,
    "gaussian cka": rbf_cka,
    "r2": r2_score,
    "crossvalidated r2": lambda x, y: r2_score(x, y, kind="crossvalidated"),
}


@pytest.mark.parametrize("name", SCORES)
@given(data=st.data())
def test_finite_score_is_at_most_one_or_undefined(name, data):
    ((x, y), *_) = data.draw(batches(ordinary))
    try:
        score = SCORES[name](x, y).item()
    except Undefined:
        return
    assert score <= 1 + 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCORES)
def test_non_finite_side_is_named(name, bad):
    x = torch.randn(9, 2)
    y = x.clone()
    y[4, 1] = bad
    for sides, side in (((x, y), "y:"), ((y, x), "x:")):
        with pytest.raises(NotFinite, match=side):
            SCORES[name](*sides)
