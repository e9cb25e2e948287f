"""The benchmark of measures: verdicts follow from cells, and a plugin's measure is judged."""

import importlib.metadata
import math
import sys
from dataclasses import replace

import pandas as pd
import pytest

import nlbench
from nlbench import registry
from nlbench.request import Request
from nlbench.runner import run
from nlbench.store.run import Run
from nlbench.studies import measures as study
from nlbench.studies.framework import Context
from nlbench.studies.measures import Measures
from nlbench.studies.shared.ladders import LADDERS, TWIN_LADDER, Rung


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two measures of random perceptrons, small enough for a test."""
    folder = tmp_path_factory.mktemp("measures")
    names = ("affinity", "accuracy", "absdev", "nlc")
    runs = {}
    for part, gains in (("gain-relu", (0.5, 2, 8)),):
        models = tuple(f"ladders/mlp-relu-gain{gain:g}-depth3" for gain in gains)
        request = Request(
            names, models, "grid", "init", (0, 1), 32,
            settings={"lines.paths": "pairs", "lines.number": 1},
        )  # fmt: skip
        runs[part] = run(request, folder / part)
    models = tuple(rung.model for rung in TWIN_LADDER.rungs)
    request = Request(
        names, models, "random", "init", (0,), 48,
        settings={**TWIN_LADDER.settings, "lines.paths": "pairs", "lines.number": 1},
    )  # fmt: skip
    return {**runs, "twins": run(request, folder / "twins")}


@pytest.fixture
def unchecked(monkeypatch):
    """Without the conformance checks, which have tests of their own."""
    monkeypatch.setattr(study, "_declared", lambda names: pd.DataFrame())


def changed(runs, measure, change):
    """The same runs with other summaries of one measure."""

    def of(record):
        if record.measure.name != measure:
            return record
        summary = {name: change(value) for name, value in record.result.summary.items()}
        return replace(record, result=replace(record.result, summary=summary))

    return {n: Run(r.manifest, [of(record) for record in r.records]) for n, r in runs.items()}


def test_the_analysis_orders_and_judges_recorded_cells(made, unchecked):
    found = Measures().analyse(made)
    order = found.tables["Order: Kendall's tau by ladder"].set_index(["measure", "ladder"])
    assert order.loc["affinity", "gain-relu"].tau == 1
    assert order.loc["accuracy", "gain-relu"]["what it does"] != "recovers"
    assert {"absdev range", "absdev chord"} <= set(order.reset_index().measure)
    (verdict,) = [v for v in found.verdicts if "gain-relu" in v.claim]
    assert "affinity" in verdict.ours.partition("recovers: ")[2].partition(";")[0]
    turned = Measures().analyse(changed(made, "affinity", lambda value: -value))
    (verdict,) = [v for v in turned.verdicts if "gain-relu" in v.claim]
    assert verdict.agrees is False
    assert verdict.ours.endswith("inverts: affinity")
    assert set(found.figures) == {"Measures by ladders"}


def test_invariances_are_kept_or_broken(made, unchecked):
    table = Measures().analyse(made).tables["Invariance to what should not matter"]
    table = table.set_index("measure")
    scaled, turned, doubled = "outputs-scaled", "outputs-rotated", "doubled"
    assert table.loc["absdev", scaled] == "broken (270.0%)"
    assert table.loc["absdev range", scaled].startswith("kept")
    assert table.loc["nlc", scaled].startswith("kept")
    assert table.loc["nlc", turned].startswith("kept")
    assert table.loc["absdev", doubled].startswith("kept")
    assert table.loc["affinity", "hidden-units"].startswith("kept")


def test_published_claims_are_judged_by_cells(unchecked, made):
    """Cells of another ladder stand for those of `slope` here: claims follow from numbers."""
    ladder = LADDERS["slope"]

    def cell(record, rung, seed, value):
        subject = replace(
            record.subject,
            model=ladder.rungs[rung].model,
            weights=f"x-plain-seed{seed}.safetensors",
            seed=seed,
        )
        summary = {"value": value, "over_range": value, "over_chord": value}
        return replace(record, subject=subject, result=replace(record.result, summary=summary))

    (like, *_) = [r for r in made["gain-relu"].records if r.measure.name == "absdev"]

    def claim(values):
        records = [cell(like, r, s, v + s) for s in range(3) for r, v in enumerate(values)]
        found = Measures().analyse({"slope": Run(made["gain-relu"].manifest, records)})
        exact = found.tables["Exactness at the affine end"].set_index("measure").exact
        (verdict,) = [v for v in found.verdicts if "leaky (slope)" in v.claim]
        return verdict.agrees, exact["absdev"]

    assert claim([0, 832, 1301, 1133, 770, 565, 449]) == (False, "no")
    assert claim([0, 1, 2, 3, 4, 5, 6])[0] is True


class Theirs:
    """What a stranger's package would be called."""

    name, version = "theirs", "1.0"


def test_a_plugin_measure_goes_up_a_ladder(tmp_path, monkeypatch, unchecked):
    @nlbench.site_measure(bounds=(0, math.inf), more_means="more nonlinear")
    def mine(x, y):
        """Mean change, in units of the input's spread."""
        return ((y - x).abs().mean() / x.std()).item()

    # As an installed package's entry point would have it.
    listed, here = registry.entry_points, sys.modules[__name__]
    monkeypatch.setattr(here, "mine", mine, raising=False)
    monkeypatch.setitem(sys.modules, "a_strangers_plugin", here)
    own = importlib.metadata.EntryPoint("mine", "a_strangers_plugin:mine", "nlbench.measures")
    own = own._for(Theirs())
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [*listed(group=group), *([own] if group == own.group else [])],
    )
    rungs = tuple(Rung(f"{g:g}", f"ladders/mlp-tanh-gain{g:g}-depth3") for g in (0.5, 8))
    short = {"gain-tanh": replace(LADDERS["gain-tanh"], rungs=rungs, quick=(), seeds=(0, 1))}
    twins = replace(TWIN_LADDER, rungs=TWIN_LADDER.rungs[:2], seeds=(0,))
    monkeypatch.setattr(study, "LADDERS", short)
    monkeypatch.setattr(study, "TWIN_LADDER", twins)
    monkeypatch.setattr(study, "SAMPLES", 32)
    context = Context(tmp_path, "measures", quick=True, measures=("mine",))
    runs = Measures().measure(context)
    assert set(runs) == {"gain-tanh", "twins", "twins.batches", "twins.half"}
    table = Measures().analyse(runs).tables["Order: Kendall's tau by ladder"]
    assert table.set_index("measure").loc["mine"]["what it does"] == "recovers"
