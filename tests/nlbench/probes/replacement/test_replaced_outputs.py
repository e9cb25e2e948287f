"""Outputs with one place replaced, against networks in which it is replaced by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.errors import RequestError, Undefined
from nlbench.introspection.model_state import evaluation_mode
from nlbench.measure import Measure, Result
from nlbench.probes.replacement import CallInterception, find_calls
from nlbench.probes.replacement.prefix import SharedPrefix, run_replaced
from nlbench.probes.sites import list_sites
from nlbench.probes.sites.sites_observation import observe_sites


class Block(nn.Module):
    """A residual block with activations in place, called as functions, and handwritten."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu, self.gate = nn.ReLU(inplace=True), QuickGELU()

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.gate(self.relu(y))


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu_(self.stem(x))
        y = self.blocks(x)
        # An input of the blocks that must be unchanged by what comes before a replaced call.
        y = y + F.elu(x)
        return self.head(y.mean((2, 3)))


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = Network().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
    return model


INPUTS = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def twice(x):
    return 0.3 * x + 0.1


def test_places_have_the_names_of_sites(network):
    assert [place.name for place in find_calls(network, INPUTS)] == [
        site.name for site in list_sites(network, INPUTS)
    ]
    assert "blocks.0.relu:1" in [place.name for place in find_calls(network, INPUTS)]


def test_replaced_call_equals_a_network_changed_by_hand(network):
    class Changed(nn.Module):
        def forward(self, x):
            return twice(x)

    changed = copy.deepcopy(network)
    changed.blocks[1].gate = Changed()
    with evaluation_mode(network):
        places = {place.name: place for place in find_calls(network, INPUTS)}
        prefix = SharedPrefix(network, list(places.values()), INPUTS[:2])
        prefix.record(INPUTS)
        torch.testing.assert_close(prefix.run(places["blocks.1.gate"], twice), changed(INPUTS))


def test_second_call_in_place_equals_formula_by_hand(network):
    block = network.blocks[0]

    def forward(x):
        y = block.norm2(block.conv2(block.norm1(block.conv1(x)).relu()))
        return block.gate(twice(y + x))

    with torch.no_grad():
        places = {place.name: place for place in find_calls(network, INPUTS)}
        call = places["blocks.0.relu:1"].call
        x = network.stem(INPUTS).relu()
        expected = network.head((network.blocks[1](forward(x)) + F.elu(x)).mean((2, 3)))
        replaced = run_replaced(CallInterception(network), INPUTS, {call: twice})
    torch.testing.assert_close(replaced, expected)


