"""How numbers and phrases are written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.reports.text import bounds_text, column_decimals, error_decimals, number, plus_minus

finite = st.floats(-1e300, 1e300)


def read_back(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-").replace("∞", "inf"))


@given(finite)
def test_single_numbers_have_four_digits(value: float) -> None:
    assert math.isclose(read_back(number(value)), value, rel_tol=6e-4, abs_tol=0)


@given(st.lists(finite, min_size=1, max_size=8))
def test_only_zero_reads_as_zero_in_columns(values: list[float]) -> None:
    decimals = column_decimals(values)
    for value in values:
        assert (read_back(number(value, decimals)) == 0) == (value == 0)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=8))
def test_columns_have_four_digits_of_their_largest_number(values: list[float]) -> None:
    decimals = column_decimals(values)
    for value in values:
        assert abs(read_back(number(value, decimals)) - value) <= 1e-3 * max(values)


def test_a_column_of_whole_numbers_has_no_decimals() -> None:
    assert column_decimals([3.0, 283.0, float("nan")]) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "nan"), (math.inf, "∞"), (-math.inf, "−∞"), (-0.5, "−0.5000")]
)
def test_special_numbers_are_told_apart(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e5))
def test_an_error_determines_the_digits(value: float, error: float) -> None:
    shown, _, stated = plus_minus(value, error).partition(" ± ")
    assert abs(read_back(stated) - error) <= 0.5 * 10 ** -error_decimals(error) * 1.001
    assert abs(read_back(shown) - value) <= max(0.5, 0.5 * error)
    assert len(shown.partition(".")[2]) == len(stated.partition(".")[2])


def test_small_values_share_an_exponent_with_their_error() -> None:
    assert plus_minus(2.5e-6, 1.2e-7) == "(2.50 ± 0.12)e−06"
    assert plus_minus(3.2e9, 4e7) == "(3.20 ± 0.04)e+09"


def test_tiny_spreads_are_shown_with_an_exponent() -> None:
    assert plus_minus(0.9, 1e-7) == "0.90000000 ± 0.00000010"


def test_infinite_bound_is_ignored() -> None:
    assert bounds_text([-math.inf, 1.0]) == "at most 1"
    assert bounds_text([None, math.inf]) == "unbounded"
