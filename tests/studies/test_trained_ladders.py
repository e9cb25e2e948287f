"""Ladders planted in trained networks are measured, and judged from recorded cells."""

import re

import pytest
from made_records import with_numbers

from nlbench.studies import trained_ladders as study
from nlbench.studies.framework import Context
from nlbench.studies.shared.orders import Order
from nlbench.studies.trained_ladders import SHIPPED, TrainedLadders

ORDER = "Order: Kendall's tau by network"
EXTENT = "What was measured, and what was not"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    names = ("r2", "affine-residual")
    context = Context(tmp_path_factory.mktemp("trained"), "trained-ladders", True, measures=names)
    return TrainedLadders().measure(context)


def test_rungs_lead_to_the_original_network(runs):
    order = TrainedLadders().analyse(runs).tables[ORDER].set_index(["measure", "ladder"])
    for plant in SHIPPED:
        assert order.loc["affine-residual", plant.name].tau == 1
    assert order.loc["r2", "vgg8 blended"]["what it does"] == "sees"


def test_measures_that_fall_are_counted(runs):
    turned = {name: with_numbers(run, lambda value: -value) for name, run in runs.items()}
    for changed, ours in ((runs, "1 of 1"), (turned, "0 of 1 networks; vgg8 blended: inverts")):
        verdicts = TrainedLadders().analyse(changed).verdicts
        (verdict,) = [v for v in verdicts if v.claim.startswith("r2") and "blended" in v.claim]
        assert verdict.ours.startswith(ours)
        assert verdict.word == "needs 6 architectures"


def test_sizes_of_one_architecture_count_once():
    seen = Order(0.9, p_rises=0.001)
    names = [plant.name for plant in study.PLANTS if plant.of == "blend"]
    names = [name for name in names if re.match("vgg|neuralfoil|crepe|efficientnet", name)]
    (verdict,) = study._verdicts({("r2", name): seen for name in names})
    assert len(names) == 9
    assert verdict.word == "needs 6 architectures"
    others = [f"other{letter * 3} blended" for letter in "ab"]
    (verdict,) = study._verdicts({("r2", name): seen for name in names + others})
    assert verdict.word == "yes"


def test_architecture_of_many_sizes_has_one_vote():
    seen = Order(0.9, p_rises=0.001)
    falls = Order(-0.9, p_falls=0.001)
    orders = {("r2", f"large-{size} blended"): seen for size in range(40)}
    orders |= {("r2", f"other{letter * 3} blended"): seen for letter in "abcde"}
    orders |= {("r2", f"other{letter * 3} blended"): falls for letter in "fgh"}
    (verdict,) = study._verdicts(orders)
    assert verdict.ours.startswith("45 of 48 networks")
    assert verdict.word == "can't tell"


def test_architecture_seen_in_half_of_its_sizes_does_not_count():
    holds = {"large-1 blended": True, "large-2 blended": False, "small-1 blended": True}
    assert study._by_family(holds) == [False, True]


def test_missing_packages_are_named(runs, monkeypatch):
    monkeypatch.setattr(study.Plant, "problem", property(lambda self: "something isn't installed"))
    extent = TrainedLadders().analyse(runs).tables[EXTENT]
    assert extent.set_index("network")["not run"]["crepe-tiny blended"].startswith("something")


def test_measures_without_cells_are_listed(runs):
    extent = TrainedLadders().analyse(runs).tables[EXTENT].set_index("network")["not run"]
    groups = dict(
        group.split(": ")[::-1] for group in extent["vgg8 affine activations"].split("; ")
    )
    assert groups["minutes a network"] == "absdev, pieces"
    assert "nlc" in groups["not in this run"].split(", ")
    assert "r2" not in ", ".join(groups.values()).split(", ")
    # The quick version skips these.
    assert extent["vgg8 blended"].endswith("absdev, pieces: not in this run")


def test_omitted_measure_with_cells_is_not_listed():
    (crepe,) = [plant for plant in study.PLANTS if plant.name == "crepe-full blended"]
    assert "r2: " in study._describe_missing(crepe, ())
    assert study._describe_missing(crepe, study.MEASURES) == ""
    text = study._describe_missing(crepe, ("r2", "pieces"))
    assert "absdev: minutes a network" in text
    assert "r2" not in text
    assert "pieces" not in text
