import pytest
import torch
from torch import nn

from nlbench import evaluate
from nlbench.errors import RequestError, Undefined, UnsupportedOperation
from nlbench.execution.probe_pass import Pass
from nlbench.measures.absdev import AbsoluteDeviation
from nlbench.options import resolve_options
from nlbench.probes import ProbePass, Resources
from nlbench.probes.lines import LINES, SegmentEstimate, SegmentTrace
from nlbench.subjects.subject import Subject


class RecordingListener:
    def __init__(self):
        self.observations = []

    def update(self, observation):
        self.observations.append(observation)


def lines(**options):
    return resolve_options(LINES.options, options, owner="lines")


def run_pass(model, inputs, settings):
    """Return the facts of a pass, its observations and its number of steps."""
    listener, steps = RecordingListener(), []
    subject = Subject(model, inputs, None, {})
    resources = Resources(torch.device("cpu"))
    facts = LINES.observe(
        ProbePass(model, subject, settings, [listener], resources, lambda: steps.append(1))
    )
    return facts, listener.observations, len(steps)


def convolutional(act=nn.ReLU, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), act(), nn.Flatten(), nn.Linear(32, 3)).eval()


@pytest.fixture
def images():
    return torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["closed", "open", "random", "pairs"])
def test_path_kinds_are_observed_by_segment(images, kind):
    settings = lines(paths=kind, number=2, anchors=3, radius=2)
    facts, observations, steps = run_pass(convolutional(), images, settings)
    segments = 1 if kind == "pairs" else 3
    assert (
        facts["segments"] == LINES.steps(8, settings) == steps == len(observations) == 2 * segments
    )
    assert [(observation.path, observation.segment) for observation in observations] == [
        (path, segment) for path in range(2) for segment in range(segments)
    ]
    assert facts["drawing"]["place"] == "path0"
    assert "remarks" not in facts


@pytest.mark.parametrize("kind", ["closed", "open", "random", "pairs"])
def test_paths_do_not_depend_on_the_model(images, kind):
    settings = lines(paths=kind, number=2, anchors=3, radius=2)
    facts, _, _ = run_pass(convolutional(), images, settings)
    torch.rand(7)
    other, _, _ = run_pass(convolutional(nn.LeakyReLU, seed=5), images, settings)
    assert facts["paths_hash"] == other["paths_hash"]


@pytest.mark.parametrize("kind", ["open", "random"])
def test_another_seed_makes_other_paths(images, kind):
    hashes = {
        run_pass(convolutional(), images, lines(paths=kind, number=1, seed=seed))[0]["paths_hash"]
        for seed in (0, 1)
    }
    assert len(hashes) == 2


def test_smooth_networks_are_integrated(images):
    settings = lines(number=2, anchors=3, radius=2, tolerance=1e-4)
    facts, observations, _ = run_pass(convolutional(nn.GELU), images, settings)
    assert len(observations) == 6
    assert all(isinstance(observation.trace, SegmentEstimate) for observation in observations)
    assert all("gelu" in observation.trace.refused for observation in observations)
    assert facts["remarks"] == dict.fromkeys(
        ("path0", "path1"), "by quadrature, relative error ≤ 0.01 %"
    )
    assert facts["drawing"]["method"] == "quadrature"


def test_quadrature_has_the_segments_of_a_trace(images):
    settings = lines(number=2, anchors=3, radius=2)
    _, traced, _ = run_pass(convolutional(), images, settings)
    _, integrated, _ = run_pass(convolutional(nn.GELU), images, settings)
    for one, other in zip(traced, integrated, strict=True):
        assert (one.place, one.segment) == (other.place, other.segment)
        assert one.trace.length == pytest.approx(other.trace.length)


def test_unconverged_quadrature_has_a_remark(images):
    class Wild(nn.Module):
        def forward(self, x):
            return (3000 * x.flatten(1)[:, :2]).sin()

    settings = lines(number=1, anchors=2, radius=2, evaluations=64)
    facts, observations, _ = run_pass(Wild(), images, settings)
    assert not any(observation.trace.converged for observation in observations)
    assert "relative error above 0.002 on 2 of 2 segments" in facts["remarks"]["path0"]


