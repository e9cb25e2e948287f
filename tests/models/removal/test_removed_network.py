"""Networks with removed calls, against the same networks written out by hand."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.errors import RequestError
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_state import evaluation_mode
from nlbench.models.removal.curve import Removal
from nlbench.models.removal.network import network_with_maps, remove
from nlbench.probes.replacement import AffineMap, CallInterception, find_calls
from nlbench.probes.replacement.prefix import run_replaced
from nlbench.probes.sites import list_sites


class Mixed(nn.Module):
    """A module called twice, functions, and an activation in a block of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.act, self.tail = nn.ReLU(), nn.Sequential(nn.GELU(), nn.Linear(4, 3))

    def forward(self, x):
        x = self.act(self.first(x))
        x = F.gelu(self.act(self.second(x)))
        return self.tail(torch.tanh(F.gelu(self.third(x))))


INPUTS = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mixed().eval()


def affine(channels=4):
    return AffineMap(torch.linspace(0.1, 0.9, channels), torch.linspace(-1, 1, channels))


NAMES = ["act", "act:1", "gelu", "gelu:1", "tanh", "tail.0"]


@pytest.mark.parametrize("names", [[name] for name in NAMES] + [["act:1", "gelu"], NAMES])
def test_removed_calls_equal_replaced_calls(model, names):
    calls = {call.name: call for call in find_calls(model, INPUTS)}
    assert list(calls) == NAMES
    network = network_with_maps(model, {name: affine() for name in names}, INPUTS)
    with evaluation_mode(model):
        expected = run_replaced(
            CallInterception(model),
            INPUTS,
            {calls[name].call: lambda x: affine()(x, 1) for name in names},
        )
        torch.testing.assert_close(network(INPUTS), expected)
    assert len(list_sites(network, INPUTS)) == len(NAMES) - len(names)


def test_network_without_any_activation_is_affine(model):
    network = network_with_maps(model, {name: affine() for name in NAMES}, INPUTS)
    with torch.no_grad():
        middle = network((INPUTS[:5] + INPUTS[5:]) / 2)
        torch.testing.assert_close(middle, (network(INPUTS[:5]) + network(INPUTS[5:])) / 2)


def test_removed_network_is_copied_and_pickled(model):
    network = network_with_maps(model, {"act:1": affine(), "gelu": affine()}, INPUTS)
    expected = network(INPUTS)
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        torch.testing.assert_close(twin(INPUTS), expected)


def test_model_is_left_unchanged(model):
    expected, kinds = model(INPUTS), [type(m) for m in model.modules()]
    remove(model, places=NAMES, example=INPUTS)
    assert torch.equal(model(INPUTS), expected)
    assert [type(m) for m in model.modules()] == kinds


def test_channels_of_images_are_mapped():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)).eval()
    images = torch.randn(3, 1, 8, 8)
    network = network_with_maps(model, {"1": affine()}, images)
    x = model[0](images) * affine().weight.view(4, 1, 1) + affine().bias.view(4, 1, 1)
    torch.testing.assert_close(network(images), model[2](x))


def test_removed_network_is_measured(model):
    network = network_with_maps(model, {"act": affine(), "gelu": affine()}, INPUTS)
    run = nlbench.evaluate(network, torch.randn(40, 4), ["affinity", "absdev", "substitution"])
    assert [record.result.status for record in run.records] == ["ok"] * 3
    assert len(run["affinity"].values) == 4


def test_overwritten_input_that_is_read_is_refused():
    class Overwriting(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            F.relu_(x)
            return 2 * x

    model = nn.Sequential(Overwriting(4, 4), nn.Linear(4, 2))
    (call,) = find_calls(model, INPUTS)
    with pytest.raises(RequestError):
        remove(model, places=[call.name], example=INPUTS)


class Block(nn.Module):
    """A block of tokens whose attention returns a pair and takes its input by name."""

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

        def forward(self, hidden, mask=None):
            return self.inner(hidden, hidden, hidden, need_weights=False)

    def __init__(self, width, kind):
        super().__init__()
        self.attn, self.kind = self.Attention(width), kind
        self.mlp = nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width))

    def forward(self, x, mask=None):
        attended, _ = self.attn(mask=mask, hidden=x)
        x = x + attended
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(4, kind) for kind in "abc"])
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        for layer in self.layers:
            # An attribute of a block, which a map in its place has, too.
            assert layer.kind in "abc"
            x = layer(x)
        return self.head(x)


