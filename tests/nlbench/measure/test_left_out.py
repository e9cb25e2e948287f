import functools
import re

import pytest
import torch
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.conformance.checks import Trial, check_replicates, relu_network
from nlbench.conformance.checks import samples as trial_samples
from nlbench.errors import Undefined
from nlbench.evaluation import SEED
from nlbench.execution.probe_pass import Pass
from nlbench.measure import site_measure
from nlbench.measure.contract import load_measure
from nlbench.measure.replicates import GROUPS, group_index
from nlbench.options import resolve_options
from nlbench.probes.function import FunctionBatch
from nlbench.probes.probe import Resources, load_probe
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.samples import sample_order
from nlbench.subjects.subject import Subject

N = 80


@functools.cache
def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 96), nn.ReLU(), nn.Linear(96, 7), nn.Tanh(), nn.Linear(7, 3)
    ).eval()


@functools.cache
def samples(n=N):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(0))


def evaluate(names, inputs, errors="groups", model=None, **settings):
    model = model or network()
    labels = model(samples()).argmax(1)[: len(inputs)] if "accuracy" in names else None
    inputs = before_drawing(inputs)
    labels = labels if labels is None else before_drawing(labels)
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    return nlbench.evaluate(model, inputs, names, settings=settings, labels=labels, errors=errors)


def evaluate_one(name, *arguments, **options):
    return evaluate([name], *arguments, **options)[name]


def numbers_by_place(result):
    return {
        "": result.summary.get("value"),
        **{value.place: value.statistics.get("value") for value in result.values},
    }


def assert_replicates_are(result, expected, tolerance=1e-6):
    """Compare replicates with the results on the samples without each group."""
    assert len(result.replicates) == len(expected)
    for place, replicates in (
        ("", result.replicates),
        *((value.place, value.replicates) for value in result.values if value.status == "ok"),
    ):
        values = [numbers_by_place(other)[place] for other in expected]
        assert replicates == pytest.approx(values, rel=tolerance, abs=tolerance)


DEFAULTS = (
    "affinity", "cka", "effective-rank", "norm", "entropy", "sparsity", "activation-state",
    "influence", "geometric-complexity",
)  # fmt: skip
SITE_MEASURES = [
    *((name, {}, DEFAULTS) for name in DEFAULTS),
    *(
        (name, settings, ("affinity", "cka", "r2"))
        for settings in (
            {"affinity__shrinkage": "none", "cka__debiased": True, "sites__select": "3"},
            {"cka__kernel": "rbf", "r2__kind": "adjusted", "sites__select": "3"},
        )
        for name in ("affinity", "cka", "r2")
    ),
]


@functools.cache
def runs_with_and_without_groups(names, settings):
    """Evaluate measures with all samples, and without each group."""
    groups = group_index(torch.arange(N))
    inputs = [samples(), *(samples()[groups != g] for g in range(GROUPS))]
    return [
        evaluate(names, x, "none" if number else "groups", **dict(settings))
        for number, x in enumerate(inputs)
    ]


@pytest.mark.parametrize(("name", "settings", "names"), SITE_MEASURES)
def test_replicate_is_the_value_without_a_group(name, settings, names):
    runs = runs_with_and_without_groups(names, tuple(settings.items()))
    result, *others = (run[name] for run in runs)
    assert result.status == "ok"
    assert result.error > 0
    assert_replicates_are(result, others)


def test_folds_stay_the_same_without_a_group():
    trial = Trial(load_measure("r2"), {"r2.kind": "crossvalidated", "r2.folds": 8})
    (check,) = check_replicates(trial, trial.value(relu_network(), trial_samples()))
    assert check.outcome == "kept", check.detail


def test_affine_residual_keeps_folds_of_other_samples():
    x = samples()[:24]
    measure = load_measure("affine-residual")(folds=4)
    measure.replicated = True
    measure.reset()
    measure.update(FunctionBatch(network(), x, 0, network()))
    y = network()(x).detach()
    fold, group = torch.arange(24) % 4, group_index(torch.arange(24))
    for left_out, replicate in enumerate(measure.compute().replicates):
        errors = total = 0.0
        kept = group != left_out
        for held_out in range(4):
            train, test = kept & (fold != held_out), kept & (fold == held_out)
            # More samples than inputs, so that the penalty is small.
            prediction = ridge(x[train].double(), y[train].double(), x[test].double())
            errors += float((y[test] - prediction).square().sum())
        total = float((y[kept] - y[kept].mean(0)).square().sum())
        assert replicate == pytest.approx(errors / total, rel=1e-4)


