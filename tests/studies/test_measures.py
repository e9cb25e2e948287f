"""The benchmark of measures: statistics, verdicts that follow from cells, a stranger's measure."""

import importlib.metadata
import math
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import nlbench
from nlbench import registry
from nlbench.request import Request
from nlbench.runner import run
from nlbench.store.run_folder import Run
from nlbench.studies import measures as study
from nlbench.studies.ladders import LADDERS, TWIN_LADDER, Ladder, Rung, weights_of
from nlbench.studies.measures import Measures, intraclass, order_of
from nlbench.studies.study import Context
from nlbench.subjects.facts import SubjectFacts

MORE, LESS = {"more_means": "more nonlinear"}, {"more_means": "less nonlinear"}


def cells(values, statuses="ok"):
    """Values by seed and rung."""
    rows = [(r, s, v, statuses, "because") for s, of in enumerate(values) for r, v in enumerate(of)]
    return pd.DataFrame(rows, columns=["rung", "seed", "value", "status", "reason"])


def test_tau_is_kendalls_of_each_seed_and_its_interval_students():
    values = np.random.default_rng(0).normal(size=(4, 6)).round(1)
    taus = [stats.kendalltau(range(6), row, variant="b").statistic for row in values]
    found = order_of(cells(values), MORE, LADDERS["slope"])
    assert found.tau == pytest.approx(np.mean(taus))
    low, high = stats.t.interval(0.95, 3, np.mean(taus), stats.sem(taus))
    assert (found.low, found.high) == pytest.approx((max(-1, low), min(1, high)))
    turned = order_of(cells(values), LESS, LADDERS["slope"])
    assert turned.tau == pytest.approx(-found.tau)


def test_tau_by_hand():
    # Of six pairs one is the wrong way round, then two.
    found = order_of(cells([[1, 3, 2, 4], [2, 1, 4, 3]]), MORE, LADDERS["slope"])
    assert found.tau == pytest.approx((4 / 6 + 2 / 6) / 2)
    assert found.word == "can't tell"


@pytest.mark.parametrize(
    ("values", "about", "word"),
    [
        ([[1, 2, 3], [2, 3, 4], [5, 6, 9]], MORE, "recovers"),
        ([[1, 2, 3], [2, 3, 4], [5, 6, 9]], LESS, "inverts"),
        ([[1, 2, 3, 4], [1, 2, 4, 3], [1, 2, 3, 4]], MORE, "sees"),
        ([[7, 7, 7], [7, 7, 7 + 1e-12]], MORE, "the same on every rung"),
        ([[1, 2, 3], [2, 3, 4]], {"more_means": "neither"}, "no direction"),
    ],
)
def test_what_a_measure_does_is_said_in_words(values, about, word):
    found = order_of(cells(values), about, LADDERS["slope"])
    # Two seeds of three out of four pairs: Student's interval is wide.
    assert found.word == word or (word == "sees" and found.tau == pytest.approx(8 / 9))


def test_a_measure_without_values_is_marked_with_the_reason():
    found = order_of(cells([[math.nan] * 3], "undefined"), MORE, LADDERS["slope"])
    assert found.word == "because"
    assert found.text == "–"


def test_the_intraclass_correlation_is_that_of_a_published_example():
    # Shrout and Fleiss, table 2: six targets, four judges; ICC(1, 1) is 0.17.
    table = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]
    assert intraclass(table) == pytest.approx(0.166, abs=1e-3)
    f = stats.f_oneway(*table).statistic
    assert intraclass(table) == pytest.approx((f - 1) / (f + 3))
    assert math.isnan(intraclass([[1, 1], [1, 1]]))


def test_a_ladders_rungs_are_apart_and_their_order_is_that_of_the_docs():
    for ladder in LADDERS.values():
        for number, rung in enumerate(ladder.rungs):
            name = f"{rung.model.replace('/', '-')}-{ladder.data}-quick-{rung.weights}-seed3"
            shipped = rung.weights in ("init", "trained")
            label = rung.weights if shipped else f"{name}.safetensors"
            subject = SubjectFacts(model=rung.model, weights=label, data="digits", seed=0)
            assert ladder.rung_of(subject) == number
    with pytest.raises(ValueError, match="on no rung"):
        LADDERS["slope"].rung_of(SubjectFacts(model="vgg8", weights="init", data="", seed=0))
    assert [rung.label for rung in LADDERS["slope"].rungs][::6] == ["1", "0"]
    assert all(len(ladder.seeds) >= 3 for ladder in LADDERS.values())


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


def test_what_does_not_matter_is_shown_as_kept_or_broken(made, unchecked):
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


def test_a_strangers_measure_goes_up_a_ladder(tmp_path, monkeypatch, unchecked):
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


def test_weights_of_a_rung_are_trained_once_and_named_by_what_they_are(tmp_path, monkeypatch):
    asked = []

    def trained(self, model, data, recipe="auto", seed=0, **changes):
        asked.append((model, data, recipe, seed, changes))
        return tmp_path / changes["name"]

    monkeypatch.setattr(Context, "trained", trained)
    context = Context(tmp_path, "measures", quick=True)
    ladder = Ladder("any", "digits", ())
    assert weights_of(context, ladder, Rung("", "vgg8", "trained"), 0) == "trained"
    found = weights_of(context, ladder, Rung("", "ladders/cnn", "omega0.01"), 2)
    assert found == str(tmp_path / "quick-omega0.01")
    plain, omega = asked
    assert plain[2:4] == ("adam", 2)
    assert (omega[2], omega[4]["omega"]) == ("post-training", 0.01)
    assert omega[4]["weights"] == str(tmp_path / "plain")
    weights_of(context, ladder, Rung("", "", "noise0.3"), 0)
    assert asked[-1][4]["label_noise"] == 0.3
    weights_of(context, ladder, Rung("", "", "kinks2"), 0)
    assert asked[-1][1] == "curves"
    assert asked[-1][4]["options"] == {"target": "kinks", "k": 2}
