"""A linearised network as a checkpoint, and as the subject of other measures."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nlbench
from nlbench.cli.app import main
from nlbench.errors import RequestError
from nlbench.models.networks.vgg import VGG
from nlbench.models.sparsified.sparsification import (
    checkpoint_metadata,
    linear_share,
    nonlinear_units,
    parameter_groups,
    randomize,
    sparsify,
)
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.lines import trace_segment
from nlbench.probes.sites.sites_observation import list_sites
from nlbench.subjects.load import apply_transform, load_subject
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights import read_metadata, save_weights


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 9), nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x):
        x = F.relu(self.first(x), inplace=True)
        return self.third(F.relu(self.second(x)))


def linearised(layerwise=False):
    torch.manual_seed(0)
    model = sparsify(VGG(8), layerwise=layerwise)
    if layerwise:
        with torch.no_grad():
            for slopes in parameter_groups(model, 0.0)[1]["params"]:
                slopes.fill_(0.25)
    else:
        randomize(model, 0.5, seed=0)
    return model


@pytest.fixture
def checkpoint(tmp_path):
    model = linearised()
    path = tmp_path / "linear.safetensors"
    save_weights(path, model, checkpoint_metadata(model))
    return path


def test_lines_are_traced_through_slopes():
    torch.manual_seed(1)
    model = sparsify(Functional())
    with torch.no_grad():
        for slopes in parameter_groups(model, 0.0)[1]["params"]:
            slopes.uniform_(0, 0.5)
    start, end = torch.randn(3).double() * 9, torch.randn(3).double() * 9
    trace = trace_segment(model, start, end)
    assert trace.regions > 1
    middle = (trace.t[:-1] + trace.t[1:]) / 2
    points = start + middle[:, None] * (end - start)
    expected = (trace.values[:-1] + trace.values[1:]) / 2
    torch.testing.assert_close(model.double()(points), expected, rtol=0, atol=1e-12)


def test_a_network_without_nonlinear_units_is_one_region():
    model = sparsify(Functional())
    randomize(model, 1.0, seed=0)
    assert trace_segment(model, torch.randn(3) * 9, torch.randn(3) * 9).regions == 1


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_checkpoint_is_loaded_into_a_transformed_model(tmp_path, layerwise):
    model = linearised(layerwise)
    path = tmp_path / "linear.safetensors"
    save_weights(path, model, checkpoint_metadata(model))
    subject = load_subject(SubjectSpec("vgg8", str(path), "digits", samples=4), torch.device("cpu"))
    assert linear_share(subject.model) == linear_share(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(subject.model(subject.inputs), model(subject.inputs))
    assert subject.facts.weights_metadata["transform"] == "sparsify"


def test_other_measures_run_on_a_linearised_checkpoint(tmp_path, checkpoint, monkeypatch):
    out = tmp_path / "run"
    arguments = ["run", "--model", "vgg8", "--weights", str(checkpoint), "--data", "digits"]
    arguments += ["--measures", "density,absdev,affinity,pathlength", "--samples", "16"]
    arguments += [
        "--set",
        "lines.number=1",
        "--set",
        "lines.anchors=2",
        "--set",
        "lines.radius=1",
        "--out",
        str(out),
    ]
    monkeypatch.setattr("sys.argv", ["nlbench", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code in (0, None)
    scores = nlbench.load_run(out).scores
    summary = scores[(scores.place == "") & (scores.statistic == "value")]
    values = dict(zip(summary.measure, summary.value, strict=True))
    assert set(values) == {"density", "absdev", "affinity", "pathlength"}
    assert values["pathlength"] < 7


def test_layers_have_one_name_in_all_probes():
    model = sparsify(Functional())
    x = torch.randn(2, 3)
    sites = [site.name for site in list_sites(model, x)]
    assert sites == [unit.site for unit in channel_graph(model, x).units]
    assert sites == list(nonlinear_units(model)) == ["relu.0", "relu.1"]


def test_an_unknown_transform_is_refused_in_one_line(tmp_path):
    path = tmp_path / "odd.safetensors"
    save_weights(path, VGG(8), {"transform": "sparsifi"})
    with pytest.raises(RequestError, match="'sparsifi'"):
        load_subject(SubjectSpec("vgg8", str(path), "digits", samples=2), torch.device("cpu"))


@pytest.mark.parametrize(
    "options",
    ["[1]", "{", "", '{"layerwise": false}\n{}', "[" * 100_000, "x " * 5000,
     json.dumps({"depth": 3}), json.dumps({"example": 3}), json.dumps({"layerwise": "no"})],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(options):
    metadata = {"transform": "sparsify", "transform_options": options}
    with pytest.raises(RequestError) as caught:
        apply_transform(Functional(), metadata, lambda: torch.zeros(2, 3))
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_checkpoint_without_transform_leaves_model_unchanged(tmp_path):
    path = tmp_path / "plain.pt"
    torch.save(Functional().state_dict(), path)
    model = Functional()
    assert read_metadata(path) == {}
    assert apply_transform(model, read_metadata(path), pytest.fail) is model


def test_a_sparsified_network_is_traced_by_pytorch():
    made = sparsify(Functional())
    randomize(made, 0.5, seed=0)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(torch.jit.trace(made, x)(y), made(y))
    torch.testing.assert_close(torch.export.export(made, (x,)).module()(y), made(y))
