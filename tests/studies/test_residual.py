"""Two modes against one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_signatures import make_signatures

from nlbench.studies.residual import Residual, separation

CLAIMS = ("two modes", "one", "near 1", "above", "with training")


def blocks(first, second):
    rng = np.random.default_rng(0)
    return {"relu": 0.5} | {
        f"blocks.{block}.relu{which}": float(level + rng.normal(0, 0.01))
        for block in range(9)
        for which, level in ((1, first), (2, second))
    }


def answers(second_residual=0.95, second_plain=0.6, before=0.6, seeds=6):
    run = make_signatures(
        {
            (model, weights, "digits", seed): blocks(0.6, second)
            for seed in range(seeds)
            for model, weights, second in (
                ("resnet20", "file", second_residual),
                ("plain20", "file", second_plain),
                ("resnet20", "calibrated", before),
                ("plain20", "calibrated", before),
            )
        }
    )
    findings = Residual().analyse({"run": run})
    assert len(findings.figures) == len(findings.tables) == 1
    return dict(zip(CLAIMS, (v.agrees for v in findings.verdicts), strict=True))


def test_number_of_modes_is_found():
    assert all(answers().values())


@pytest.mark.parametrize(
    ("changed", "claims"),
    [
        ({"second_residual": 0.6}, {"two modes", "near 1", "with training"}),
        ({"second_plain": 0.95}, {"one"}),
        ({"second_residual": 0.8}, {"near 1"}),
        ({"before": 0.95}, {"with training"}),
    ],
)
def test_each_verdict_follows_its_own_numbers(changed, claims):
    found = answers(**changed)
    assert claims <= {claim for claim, agrees in found.items() if not agrees}
    kept = set(CLAIMS) - claims - {"above"}
    assert all(found[claim] for claim in kept)


@pytest.mark.parametrize("changed", [{}, {"second_residual": 0.6, "second_plain": 0.95}])
def test_two_networks_are_undecided(changed):
    assert set(answers(seeds=2, **changed).values()) == {None}


def test_further_networks_never_weaken_a_verdict():
    """The ReLU after the addition is the more linear one in every block of every network."""
    words = [answers(seeds=seeds)["above"] for seeds in (3, 5, 6, 7, 8)]
    assert words == [None, None, True, True, True]


def test_sites_outside_blocks_do_not_count():
    # The stem's score of 0.5 would widen the first ReLUs' mode.
    run = make_signatures(
        {(m, "file", "digits", 0): blocks(0.6, 0.9) for m in ("resnet20", "plain20")}
    )
    table = (
        Residual().analyse({"run": run}).tables["Separation of first and second ReLUs of blocks"]
    )
    assert abs(table["first ReLU"] - 0.6).max() < 0.02


@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=9),
    st.lists(st.floats(0, 1), min_size=3, max_size=9),
    st.floats(0.1, 10),
    st.floats(-1, 1),
)
def test_separation_depends_on_neither_units_nor_order(x, y, unit, offset):
    one, other = np.array(x), np.array(y)
    if one.std() + other.std() > 1e-3:
        there = separation(unit * other + offset, unit * one + offset)
        assert there == pytest.approx(separation(one, other), rel=1e-9, abs=1e-9)
