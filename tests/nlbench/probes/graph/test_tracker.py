"""What can't be intercepted on the way to the output is refused, never left out."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import Undefined, UnsupportedOperation
from nlbench.probes.graph.channel_graph import counted_lengths, walked_length
from nlbench.probes.graph.graph_observation import channel_graph


class Calls(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)
        for name, part in parts.items():
            self.register_buffer(name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def written(self, x):
    made = torch.zeros_like(x)
    part = made[:, :2]
    part[:] = self.layer(x).relu()[:, :2]
    return x + made


def copied(self, x):
    made = torch.zeros(1, 4, device=x.device)
    made[:, :2].copy_(self.layer(x).relu()[:, :2])
    return x + made


def assigned(self, x):
    y = self.layer(x)
    y.data = y.relu()
    return x + y


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (written, "an unknown function"),
        (copied, "an unknown function"),
        (assigned, "data"),
        (lambda self, x: x + torch.vmap(torch.relu)(self.layer(x)), "an unknown function"),
        (lambda self, x: torch.vmap(torch.relu)(self.layer(x)), "an unknown function"),
        (lambda self, x: x + scripted(self.layer(x)), "a scripted function"),
        (lambda self, x: x + torch.from_numpy(self.layer(x).relu().numpy()), "numpy"),
        (lambda self, x: x * self.layer(x).relu().sum().item(), "item"),
        (lambda self, x: x * float(self.layer(x).relu().sum()), "__float__"),
        (lambda self, x: x + torch.tensor(self.layer(x).relu().tolist()), "tolist"),
        (lambda self, x: x.relu().view(torch.int32).float(), "view"),
    ],
)
def test_numbers_outside_of_pytorch_are_refused(function, operation):
    with pytest.raises(UnsupportedOperation) as caught:
        channel_graph(Calls(function), torch.ones(1, 4))
    assert (caught.value.operation, caught.value.place) == (operation, "the network")


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda self, x: self.table[x].mean(1).relu(), (torch.zeros(1, 3, dtype=torch.int64),)),
        (
            lambda self, x: self.table.index_select(0, x[0]).relu(),
            (torch.zeros(1, 3, dtype=torch.int64),),
        ),
        (lambda self, x, i: x[:, i[0]], (torch.ones(1, 4), torch.zeros(1, 2, dtype=torch.int64))),
    ],
)
def test_entries_picked_by_the_input_are_refused(function, inputs):
    with pytest.raises(UnsupportedOperation):
        channel_graph(Calls(function, table=torch.ones(9, 4)), inputs)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch.relu(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x + torch.add(self.layer(x).relu(), 0, out=torch.empty_like(x)),
        lambda self, x: x + Function.apply(self.layer(x)),
        lambda self, x: x + torch.ones_like(self.layer(x)) * self.layer(x).relu(),
    ],
    ids=["out", "own function", "constant of a shape"],
)
def test_supported_operations_are_followed(function):
    assert walked_length(channel_graph(Calls(function), torch.ones(1, 4))) == 0.5


def picked(self, x):
    return torch.cat([x, x.relu()], 1)[:, self.index]


def selected(self, x):
    return torch.cat([x, x.relu()], 1).index_select(1, self.index)


def overwritten(self, x):
    made = torch.cat([x, x.relu()], 1)
    made[:, self.others] = 0
    return made


@pytest.mark.parametrize("function", [picked, selected, overwritten])
def test_index_buffer_selects_its_entries(function):
    index, others = torch.tensor([0, 5, 6, 7]), torch.tensor([4, 1, 2, 3])
    graph = channel_graph(Calls(function, index=index, others=others), torch.ones(1, 4))
    assert (walked_length(graph), len(graph.outputs)) == (0.75, 4)


def test_indices_on_the_meta_device_are_not_known():
    model = Calls(picked, index=torch.tensor([0, 5])).to("meta")
    with pytest.raises(Undefined):
        channel_graph(model, torch.ones(1, 4, device="meta"))


def test_clone_turned_in_place_leaves_the_original_alone():
    def forward(self, x):
        turned = x.clone()
        turned.transpose_(1, 2)
        return x + self.layer(x).relu()

    lengths = counted_lengths(channel_graph(Calls(forward), torch.ones(1, 4, 4)))
    assert 10**lengths.log10_paths == pytest.approx(4 + 16)


@pytest.mark.parametrize(
    "repeated",
    [
        lambda x: x.repeat(1, 2),
        lambda x: x.tile(2),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: torch.cat([x, x], 1),
    ],
)
def test_repeated_channels_are_more_channels(repeated):
    def forward(self, x):
        return torch.cat([repeated(x), x.relu()], 1) @ torch.ones(12, 1, device=x.device)

    assert walked_length(channel_graph(Calls(forward), torch.ones(1, 4))) == pytest.approx(1 / 3)


def test_single_channel_expanded_to_several_fits_grouped_convolution():
    expanded = Calls(lambda self, x: x.expand(-1, 4, -1, -1))
    model = nn.Sequential(expanded, nn.Conv2d(4, 4, 1, groups=2), nn.ReLU())
    assert walked_length(channel_graph(model, torch.ones(1, 1, 3, 3))) == 1.0


def test_pooling_over_channels_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 4)), nn.AvgPool1d(2))
    with pytest.raises(UnsupportedOperation):
        channel_graph(model, torch.ones(1, 4))


def test_fused_attention_has_paths_of_its_parts():
    def parts(self, x):
        q = x.unflatten(2, (2, 2)).transpose(1, 2)
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)

    def fused(self, x):
        q = x.unflatten(2, (2, 2)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    def tokens(function):
        mixed = nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU(), Calls(function))
        return counted_lengths(channel_graph(mixed, torch.ones(1, 3, 4)))

    assert tokens(parts) == tokens(fused)


def test_custom_operation_is_unit_ruled_or_refused():
    def function(name):
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x - x.floor()

        Own.__qualname__ = name
        return Own

    saw, swap, unknown = (function(name) for name in ("saw", "swap", "unknown"))
    nlbench.register_op(saw, kind="saw")
    nlbench.register_op(swap, graph=lambda call: call.nodes(call.args[0]).flip(1))
    graph = channel_graph(Calls(lambda self, x: saw.apply(x)), torch.ones(1, 4))
    assert [(unit.site, unit.size) for unit in graph.units] == [("saw", 4)]
    swapped = channel_graph(Calls(lambda self, x: swap.apply(x[:, :3].relu())), torch.ones(1, 4))
    assert walked_length(swapped) == 1.0
    with pytest.raises(UnsupportedOperation):
        channel_graph(Calls(lambda self, x: unknown.apply(x)), torch.ones(1, 4))
