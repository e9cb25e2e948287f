"""A metric of torchmetrics that takes two tensors is a site measure as it is."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import r2_score
from torch import nn

import nlbench
from nlbench.errors import PluginError, RequestError
from nlbench.measure import metric_measure
from nlbench.measure.contract import as_measure

from streams import batches_of, read


@pytest.fixture(scope="module", autouse=True)
def library():
    """Import it here, since every worker collects this file and one runs it."""
    global torchmetrics
    torchmetrics = pytest.importorskip("torchmetrics")


def samples(n=40, d=3):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    return x, torch.tanh(2 * x) + 0.5


def value_of(metric, x, y, size=16):
    result = read(metric_measure(metric)(), batches_of(x, y, size))
    assert result.status == "ok", result.reason
    return result.summary["value"]


def test_r2_of_batches_equals_scikit_learn():
    x, y = samples()
    expected = r2_score(y.double().numpy(), x.double().numpy())
    assert value_of(torchmetrics.R2Score(), x, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("metric", "reference"), [("PearsonCorrCoef", pearsonr), ("SpearmanCorrCoef", spearmanr)]
)
@pytest.mark.parametrize("d", [1, 3])
def test_metric_of_one_output_has_mean_over_columns(metric, reference, d):
    x, y = samples(d=d)
    a, b = x.double().numpy(), y.double().numpy()
    expected = np.mean([reference(a[:, j], b[:, j]).statistic for j in range(d)])
    metric = getattr(torchmetrics, metric)()
    assert value_of(metric, x, y) == pytest.approx(expected, rel=1e-6)


def test_matrix_metric_receives_a_matrix():
    x, y = samples()
    rmse = torchmetrics.MeanSquaredError(squared=False)
    expected = math.sqrt((x.double() - y.double()).square().mean())
    assert value_of(rmse, x, y) == pytest.approx(expected, rel=1e-12)


def test_columns_without_number_are_left_out_and_counted():
    x, y = samples()
    y[:, 1] = 2.0
    result = read(metric_measure(torchmetrics.PearsonCorrCoef())(), [(x, y)])
    expected = np.mean([pearsonr(x[:, j], y[:, j]).statistic for j in (0, 2)])
    assert result.summary["value"] == pytest.approx(expected, rel=1e-6)
    assert result.values[0].reason == "mean of 2 of 3 columns; the others are NaN"


def test_a_site_without_any_number_is_undefined():
    x, _ = samples()
    result = read(metric_measure(torchmetrics.PearsonCorrCoef())(), [(x, torch.ones_like(x))])
    assert (result.status, result.reason) == ("undefined", "PearsonCorrCoef is NaN")


def test_non_finite_numbers_fail_the_site():
    x, y = samples()
    y[0, 0] = math.nan
    result = read(metric_measure(torchmetrics.R2Score())(), [(x, y)])
    assert result.status == "failed"
    assert "the output has entries that are not finite" in result.reason


def test_metric_error_fails_the_site_with_its_message():
    x, y = samples()
    result = read(metric_measure(torchmetrics.R2Score())(), [(x, y[:, :2])])
    assert result.status == "failed"
    assert "R2Score: Predictions and targets are expected to have the same shape" in result.reason


def test_original_metric_is_unchanged():
    x, y = samples()
    metric = torchmetrics.R2Score()
    value_of(metric, x, y)
    assert metric.update_count == 0
    metric.update(x[:8], x[:8] + 1)
    assert value_of(metric, x, y) == value_of(torchmetrics.R2Score(), x, y)


def test_metric_options_are_part_of_its_version():
    plain = metric_measure(torchmetrics.R2Score()).version
    assert plain == metric_measure(torchmetrics.R2Score()).version
    assert plain != metric_measure(torchmetrics.R2Score(adjusted=2)).version


def test_metric_runs_with_registered_measures():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    metrics = [torchmetrics.R2Score(), torchmetrics.PearsonCorrCoef, "r2"]
    run = nlbench.evaluate(model, torch.randn(60, 4), metrics)
    assert [record.result.status for record in run.records] == ["ok"] * 3
    assert [value.place for value in run["r2score"].values] == ["1", "3"]
    versions = {r.measure.name: r.measure.version for r in run.records}
    assert versions["pearsoncorrcoef"].startswith("torchmetrics ")


def test_instance_class_and_factory_get_registered_name():
    metric = torchmetrics.R2Score
    for given in (metric(), metric, lambda: metric()):
        assert as_measure(given, "mine").name == "mine"


def test_unusable_metric_factory_raises():
    for factory in (torchmetrics.MinkowskiDistance, lambda: 3):
        with pytest.raises(PluginError):
            as_measure(factory, "mine")


def test_two_metrics_of_one_name_are_refused():
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(20, 4)
    metrics = [torchmetrics.R2Score(), torchmetrics.R2Score(adjusted=2)]
    with pytest.raises(RequestError, match="'r2score'"):
        nlbench.evaluate(model, inputs, metrics)