def ridge(x, y, test):
    """Predict by the ridge regression whose generalised cross-validation score is the lowest."""
    x_mean, y_mean = x.mean(0), y.mean(0)
    left, scales, right = torch.linalg.svd(x - x_mean, full_matrices=False)
    best = None
    for penalty in [0.0, *(10 ** (power / 2) for power in range(-12, 9)), float("inf")]:
        shrinkage = scales.square() / (scales.square() + penalty * scales.square().mean())
        fitted = left @ (shrinkage[:, None] * (left.T @ (y - y_mean)))
        score = (y - y_mean - fitted).square().sum() / (len(x) - 1 - shrinkage.sum()) ** 2
        if best is None or score < best[0]:
            best = score, shrinkage
    slopes = right.T @ ((best[1] / scales)[:, None] * (left.T @ (y - y_mean)))
    return y_mean + (test - x_mean) @ slopes


def test_replicates_do_not_depend_on_batches():
    names = ["r2", "cka", "norm", "linearity", "effective-rank", "entropy"]
    whole = evaluate(names, samples(), sites__select="3")
    parts = evaluate(names, samples(), sites__select="3", sites__batch=13)
    for name in names:
        assert len(whole[name].replicates) == GROUPS
        assert parts[name].replicates == pytest.approx(whole[name].replicates, rel=1e-6), name


def test_moments_are_added_in_parts():
    # Groups exceed the rows that are stored per group.
    inputs = torch.randn(400, 6, generator=torch.Generator().manual_seed(5))
    groups = group_index(torch.arange(400))
    settings = {"sites__select": "3", "sites__batch": 60}
    run = evaluate(["r2", "cka"], inputs, **settings)
    others = [
        evaluate(["r2", "cka"], inputs[groups != g], "none", **settings) for g in range(GROUPS)
    ]
    for name in ("r2", "cka"):
        assert_replicates_are(run[name], [other[name] for other in others])


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 9)
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.first(x)).mean(1)


def test_tokens_are_left_out_by_sequence():
    names = ["r2", "affinity", "linearity", "sparsity"]
    inputs = torch.randn(24, 6, 5, generator=torch.Generator().manual_seed(2))
    settings = {"sites__rows": "tokens"}
    run = evaluate(names, inputs, model=Tokens(), **settings)
    groups = group_index(torch.arange(24))
    kept = [inputs[groups != g] for g in range(GROUPS)]
    others = [evaluate(names, rows, "none", model=Tokens(), **settings) for rows in kept]
    for name in names:
        # Folds of linearity follow the numbers of the kept sequences.
        tolerance = 0.05 if name == "linearity" else 1e-6
        assert_replicates_are(run[name], [other[name] for other in others], tolerance)


def test_copies_of_a_sample_are_left_out_together():
    repeated = samples().repeat(2, 1)
    ranks = torch.empty(N, dtype=torch.long)
    index = before_drawing(torch.arange(2 * N))
    drawn = index[sample_order(repeated[index], SEED)]
    ranks[drawn[:N] % N] = torch.arange(N)
    groups = group_index(ranks).repeat(2)
    result = evaluate_one("cka", repeated)
    others = [evaluate_one("cka", repeated[groups != g], "none") for g in range(GROUPS)]
    assert_replicates_are(result, others)
    distinct = samples()[drawn[:N] % N]
    assert result.error == pytest.approx(evaluate_one("cka", distinct).error, rel=1e-5)


def test_errors_do_not_change_the_value():
    names = ["affinity", "r2", "linearity", "nlc", "substitution", "absdev"]
    with_errors = evaluate(names, samples(), lines__paths="pairs")
    without = evaluate(names, samples(), "none", lines__paths="pairs")
    for name in names:
        result, other = with_errors[name], without[name]
        assert result.summary == other.summary, name
        assert other.replicates == ()
        assert all(value.replicates == () for value in other.values)
        assert [v.statistics for v in result.values] == [v.statistics for v in other.values], name


