import re

import pytest
import torch
from torch import nn

from nlbench.errors import Undefined
from nlbench.options import resolve_options
from nlbench.probes import Resources
from nlbench.probes.lines import LINES, trace_segments
from nlbench.probes.lines.forecast import forecast
from nlbench.probes.lines.quadrature import integrate_along
from nlbench.subjects.subject import Subject


def dense(act=nn.ReLU, width=64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 3)
    )


INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def predict(model, inputs=INPUTS, **options):
    settings = resolve_options(LINES.options, {"paths": "pairs", **options}, owner="lines")
    resources = Resources(torch.device("cpu"))
    return forecast(model, Subject(model, inputs, None, {}), settings, resources)


def passes(text):
    return int(re.search(r"([\d,]+) forward passes", text)[1].replace(",", ""))


def test_an_exact_trace_is_predicted_to_take_one_pass_per_region():
    model = dense().eval()
    text = predict(model, number=4)
    traces = trace_segments(model, INPUTS[:8:2], INPUTS[1:8:2])
    regions = sum(trace.regions for trace in traces)
    assert "auto uses exact" in text
    # The forecast has two digits, and nine points miss boundaries that are crossed twice.
    assert 0.9 * regions < passes(text) < 1.1 * regions
    assert passes(predict(model, number=4, method="adaptive")) == pytest.approx(
        2 * regions, rel=0.1
    )


def test_segments_above_the_budget_are_predicted_to_be_refined():
    text = predict(dense(), number=2, budget=10)
    assert "auto uses refined" in text
    assert 2 * 33 <= passes(text) <= 2 * 4096


def test_mixed_methods_are_forecast():
    inputs = INPUTS.clone()
    inputs[1] = inputs[0]  # The first segment has no length.
    assert "auto uses refined on 1 of 2, else exact" in predict(
        dense(), inputs[:4], number=2, budget=10
    )


def test_sampling_passes_follow_from_the_resolution():
    assert passes(predict(dense(), number=3, method="sampling", resolution=50)) == 3 * 51


def test_a_smooth_network_is_predicted_to_be_integrated():
    model = dense(nn.GELU).eval()
    text = predict(model, number=4, evaluations=2000)
    assert text.startswith("4 segments: by quadrature, predicted from one of them")
    assert "at most 8,000 passes (gelu at 1" in text
    estimates = integrate_along(model, INPUTS[:8:2], INPUTS[1:8:2], evaluations=2000)
    assert passes(text) == pytest.approx(sum(e.evaluations for e in estimates), rel=0.5)


def test_there_is_no_forecast_where_there_are_no_lines():
    with pytest.raises(Undefined, match="no lines"):
        predict(nn.Embedding(3, 4), torch.zeros(4, 2, dtype=torch.int64))
