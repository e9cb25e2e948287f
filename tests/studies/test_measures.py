"""The benchmark of measures: verdicts follow from cells, and a plugin's measure is judged."""

import itertools
import math
import statistics
from dataclasses import replace

import pandas as pd
import pytest
from distributions import add_entry_point
from made_records import with_numbers

import nlbench
from nlbench.request import Request
from nlbench.runner import run
from nlbench.store.run import Run
from nlbench.studies import measures as study
from nlbench.studies.framework import Context
from nlbench.studies.measures import Measures, _follows_reliably, _has_no_order
from nlbench.studies.shared import benchmark_results, ladder_tables
from nlbench.studies.shared.ladders import LADDERS, TWIN_LADDER
from nlbench.studies.shared.orders import WORDS, Order

NAMES = ("affinity", "absdev", "nlc", "affine-residual", "sparsity")
MODELS = tuple(rung.model for rung in LADDERS["relu"].rungs[::2])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of a few measures of constructed networks, small enough for a test."""
    folder = tmp_path_factory.mktemp("measures")
    lines = {"lines.paths": "pairs", "lines.number": 1}
    ladder = LADDERS["relu"]

    def on_ladder(part, names=NAMES, seeds=(0, 1, 2, 3, 4, 5), **options):
        settings = {**ladder.settings, **(lines if "absdev" in names else {}), **options}
        request = Request(names, MODELS, ladder.data, "init", seeds, 64, settings=settings)
        return run(request, folder / part)

    models_of_twins = tuple(rung.model for rung in TWIN_LADDER.rungs)
    settings = {**TWIN_LADDER.settings, **lines}
    twins = Request(NAMES, models_of_twins, "random", "init", (0,), 48, settings=settings)
    again = {
        f"relu.{name}": on_ladder(name, (name,), (0, 1), **{"normal.seed": 1})
        for name in ("nlc", "affinity")
    }
    return {"relu": on_ladder("relu"), "twins": run(twins, folder / "twins"), **again}


@pytest.fixture(scope="module")
def findings(made):
    return Measures().analyse(made)


def changed(runs, measure, change):
    return {part: with_numbers(run, change, measure) for part, run in runs.items()}


ORDER = "Order: Kendall's tau by ladder"
QUESTIONS = "Measures by questions: ladders seen"


def test_the_analysis_orders_and_judges_recorded_cells(made, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark_results, "FILE", tmp_path / "none.json")
    found = Measures().analyse(made)
    order = found.tables[ORDER].set_index(["measure", "ladder"])
    assert order.loc["affine-residual", "relu"].tau == 1
    assert order.loc["affinity", "relu"]["what it does"] == "recovers"
    assert order.loc["parameters", "relu"]["what it does"] == "the same on every rung"
    assert {"absdev range", "absdev chord"} <= set(order.reset_index().measure)
    (verdict,) = [v for v in found.verdicts if v.claim.startswith("Ladder relu")]
    assert verdict.agrees
    assert "affinity" in verdict.remark.partition("recovers: ")[2].partition(";")[0]
    turned = Measures().analyse(changed(made, "affine-residual", lambda value: -value))
    (verdict,) = [v for v in turned.verdicts if v.claim.startswith("Ladder relu")]
    assert verdict.agrees is False
    assert set(found.figures) == {"Criteria by measures"}


@pytest.fixture
def one_ladder(monkeypatch):
    """A benchmark whose only ladder is the one in `made`, with its seeds and samples."""
    seeds = (0, 1, 2, 3, 4, 5)
    ladder = replace(LADDERS["relu"], rungs=LADDERS["relu"].rungs[::2], seeds=seeds)
    monkeypatch.setattr(study, "LADDERS", {"relu": ladder})
    monkeypatch.setattr(study, "SAMPLES", 64)


def test_full_study_has_a_headline(made, one_ladder):
    (line,) = Measures().analyse(made).headline
    assert "1 of 1 ladders" in line
    assert "affinity" in line
    # These declare no direction, though the first recovers the ladder.
    assert "effective-rank" not in line
    assert "sparsity" not in line
    # Among them are shipped results, whose seconds are of another machine.
    assert "cheapest" not in line


@pytest.mark.parametrize("facts", [{"samples": 32}, {"seed": 9}])
def test_other_samples_or_seeds_have_no_headline(made, one_ladder, facts):
    *records, last = made["relu"].records
    records.append(replace(last, subject=replace(last.subject, **facts)))
    assert not Measures().analyse({"relu": Run(made["relu"].manifest, records)}).headline


@pytest.mark.parametrize("fact", [{"seed": 5}, {"model": MODELS[1]}])
def test_part_of_a_ladder_has_no_headline(made, one_ladder, fact):
    ((name, value),) = fact.items()
    records = [r for r in made["relu"].records if getattr(r.subject, name) != value]
    assert not Measures().analyse({"relu": Run(made["relu"].manifest, records)}).headline


def test_headline_requires_every_ladder(made, one_ladder, monkeypatch):
    monkeypatch.setattr(study, "LADDERS", {**study.LADDERS, "gelu": LADDERS["gelu"]})
    assert not Measures().analyse(made).headline


def test_headline_claims_costs_only_if_all_are_known():
    keys = itertools.product(("cheap", "dear"), ("relu", "sums"))
    order = ladder_tables.order_table(dict.fromkeys(keys, Order(0.9, p_rises=0.01)))
    precision = pd.DataFrame(
        [("dear", "relu", 2.0), ("cheap", "relu", 1.0), ("cheap", "residual", 9.0)],
        columns=["measure", "ladder", ladder_tables.TARGET_SECONDS],
    )
    measured = ["cheap", "dear"]
    activations, pairs = study._headline(order, precision, measured)
    assert "cheap, dear (cheapest first on relu" in activations
    assert "cheapest" not in pairs
    for known, here in ((precision[precision.measure == "cheap"], measured), (precision, ["dear"])):
        (activations, _) = study._headline(order, known, here)
        assert "cheapest" not in activations


def test_precision_is_that_of_networks_measured_twice(made, findings):
    table = findings.tables["Precision and cost"].set_index(["measure", "ladder"])
    row = table.loc["nlc", "relu"]
    values = {
        part: {
            (r.subject.model, r.subject.seed): r.result.summary["value"]
            for r in made[part].records
            if r.measure.name == "nlc"
        }
        for part in ("relu", "relu.nlc")
    }
    differences = [values["relu"][key] - value for key, value in values["relu.nlc"].items()]
    means = [
        statistics.mean(v for (m, _), v in values["relu"].items() if m == model) for model in MODELS
    ]
    error = (statistics.mean(d**2 for d in differences) / 2) ** 0.5
    assert row["standard error / spread"] == pytest.approx(error / statistics.stdev(means))
    needed = row.seconds * max(1, (row["standard error / spread"] / 0.02) ** 2)
    assert row[ladder_tables.TARGET_SECONDS] == pytest.approx(needed)


def test_costs_are_empty_where_a_ladder_is_not_seen(made):
    def precision(change):
        tables = Measures().analyse(changed(made, "affinity", change)).tables
        return tables["Precision and cost"].set_index(["measure", "ladder"])

    before = precision(lambda value: value).loc["affinity", "relu"]
    after = precision(lambda value: -value).loc["affinity", "relu"]
    assert before[ladder_tables.COST_COLUMNS].notna().all()
    assert after[ladder_tables.COST_COLUMNS].isna().all()
    assert after.seconds == before.seconds


def test_shipped_costs_are_of_seen_ladders():
    orders, precision = benchmark_results.shipped_results({})
    costs = precision.set_index(["measure", "ladder"])[ladder_tables.TARGET_SECONDS]
    words = orders.set_index(["measure", "ladder"])["what it does"]
    assert costs["absdev", "relu"] > 1
    assert words["cka", "residual"] == "not monotone"
    assert math.isnan(costs["cka", "residual"])


def test_shipped_results_stand_next_to_measured_ones(made, findings, monkeypatch, tmp_path):
    orders, precision = findings.tables[ORDER], findings.tables["Precision and cost"]
    orders.to_csv(tmp_path / "order-kendall-s-tau-by-ladder.csv", index=False)
    precision.to_csv(tmp_path / "precision-and-cost.csv", index=False)
    file = tmp_path / "shipped.json"
    benchmark_results.save_results(tmp_path, file)
    monkeypatch.setattr(benchmark_results, "FILE", file)
    records = [r for r in made["relu"].records if r.measure.name in ("nlc", "affine-residual")]
    alone = Measures().analyse({"relu": Run(made["relu"].manifest, records)})
    order = alone.tables[ORDER].set_index(["measure", "ladder"])
    assert order.loc["affinity", "relu"]["what it does"] == "recovers"
    ranked = set(orders.measure) - {"affine-residual"}
    assert set(alone.tables[QUESTIONS].measure) == ranked
    assert any("bundled" in remark and "affinity" in remark for remark in alone.remarks)
    assert set(alone.tables["Precision and cost"].measure) == set(precision.measure)
    assert {"nlc", "affinity"} <= set(precision.measure)
    # Shipped means are over more seeds and samples than those of this run.
    (figure,) = alone.figures.values()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "nlc" in labels
    assert "affinity" not in labels


def test_the_shipped_results_are_complete_and_small():
    orders, _ = benchmark_results.shipped_results({})
    assert benchmark_results.FILE.stat().st_size < 120_000
    constructed = {n for n, ladder in LADDERS.items() if ladder.question and not ladder.is_trained}
    assert constructed <= set(orders.ladder)
    assert {"affinity", "nlc", "affine-residual", "parameters"} <= set(orders.measure)
    judged = orders[orders["what it does"].isin(WORDS)]
    assert judged.low.le(judged.tau + 1e-3).all()
    assert judged.high.ge(judged.tau - 1e-3).all()


def test_invariances_hold_or_break_as_listed(findings):
    table = findings.tables["Invariance to what should not matter"]
    table = table.set_index("measure")
    scaled, turned, doubled = "outputs-scaled", "outputs-rotated", "doubled"
    assert table.loc["absdev", scaled] == "broken (270.0%)"
    assert table.loc["absdev range", scaled].startswith("kept")
    assert table.loc["nlc", scaled].startswith("kept")
    assert table.loc["nlc", turned].startswith("kept")
    assert table.loc["absdev", doubled].startswith("kept")
    assert table.loc["affine-residual", "cancelling"].startswith("kept")
    assert table.loc["affinity", "cancelling"].startswith("broken")
    assert table.loc["affinity", "hidden-units"].startswith("kept")


def test_published_claims_are_judged_by_cells(made):
    """Cells of another ladder stand for those of `slope` here: claims follow from numbers."""
    ladder = LADDERS["slope"]

    def cell(record, rung, seed, value):
        model = ladder.rungs[rung].model
        weights = f"{model.replace('/', '-')}-digits-plain-seed{seed}.safetensors"
        subject = replace(record.subject, model=model, weights=weights, seed=seed)
        summary = {"value": value, "over_range": value, "over_chord": value}
        return replace(record, subject=subject, result=replace(record.result, summary=summary))

    (like, *_) = [r for r in made["relu"].records if r.measure.name == "absdev"]

    def claim(values, seeds):
        records = [cell(like, r, s, v + s) for s in range(seeds) for r, v in enumerate(values)]
        found = Measures().analyse({"slope": Run(made["relu"].manifest, records)})
        table = found.tables["Exactness on affine networks and maps"]
        (verdict,) = [v for v in found.verdicts if "made linear" in v.claim]
        return verdict.word, table.set_index("measure").exact["absdev"]

    assert claim([0, 5, 4, 3, 1], 5) == ("no", "no")
    assert claim([9, 5, 4, 3, 1], 5)[0] == "no"
    assert claim([0, 1, 2, 3, 4], 5)[0] == "needs 6 networks"
    assert claim([0, 1, 2, 3, 4], 6)[0] == "yes"


def test_reliable_measures_recover_every_ladder_of_trained_networks():
    recovered = Order(1.0, 1.0, 1.0, 6, 6, p_rises=0.001)
    inverted = Order(-1.0, -1.0, -1.0, 6, 0, p_falls=0.001)
    for third, agrees in ((recovered, True), (inverted, False), (Order(0.5, 0, 1, 8), None)):
        ladders = zip(study._CNN_LADDERS, (recovered, recovered, third), strict=True)
        (verdict,) = _follows_reliably({("absdev", name): order for name, order in ladders})
        assert verdict.agrees is agrees


@pytest.mark.parametrize(
    ("order", "agrees"),
    [
        (Order(0.8, 0.6, 1.0, 5, p_rises=0.01), False),
        (Order(-0.8, -1.0, -0.6, 5, p_falls=0.01), False),
        (Order(0.1, -0.2, 0.4, 5, taus=(-0.1, 0.0, 0.1, 0.2, 0.3)), True),
        (Order(0.1, -0.4, 0.6, 5, taus=(-0.5, -0.2, 0.1, 0.4, 0.7)), None),
    ],
)
def test_interval_decides_whether_order_is_absent(order, agrees):
    decision = _has_no_order(order)
    assert decision.agrees is agrees
    assert bool(decision.needed) is (agrees is None)


def test_plugin_measure_is_put_on_a_ladder(tmp_path, monkeypatch):
    @nlbench.site_measure(bounds=(0, math.inf), more_means="more nonlinear")
    def mine(x, y):
        """Mean change, in units of the input's spread."""
        return ((y - x).abs().mean() / x.std()).item()

    add_entry_point(monkeypatch, "mine", mine)
    monkeypatch.setattr(study, "LADDERS", {"relu": LADDERS["relu"]})
    monkeypatch.setattr(
        study, "TWIN_LADDER", replace(TWIN_LADDER, rungs=TWIN_LADDER.rungs[:2], seeds=(0,))
    )
    monkeypatch.setattr(study, "QUICK_SAMPLES", 64)
    context = Context(tmp_path, "measures", quick=True, measures=("mine",))
    runs = Measures().measure(context)
    assert set(runs) == {"relu", "maps", "twins", "twins.batches", "twins.half"}
    table = Measures().analyse(runs).tables[ORDER]
    assert table.set_index(["measure", "ladder"]).loc["mine", "relu"]["what it does"] == "sees"