class DirectForward(nn.Module):
    """Calls a child's forward without its hooks, between two calls that are like any others."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.block(self.block.forward(self.block(x) - 0.1) - 0.2)


def test_forward_called_without_its_module_is_replaced():
    model = DirectForward()
    inputs = torch.randn(5, 4)
    places = find_calls(model, inputs)
    assert [place.name for place in places] == [site.name for site in list_sites(model, inputs)]
    linear = model.block[0]
    for number, place in enumerate(places):
        maps = [twice if number == index else torch.relu for index in range(3)]
        expected = maps[2](linear(maps[1](linear(maps[0](linear(inputs)) - 0.1)) - 0.2))
        replaced = run_replaced(CallInterception(model), inputs, {place.call: twice})
        assert torch.equal(replaced, expected)


def test_shared_prefix_equals_whole_passes_bit_for_bit(network):
    with evaluation_mode(network):
        places = find_calls(network, INPUTS)
        prefix = SharedPrefix(network, places, INPUTS[:2])
        assert prefix.is_cached
        assert torch.equal(prefix.record(INPUTS), network(INPUTS.clone()))
        for place in [*places, *reversed(places)]:
            whole = run_replaced(CallInterception(network), INPUTS, {place.call: twice})
            assert torch.equal(prefix.run(place, twice), whole), place.name


def test_modules_before_the_place_run_once(network):
    calls = []
    network.stem.register_forward_hook(lambda *_: None)
    original = network.stem._conv_forward
    network.stem._conv_forward = lambda *args: calls.append(1) or original(*args)
    with evaluation_mode(network):
        places = find_calls(network, INPUTS)
        prefix = SharedPrefix(network, places, INPUTS[:2])
        prefix.record(INPUTS)
        calls.clear()
        for place in places[1:]:
            prefix.run(place, twice)
    assert not calls


def test_network_that_draws_numbers_runs_whole():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand(3)

    model = nn.Sequential(nn.Linear(2, 3), Noisy(), nn.ReLU(), Noisy(), nn.Tanh())
    with evaluation_mode(model):
        places = find_calls(model, torch.ones(4, 2))
        prefix = SharedPrefix(model, places, torch.ones(2, 2))
        assert not prefix.is_cached
        outputs = prefix.record(torch.ones(4, 2))
        assert torch.equal(prefix.run(places[1], torch.tanh), outputs)


def test_network_with_memory_between_modules_runs_whole():
    class Writer(nn.Linear):
        def forward(self, x):
            self.last.append(x.sum())
            return super().forward(x)

    class Reader(nn.Module):
        def forward(self, x):
            return x + writer.last.pop()

    writer = Writer(2, 2)
    writer.last = []
    model = nn.Sequential(writer, nn.ReLU(), Reader(), nn.Tanh())
    with evaluation_mode(model):
        places = find_calls(model, torch.randn(4, 2))
        assert not SharedPrefix(model, places, torch.randn(2, 2)).is_cached


class Collected(Measure):
    name, probe = "collected", "replacement"

    def reset(self):
        self.seen = []

    def update(self, observation):
        self.seen.append(observation)

    def compute(self):
        Collected.last = self.seen
        return Result({"value": 0.0})


def observed(model, inputs, labels=None, **settings):
    settings = {f"replacement.{name}": value for name, value in settings.items()}
    inputs = before_drawing(inputs)
    labels = labels if labels is None else before_drawing(labels)
    run = nlbench.evaluate(model, inputs, [Collected], labels=labels, settings=settings)
    assert run["collected"].status == "ok", run["collected"].reason
    return Collected.last


def test_every_other_sample_is_evaluated_with_its_label():
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(10, 2)
    (first, *_) = observed(model, inputs, torch.arange(10) % 3, maps="identity")
    torch.testing.assert_close(first.outputs, model(inputs[1::2]))
    torch.testing.assert_close(first.replaced, model[0](inputs[1::2]))
    assert first.labels.tolist() == [1, 0, 2, 1, 0]


@pytest.mark.parametrize("batch", [2, 3, 4, 10])
def test_halves_do_not_depend_on_batches(batch):
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(10, 2)
    labels = torch.arange(10) % 3
    seen = observed(model, inputs, labels, maps="channel", batch=batch)
    whole = observed(model, inputs, labels, maps="channel", batch=10)
    torch.testing.assert_close(
        torch.cat([each.replaced for each in seen]), torch.cat([each.replaced for each in whole])
    )


def test_crossed_judges_all_samples_by_the_other_half():
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(20, 2)
    seen = observed(model, inputs, maps="channel", crossed=True)
    assert sum(len(each.outputs) for each in seen) == 20


@pytest.mark.parametrize("batch", [2, 7, 20])
def test_judged_limits_the_samples_of_each_half(batch):
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(20, 2)
    seen = observed(model, inputs, maps="channel", judged=3, batch=batch)
    whole = observed(model, inputs, maps="channel")
    assert sum(len(each.outputs) for each in seen) == 3
    replaced = torch.cat([each.replaced for each in seen])
    torch.testing.assert_close(replaced, torch.cat([each.replaced for each in whole])[:3])


def test_model_is_left_as_it_was(network):
    before = {module: dict(vars(module)) for module in network.modules()}
    state = copy.deepcopy(network.state_dict())
    inputs = INPUTS.clone()
    observed(network, inputs)
    assert {module: dict(vars(module)) for module in network.modules()} == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert torch.equal(inputs, INPUTS)


def test_error_in_pass_leaves_model_as_it_was(network):
    def fail(call, x, compute):
        raise KeyError

    with pytest.raises(KeyError):
        CallInterception(network).run(INPUTS, fail)
    assert not any("forward" in vars(module) for module in network.modules())


def test_selection_replaces_some_places(network):
    seen = observed(network, INPUTS, select="blocks.1.*", maps="identity")
    assert {each.place for each in seen} == {
        "blocks.1.relu", "blocks.1.relu:1", "blocks.1.gate"
    }  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [("select", "every:x"), ("maps", "chanel")])
def test_wrong_options_are_named(network, option, value):
    with pytest.raises(RequestError, match=f"'{value}'"):
        nlbench.evaluate(
            network, INPUTS, ["substitution"], settings={f"replacement.{option}": value}
        )


def test_selection_without_a_match_fails_with_the_nearest(network):
    settings = {"replacement.select": "kind:rellu"}
    result = nlbench.evaluate(network, INPUTS, ["substitution"], settings=settings)["substitution"]
    assert result.status == "failed"
    assert "replacement.select: 'kind:rellu'" in result.reason


def test_gated_linear_unit_maps_its_gated_half():
    model = nn.Sequential(nn.Linear(2, 6), nn.GLU(), nn.Linear(3, 2))
    inputs = torch.randn(40, 2)
    (first, *_) = observed(model, inputs, torch.zeros(40).long(), maps="identity")
    expected = model[2](model[0](inputs[1::2])[:, :3])
    torch.testing.assert_close(first.replaced, expected)


def test_network_without_activations_is_undefined():
    run = nlbench.evaluate(nn.Linear(2, 2), torch.randn(8, 2), ["substitution"])
    assert run["substitution"].status == "undefined"


def test_tokens_and_channels_last_map_along_channels():
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Flatten(), nn.Linear(20, 2))
    (place,) = find_calls(model, torch.randn(2, 4, 3))
    assert (place.channel_axis, place.channels, place.shape) == (2, 5, (4, 5))


def test_batch_that_skips_a_place_is_undefined():
    class Sometimes(nn.Module):
        def forward(self, x):
            return x.relu() if bool(x.sum() > 0) else x

    model = nn.Sequential(nn.Identity(), Sometimes(), nn.Tanh())
    positive = torch.arange(1.0, 17.0).reshape(8, 2)
    inputs = before_drawing(torch.cat([positive, -positive]))
    run = nlbench.evaluate(model, inputs, ["substitution"], settings={"replacement.batch": 4})
    assert run["substitution"].status == "undefined"
    assert "relu" in run["substitution"].reason


class Residual(nn.Module):
    """A block of tokens with an MLP and attention, the MLP a module of its own."""

    def __init__(self, width):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual(8) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return Tokens().double().eval()


SEQUENCES = torch.randn(60, 7, 8, generator=torch.Generator().manual_seed(2)).double()


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ("blocks", ["layers.0", "layers.1", "layers.2"]),
        ("mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
        ("attention", ["layers.0.attn", "layers.1.attn", "layers.2.attn"]),
        ("modules:head", ["head"]),
    ],
)
def test_modules_are_places(tokens, of, names):
    calls = find_calls(tokens, SEQUENCES[:2], of=of)
    assert [call.name for call in calls] == names
    assert {(call.channel_axis, call.channels) for call in calls} == {(2, 8)}


@pytest.mark.parametrize("select", ["every:2", "kind:residual+every:2", "role:block+every:2"])
def test_modules_are_selected_as_sites(tokens, select):
    calls = find_calls(tokens, SEQUENCES[:2], of="blocks", select=select)
    assert [call.name for call in calls] == ["layers.0", "layers.2"]


def reordered(x):
    return x[x[:, 0, 0].argsort()]


def mixed(x):
    return x.reshape(-1, 8) + x.reshape(-1, 8).flip(0)


@pytest.mark.parametrize("of", ["activations", "modules:1"])
@pytest.mark.parametrize("before", [reordered, mixed])
def test_calls_that_are_not_replaceable_are_undefined(of, before):
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(before(x)).reshape(len(x), -1)

    with pytest.raises(Undefined):
        find_calls(Net(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 3, 8), of=of)


@pytest.mark.parametrize("of", ["blocks", "mlp"])
def test_modules_on_reordered_samples_are_undefined(of):
    class OneReorders(Tokens):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                order = x[:, 0, 0].argsort()
                x = layer(x[order])[order.argsort()] if i == 1 else layer(x)
            return self.head(x)

    observed, undefined = [], {}
    model = OneReorders().double().eval()
    calls = find_calls(model, SEQUENCES[:2], of=of, on_undefined=undefined.setdefault)
    assert [call.name[:8] for call in calls] == ["layers.0", "layers.2"]
    (name,) = undefined
    assert name.startswith("layers.1")
    assert "reorders" in undefined.pop(name)
    observe_sites(model, [SEQUENCES], observed.append, of=of, on_undefined=undefined.setdefault)
    assert {batch.place for batch in observed} == {call.name for call in calls}
    assert list(undefined) == [name]


@pytest.mark.parametrize("of", ["blocks", "mlp", "attention"])
def test_removed_module_equals_a_network_without_it(tokens, of):
    class Twice(nn.Module):
        def forward(self, x, *others, **options):
            return (2 * x,) if of == "attention" else 2 * x

    with evaluation_mode(tokens):
        calls = find_calls(tokens, SEQUENCES[:2], of=of)
        prefix = SharedPrefix(tokens, calls, SEQUENCES[:2])
        prefix.record(SEQUENCES)
        replaced = prefix.run(calls[1], lambda x: 2 * x)
        changed = copy.deepcopy(tokens)
        owner = changed.layers if of == "blocks" else changed.layers[1]
        setattr(owner, {"blocks": "1", "mlp": "mlp", "attention": "attn"}[of], Twice())
        torch.testing.assert_close(replaced, changed(SEQUENCES))


def test_best_map_cost_is_that_of_its_activation(tokens):
    def cost(of, select):
        settings = {"replacement.of": of, "replacement.select": select, "replacement.batch": 30}
        labels = torch.arange(60 * 7).reshape(60, 7) % 5
        run = nlbench.evaluate(
            tokens, SEQUENCES, ["substitution"], labels=labels, settings=settings
        )
        (value,) = run["substitution"].values
        return value.statistics["affine" if of == "activations" else "value"]

    at_activation = cost("activations", "layers.1.mlp.1")
    assert at_activation == pytest.approx(cost("mlp", "layers.1.mlp"), rel=1e-6)
    assert abs(at_activation) > 1e-6


def test_changed_channels_have_no_map_per_channel(tokens):
    settings = {
        "replacement.of": "modules:layers.*.mlp.0,modules:layers.0.mlp",
        "replacement.maps": "channel,affine",
    }
    run = nlbench.evaluate(tokens, SEQUENCES, ["substitution"], settings=settings)
    statuses = {value.place: value.status for value in run["substitution"].values}
    assert statuses["layers.0.mlp"] == "ok"
    assert statuses["layers.1.mlp.0"] == "undefined"


class Padded(nn.Module):
    """A network of token vectors with a padding mask."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x, attention_mask):
        return self.head((self.inner(x) * attention_mask[..., None]).sum(1))