@pytest.mark.parametrize("method", ["refined", "auto"])
def test_deviation_does_not_depend_on_counting(method):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3)
    )
    inputs = torch.randn(8, 6)
    settings = {
        "lines.paths": "pairs",
        "lines.number": 4,
        "lines.method": method,
        "lines.budget": 50,
    }
    alone = evaluate(model, inputs, ["absdev"], settings=settings)["absdev"]
    counted = evaluate(model, inputs, ["absdev", "density"], settings=settings)
    assert counted["density"].summary["value"] > 0
    assert "at_least" in counted["absdev"].notes
    assert "at_least" not in alone.notes
    assert alone.notes["evaluations"] < counted["absdev"].notes["evaluations"]
    for before, after in zip(alone.values, counted["absdev"].values, strict=True):
        # The error is a small difference, and changes by the rounding of single precision.
        errors = before.statistics.pop("numerical_error"), after.statistics.pop("numerical_error")
        assert errors[0] == pytest.approx(errors[1], rel=1e-2)
        assert before.statistics == pytest.approx(after.statistics, rel=1e-5)


def test_refused_trace_continues_by_quadrature(images, monkeypatch):
    from nlbench.probes.lines import api

    original = api._trace_or_estimate

    def interrupted(*args, **options):
        for index, trace in enumerate(original(*args, **options)):
            if index == 2:
                raise UnsupportedOperation("sort", "here", "not piecewise affine")
            yield trace

    monkeypatch.setattr(api, "_trace_or_estimate", interrupted)
    settings = lines(number=1, anchors=4, radius=2)
    _, observations, steps = run_pass(convolutional(), images, settings)
    assert [type(observation.trace) for observation in observations] == [SegmentTrace] * 2 + [
        SegmentEstimate
    ] * 2
    assert [observation.segment for observation in observations] == [0, 1, 2, 3]
    assert steps == 4


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_only_images_are_translated(kind):
    with pytest.raises(Undefined):
        run_pass(nn.ReLU(), torch.rand(8, 5), lines(paths=kind))


@pytest.mark.parametrize("kind", ["random", "pairs"])
def test_other_inputs_have_random_paths_and_pairs(kind):
    _, observations, _ = run_pass(nn.ReLU(), torch.rand(8, 5), lines(paths=kind, number=3))
    assert {observation.place for observation in observations} == {"path0", "path1", "path2"}


def test_first_segments_of_a_long_path_are_drawn():
    settings = lines(paths="random", number=1, anchors=66)
    facts, observations, _ = run_pass(nn.ReLU(), torch.rand(8, 2), settings)
    expected = [observation.trace.length for observation in observations[:64]]
    assert facts["drawing"]["lengths"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("paths", ["random", "pairs"])
def test_one_sample_has_no_lines(paths):
    with pytest.raises(Undefined):
        run_pass(nn.ReLU(), torch.rand(1, 5), lines(paths=paths, number=3))


def test_transformer_has_a_deviation_and_no_density():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(32, 2)).eval()
    run = evaluate(
        model, torch.randn(4, 4, 8), measures=["absdev", "density"], settings={"lines.number": 1}
    )
    assert run["absdev"].status == "ok"
    assert run["absdev"].summary["value"] > 0
    assert run["absdev"].notes["method"] == "quadrature"
    assert run["density"].status == "undefined"
    assert "0.layers.0.self_attn" in run["density"].reason
    assert run.scores.query("measure == 'absdev' and place == ''")["reason"].iloc[0]


def test_too_large_paths_are_refused():
    settings = lines(paths="random", number=1_000_000, anchors=8)
    with pytest.raises(RequestError):
        run_pass(nn.ReLU(), torch.rand(2, 3, 32, 32), settings)


def test_measures_without_images_name_the_option_to_set():
    subject = Subject(nn.ReLU(), torch.rand(8, 5), None, {})
    one_pass = Pass(subject, "lines", lines(paths="closed"), Resources(torch.device("cpu")))
    (outcome,) = one_pass.observe([(AbsoluteDeviation, {}, "")])
    assert outcome.result.status == "undefined"
    assert "set lines.paths=pairs or random" in outcome.result.reason


def test_copies_of_samples_form_no_pairs():
    torch.manual_seed(0)
    inputs = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    expected, _, _ = run_pass(model, inputs, lines(paths="pairs", number=2))
    repeated = inputs.repeat_interleave(2, 0)
    facts, _, _ = run_pass(model, repeated, lines(paths="pairs", number=2))
    assert facts["paths_hash"] == expected["paths_hash"]
    facts, _, _ = run_pass(model, repeated, lines())
    assert (facts["paths"], facts["number"]) == ("pairs", 2)
    with pytest.raises(Undefined, match="6 different"):
        run_pass(model, repeated, lines(paths="pairs", number=3))