def test_random_numbers_of_plugin_are_same_with_errors():
    @site_measure()
    def noisy(x, y):
        """Random number."""
        return x.mean() + torch.rand(()).item()

    values = [
        nlbench.evaluate(network(), samples(), [noisy], settings={"sites.batch": 20}, errors=e)
        for e in ("groups", "none")
    ]
    assert values[0]["noisy"].summary["value"] == values[1]["noisy"].summary["value"]


def test_plugin_that_fails_without_group_has_no_error():
    @site_measure()
    def whole(x, y):
        """Mean, of all samples only."""
        if len(x) < N:
            raise ValueError("too few")
        return x.mean()

    result = nlbench.evaluate(network(), samples(), [whole])["whole"]
    assert result.status == "ok"
    assert result.error is None


def test_value_undefined_without_a_group_has_no_error():
    @site_measure()
    def large(x, y):
        """Mean, of enough samples only."""
        if len(x) < 20:
            raise Undefined("too few")
        return x.mean()

    result = nlbench.evaluate(network(), samples(), [large], settings={"sites.batch": 20})["large"]
    assert result.status == "ok"
    assert result.error is None
    assert result.values[0].reason == "no standard error: without a group of samples: too few"


@pytest.mark.parametrize("measure", ["r2", "cka", "linearity", "affinity"])
def test_relu_dead_without_a_group_has_no_error(measure):
    inputs = samples().clamp(-2, 2)
    inputs[5, 0] = 4.0
    model = nn.Sequential(nn.Linear(6, 1), nn.ReLU(), nn.Linear(1, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6)[:1])
        model[0].bias.fill_(-3.0)
    (value,) = nlbench.evaluate(model, inputs, [measure])[measure].values
    assert value.status == "ok"
    assert value.error is None
    assert value.reason == "no standard error: without a group of samples: constant output"


@pytest.mark.parametrize("measure", ["cka", "affinity", "effective-rank", "linearity"])
def test_three_samples_have_no_error_of_zero(measure):
    result = nlbench.evaluate(network(), samples()[:3], [measure])[measure]
    assert result.status == "ok"
    assert result.error != 0


@pytest.mark.parametrize("memory", [6000, 12_000])
@pytest.mark.parametrize("measure", ["r2", "linearity", "cka"])
def test_groups_keep_to_the_memory(measure, memory):
    facts = SubjectFacts(model="mlp", weights="none", data="normal", seed=0)
    subject = Subject(network(), samples(), None, facts)
    options = load_probe("sites").options
    settings = resolve_options(options, {"select": "3"}, owner="sites")
    resources = Resources(torch.device("cpu"), memory=memory)
    kind = load_measure(measure)
    (outcome,) = Pass(subject, "sites", settings, resources).observe([(kind, kind().settings, "")])
    (value,) = outcome.result.values
    assert value.status == "ok"
    if memory == 6000:
        assert value.replicates == ()
        expected = r"no standard error: moments of 8 groups take \d.* KiB, --memory is 5.859 KiB"
        assert re.fullmatch(expected, value.reason)
    else:
        unlimited = evaluate_one(measure, samples(), sites__select="3")
        assert value.replicates == pytest.approx(unlimited.replicates)


def test_paths_are_left_out():
    result = evaluate_one("absdev", samples(), lines__paths="pairs", lines__number=4)
    values = [value.statistics["value"] for value in result.values]
    expected = [(sum(values) - value) / 3 for value in values]
    assert result.replicates == pytest.approx(expected)
    assert all(value.error is None for value in result.values)
    many = evaluate_one("absdev", samples(), lines__paths="pairs", lines__number=10)
    assert len(many.replicates) == GROUPS


def test_nlc_of_an_affine_network_has_no_error():
    result = evaluate_one("nlc", samples(), model=nn.Linear(6, 3))
    assert result.replicates == pytest.approx([1.0] * GROUPS, abs=1e-5)
    assert evaluate_one("nlc", samples()).error > 1e-3


def test_substitution_leaves_out_evaluated_samples():
    result = evaluate_one("substitution", samples())
    assert len(result.values[0].replicates) == GROUPS
    assert result.values[0].error > 0


def test_exact_measures_are_declared_exact():
    run = nlbench.evaluate(network(), samples(), ["pathlength", "r2"])
    assert [record.measure.exact for record in run.records] == [True, None]
    assert run["pathlength"].error is None
    empirical = nlbench.evaluate(
        network(), samples(), ["pathlength"], settings={"pathlength.empirical": True}
    )
    assert empirical.records[0].measure.exact is None