SEQUENCES = torch.randn(60, 7, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("of", ["blocks", "mlp", "attention"])
def test_network_without_module_has_loss_that_substitution_judges(of):
    torch.manual_seed(0)
    model, labels = Decoder().eval(), torch.arange(420).reshape(60, 7) % 5
    place = find_calls(model, SEQUENCES[:2], of=of)[1]
    settings = {"sites.of": of, "sites.select": place.name}
    drawn = before_drawing(SEQUENCES)
    run = nlbench.evaluate(
        model, drawn, ["substitution"], labels=before_drawing(labels), settings=settings
    )
    # Maps are fitted on every other sequence, and judged on those between.
    removal = Removal(model, [place], SEQUENCES[::2], SEQUENCES[1::2], labels[1::2], is_full=True)
    network = network_with_maps(model, removal.maps([place.name]), SEQUENCES[:2], of)
    loaded = remove(model, places=[place.name], example=SEQUENCES[:2], of=of)
    loaded.load_state_dict(network.state_dict())
    with torch.no_grad():
        before, after = (
            F.cross_entropy(net(SEQUENCES[1::2]).flatten(0, 1), labels[1::2].flatten()).item()
            for net in (model, loaded)
        )
    assert removal.step([place.name]).loss == pytest.approx(after, rel=1e-6)
    (value,) = run["substitution"].values
    assert after - before == pytest.approx(value.statistics["loss"], rel=1e-3)
    assert abs(after - before) > 1e-4


def test_module_maps_are_fitted_in_order():
    torch.manual_seed(0)
    model = Decoder().eval()
    calls = find_calls(model, SEQUENCES[:2], of="mlp")
    removal = Removal(model, calls, SEQUENCES, SEQUENCES, None, is_full=True)
    network = network_with_maps(
        model, removal.maps([call.name for call in calls]), SEQUENCES[:2], "mlp"
    )
    with torch.no_grad():
        x = SEQUENCES
        for old, new in zip(model.layers, network.layers, strict=True):
            x = x + new.attn(x)[0]
            rows, targets = x.flatten(0, 1).double(), old.mlp(x).flatten(0, 1).double()
            design = torch.cat([rows, torch.ones(len(rows), 1)], 1)
            weight = torch.linalg.lstsq(design, targets).solution.float()
            torch.testing.assert_close(new.mlp.weight, weight[:-1], atol=1e-4, rtol=1e-4)
            x = x + new.mlp(x)
        torch.testing.assert_close(network(SEQUENCES), model.head(x))


def test_module_whose_other_outputs_are_used_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(4, 4, batch_first=True) for _ in range(2)])

        def forward(self, x):
            x, state = self.layers[0](x)
            return self.layers[1](x + state[0][0][:, None])[0]

    with pytest.raises(RequestError):
        remove(Pair(), places=["layers.0"], example=SEQUENCES[:2], of="modules:layers.0")


@pytest.mark.parametrize(("places", "name"), [(["act:7"], "'act:7'"), ("act", "places")])
def test_wrong_places_are_refused(model, places, name):
    with pytest.raises(RequestError, match=name):
        remove(model, places=places, example=INPUTS)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), F.relu])
def test_fused_kernel_does_not_bypass_a_removed_activation(activation):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=activation).eval()
    inputs = torch.randn(3, 5, 8)
    places = [call.name for call in find_calls(model, inputs)]
    network = remove(model, places=places, example=inputs)
    with without_fast_path():
        expected = network(inputs)
    with torch.no_grad():
        assert torch.allclose(network(inputs), expected, atol=1e-5)


class PairBlock(Block):
    """A block that receives a mask before the stream, and returns the stream second."""

    def forward(self, mask, x):
        return 2 * x, super().forward(x)


class MappingBlock(Block):
    """A block that receives a mask before the stream, and returns a mapping."""

    def forward(self, mask, x):
        return {"mask": None, 1: super().forward(x)}


class StreamDecoder(Decoder):
    def __init__(self, block):
        super().__init__()
        for layer in self.layers:
            layer.__class__ = block

    def forward(self, x):
        mask = x[:, :1, :1].sigmoid().expand(-1, 7, 7)
        for layer in self.layers:
            x = layer(mask, x)[1]
        return self.head(x)


@pytest.mark.parametrize("block", [PairBlock, MappingBlock])
def test_stream_among_arguments_and_outputs_is_mapped(block):
    torch.manual_seed(0)
    model = Decoder().eval()
    wrapped = StreamDecoder(block).eval()
    wrapped.load_state_dict(model.state_dict())
    outputs = []
    for network in (model, wrapped):
        calls = find_calls(network, SEQUENCES[:2], of="blocks")
        removal = Removal(network, calls, SEQUENCES, SEQUENCES, None, is_full=True)
        names = [call.name for call in calls[:2]]
        left = network_with_maps(network, removal.maps(names), SEQUENCES[:2], "blocks")
        outputs.append(left(SEQUENCES))
        assert removal.step(names).kl > 0
    torch.testing.assert_close(outputs[1], outputs[0])