def test_padding_is_not_fitted():
    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(24, 6, 3)
    mask = (torch.arange(6) < torch.arange(24)[:, None] % 5 + 2).float()
    labels = torch.arange(24) % 2

    def value(filled):
        inputs = {"x": torch.where(mask[..., None] > 0, x, filled), "attention_mask": mask}
        run = nlbench.evaluate(model, inputs, ["substitution"], labels=labels)
        return run["substitution"].summary["value"]

    assert value(7.0) == pytest.approx(value(-3.0), rel=1e-6)


class Written(nn.Module):
    """Its activation writes into a tensor that the network reads, rather than returning one."""

    def __init__(self, activate):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.activate = activate

    def forward(self, x):
        return self.last(self.activate(self.first(x)).tanh())


def into_output(h):
    written = torch.empty_like(h)
    torch.sigmoid(h, out=written)
    return written


def into_data(h):
    h.data.sigmoid_()
    return h


@pytest.mark.parametrize("activate", [into_output, into_data])
def test_replacement_is_written_where_the_network_reads(activate):
    inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
    expected, found = (
        observed(Written(function), inputs, maps="channel,identity")
        for function in (torch.sigmoid, activate)
    )
    assert [each.place for each in found] == [each.place for each in expected]
    for first, second in zip(expected, found, strict=True):
        torch.testing.assert_close(second.outputs, first.outputs)
        torch.testing.assert_close(second.replaced, first.replaced)


