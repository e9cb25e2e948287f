"""The published integral, which differs from the measure."""

import pytest
import torch
from scipy.integrate import quad

import nlbench
from nlbench import registry
from nlbench.probes.lines import estimate_segment, trace_segment
from nlbench.studies.published_integral import (
    AbsdevAsPublished,
    PublishedIntegral,
    estimate_as_published,
    integral_as_published,
)


def network(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers).double()


def test_equals_integral_of_absolute_offset_and_slope():
    trace = trace_segment(network(), torch.full((3,), -2.0), torch.tensor([2.0, 1.0, 3.0]))
    t, values = trace.t, trace.values
    found = integral_as_published(t, values, trace.length)
    for logit in range(2):
        total = 0.0
        for i in range(trace.regions):
            chord = [
                float(values[0, logit] + s * (values[-1, logit] - values[0, logit]))
                for s in (t[i], t[i + 1])
            ]
            first, last = (float(values[i + k, logit]) - chord[k] for k in (0, 1))
            b = (last - first) / float(t[i + 1] - t[i])
            a = first - b * float(t[i])
            total += quad(lambda s, a=a, b=b: abs(a) + abs(b) * s, float(t[i]), float(t[i + 1]))[0]
        assert float(found[logit]) == pytest.approx(trace.length * total)


def test_the_study_compares_both_segment_by_segment():
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = nlbench.evaluate(
        network(), 3 * inputs, ["absdev", AbsdevAsPublished], settings={"lines.paths": "random"}
    )
    findings = PublishedIntegral().analyse({"run": run})
    table = findings.tables["Segment by segment"]
    assert len(table) == 4 * 8
    assert (table["as published"] >= table["as defined"] - 1e-9).all()
    assert table["as defined"][0] == run["absdev"].values[0].parts["segment"][0]
    assert findings.verdicts[0].agrees


def test_published_integral_is_not_registered():
    assert AbsdevAsPublished.name not in registry.entries("measures")
    assert AbsdevAsPublished.more_means == "neither"


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_without_regions_is_near_the_integral(seed):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(3, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(300, 2)).double()
    ends = torch.full((3,), -2.0), torch.tensor([2.0, 1.0, 3.0])
    trace = trace_segment(model, *ends)
    exact = integral_as_published(trace.t, trace.values, trace.length)
    estimate = estimate_segment(model, *ends, tolerance=0.02)
    found, error = estimate_as_published(estimate)
    assert len(estimate.t) < trace.regions / 5
    assert ((found - exact).abs() <= error).all()
    assert found.tolist() == pytest.approx(exact.tolist(), rel=0.04)


def test_estimated_paths_have_errors():
    def measured(model, **options):
        settings = {f"lines.{name}": value for name, value in options.items()}
        run = nlbench.evaluate(model, torch.randn(4, 3), [AbsdevAsPublished], settings=settings)
        return run[AbsdevAsPublished.name]

    paths = {"paths": "random", "number": 2, "anchors": 2}
    estimated = measured(network().float(), method="refined", **paths).values[0].statistics
    assert set(estimated) == {"value", "numerical_error"}
    exact = measured(network().float(), method="exact", **paths).values[0].statistics
    assert set(exact) == {"value", "shortened"}
    smooth = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    result = measured(smooth, method="auto", **paths)
    assert result.status == "undefined"
    assert "smooth" in result.reason
