"""The activity of units on samples, compared with hooks on the modules."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from nlbench.errors import NotFinite, Undefined
from nlbench.models.networks.vgg import VGG
from nlbench.probes import ProbePass, Resources
from nlbench.probes.graph import GRAPH
from nlbench.probes.graph.activity import unit_activity
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.subjects.subject import Subject


def test_activity_is_the_fraction_of_changed_positions():
    torch.manual_seed(0)
    model = VGG(8).eval()
    x = torch.randn(5, 3, 32, 32)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def note(module, args, y, name=name):
                seen[name] = (args[0] != y).double()

            module.register_forward_hook(note)
    model(x)
    found = unit_activity(model, channel_graph(model, x), [x])
    assert set(found) == set(seen)
    for name, differs in seen.items():
        expected = differs.mean([axis for axis in range(differs.ndim) if axis != 1])
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [4, 2]])
def test_batches_do_not_matter(sizes):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.randn(6, 3, 32, 32)
    graph = channel_graph(model, x)
    expected = unit_activity(model, graph, [x])
    for site, activity in unit_activity(model, graph, x.split(sizes)).items():
        torch.testing.assert_close(activity, expected[site], rtol=0, atol=1e-6)


def test_windows_and_tokens_folded_into_samples_are_distinguished():
    class Windows(nn.Module):
        def forward(self, x):
            y = x.reshape(-1, 2, 3)  # two tokens each, two windows a sample
            return torch.relu(y).reshape(len(x), -1).sum(1)

    class Tokens(nn.Module):
        def forward(self, x):
            return torch.relu(x.reshape(len(x), 4, 3).transpose(0, 1)).sum((0, 2))

    x = torch.randn(5, 12)
    for model in (Windows(), Tokens()):
        found = unit_activity(model, channel_graph(model, x), [x])["relu"]
        assert len(found) == 12
        assert found.mean() == pytest.approx(float((x < 0).double().mean()), abs=1e-6)


@pytest.mark.parametrize("channels_first", [False, True])
def test_channels_folded_into_the_sample_axis_are_distinguished(channels_first):
    class Folding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(3, 3, 1)

        def forward(self, x):
            y = self.layer(x)
            return F.relu((y.transpose(0, 1) if channels_first else y).flatten(0, 1))

    torch.manual_seed(0)
    model, x = Folding(), torch.randn(6, 3, 4)
    found = unit_activity(model, channel_graph(model, x), [x[:4], x[4:]])["relu"]
    expected = (model.layer(x) < 0).double().mean((0, 2))
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_overwritten_input_is_compared_before_the_call():
    class InPlace(nn.Module):
        def forward(self, x):
            return F.relu_(F.leaky_relu(x * 1, 0.5, True))

    x = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    found = unit_activity(InPlace(), channel_graph(InPlace(), x), [x])
    assert {site: activity.tolist() for site, activity in found.items()} == {
        "leaky_relu": [0.5, 1.0],
        "relu": [0.5, 1.0],
    }


def test_an_activation_without_finite_output_fails():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    graph = channel_graph(model, torch.zeros(1, 2))
    with pytest.raises(NotFinite):
        unit_activity(model, graph, [torch.tensor([[float("nan"), 1.0]])])


def test_samples_on_other_branches_are_undefined():
    class Deciding(nn.Module):
        def forward(self, x):
            return torch.relu(x) if x.sum() > 0 else x

    graph = channel_graph(Deciding(), torch.ones(1, 2))
    with pytest.raises(Undefined):
        unit_activity(Deciding(), graph, [-torch.ones(1, 2)])


def test_samples_run_in_precision_that_was_asked_for():
    class Listening:
        def update(self, observation):
            with torch.autocast("cpu", enabled=False):
                observation.activity()

    model, types = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), []
    model[0].register_forward_hook(lambda module, given, output: types.append(output.dtype))
    subject = Subject(model, torch.randn(5, 3), None, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        resources = Resources(torch.device("cpu"))
        GRAPH.observe(ProbePass(model, subject, {"batch": 5}, [Listening()], resources))
    assert types[-1] == torch.bfloat16


def test_named_slopes_are_followed():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.slope = nn.Linear(3, 2), nn.Parameter(torch.tensor([0.5, 1.0]))

        def forward(self, x):
            return F.prelu(input=self.layer(x), weight=self.slope)

    model, x = Named(), torch.randn(4, 3)
    graph = channel_graph(model, x)
    assert [unit.active.tolist() for unit in graph.units] == [[1.0, 0.0]]
    assert list(unit_activity(model, graph, [x])) == ["prelu"]