def test_activation_in_a_hook_is_replaced():
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(10, 2)
    model.register_forward_pre_hook(lambda module, args: (args[0].sigmoid(),))
    model.register_forward_hook(lambda module, args, output: output.tanh())
    hidden = model[0](inputs[1::2].sigmoid())
    replaced = {each.place: each.replaced for each in observed(model, inputs, maps="identity")}
    expected = {
        "sigmoid": model[0](inputs[1::2]).relu().tanh(),
        "1": hidden.tanh(),
        "tanh": hidden.relu(),
    }
    assert replaced.keys() == expected.keys()
    for place, output in expected.items():
        torch.testing.assert_close(replaced[place], output)


class Wrapped(Residual):
    """A block whose stream is one entry of what it returns."""

    wrap = staticmethod(lambda x, stream: stream)

    def forward(self, x):
        return self.wrap(x, super().forward(x))


class InMapping(Wrapped):
    wrap = staticmethod(lambda x, stream: {"mask": None, "hidden": stream})


class Second(Wrapped):
    wrap = staticmethod(lambda x, stream: (2 * x, stream))


class WrappedTokens(Tokens):
    def __init__(self, block, key):
        super().__init__()
        self.key = key
        for index, layer in enumerate(self.layers):
            self.layers[index] = block(8)
            self.layers[index].load_state_dict(layer.state_dict())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[self.key]
        return self.head(x)


@pytest.mark.parametrize(("block", "key"), [(InMapping, "hidden"), (Second, 1)])
@pytest.mark.parametrize("of", ["blocks", "spans:2"])
def test_stream_among_returned_entries_is_replaced(tokens, block, key, of):
    wrapped = WrappedTokens(block, key).double().eval()
    wrapped.load_state_dict(tokens.state_dict())
    expected, found = (
        observed(model, SEQUENCES, of=of, maps="identity") for model in (tokens, wrapped)
    )
    assert [each.place for each in found] == [each.place for each in expected]
    for first, second in zip(expected, found, strict=True):
        torch.testing.assert_close(second.replaced, first.replaced)


class Masked(Residual):
    """A block whose first argument is a mask, in front of the stream."""

    def forward(self, mask, x):
        return super().forward(x)


class WithMask(Tokens):
    """Blocks that receive the stream second, or by name."""

    def __init__(self, by_name):
        super().__init__()
        self.by_name = by_name
        for layer in self.layers:
            layer.__class__ = Masked

    def forward(self, x):
        mask = x[:, :1, :1].sigmoid().expand(-1, 7, 7)
        for layer in self.layers:
            x = layer(mask=mask, x=x) if self.by_name else layer(mask, x)
        return self.head(x)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("of", ["blocks", "spans:2"])
def test_input_of_a_place_is_its_stream(tokens, by_name, of):
    masked = WithMask(by_name).double().eval()
    masked.load_state_dict(tokens.state_dict())
    for maps in ("identity", "affine"):
        expected, found = (
            observed(model, SEQUENCES, of=of, maps=maps) for model in (tokens, masked)
        )
        assert [each.place for each in found] == [each.place for each in expected]
        for first, second in zip(expected, found, strict=True):
            torch.testing.assert_close(second.replaced, first.replaced)
