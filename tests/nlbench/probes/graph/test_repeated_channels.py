"""Repeated channels are new channels, repeated positions are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlbench.errors import UnsupportedOperation
from nlbench.measures.pathlength import average_path_length
from nlbench.probes.graph.channel_graph import counted_lengths
from nlbench.probes.graph.graph_observation import channel_graph


class Calls(nn.Module):
    def __init__(self, forward, *layers):
        super().__init__()
        self.function, self.layers = forward, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


def beside_relu(again):
    """Three channels that `again` makes of one, beside the same channel after a ReLU."""
    return lambda x, first: torch.cat([again(h := first(x)), h.relu()], 1)


THREE_OF_ONE = {
    "cat": lambda h: torch.cat([h, h, h], 1),
    "expand": lambda h: h.expand(-1, 3),
    "expand_as": lambda h: h.expand_as(torch.zeros(len(h), 3)),
    "broadcast_to": lambda h: h.broadcast_to(len(h), 3),
    "repeat": lambda h: h.repeat(1, 3),
    "tile": lambda h: h.tile(3),
    "repeat_interleave": lambda h: h.repeat_interleave(3, 1),
    "a count for each": lambda h: h.repeat_interleave(torch.tensor([3]), 1),
    "index": lambda h: h[:, torch.tensor([0, 0, 0])],
    "list": lambda h: h[:, [0, 0, 0]],
    "index_select": lambda h: h.index_select(1, torch.tensor([0, 0, 0])),
    "take_along_dim": lambda h: h.take_along_dim(torch.zeros(1, 3, dtype=torch.long), 1),
    "broadcast by a product": lambda h: h * torch.ones(3),
    "broadcast by a sum": lambda h: torch.zeros(3) + h,
    "broadcast by addcmul": lambda h: torch.addcmul(torch.zeros(3), h, torch.ones(3)),
    "broadcast by lerp": lambda h: torch.lerp(h, torch.ones(3), 0.5),
}


@pytest.mark.parametrize("again", THREE_OF_ONE.values(), ids=THREE_OF_ONE)
def test_channel_taken_three_times_counts_three_times(again):
    model = Calls(beside_relu(again), nn.Linear(2, 1))
    example = torch.zeros(1, 2)
    assert average_path_length(model, example) == 0.25
    lengths = counted_lengths(channel_graph(model, example))
    assert (lengths.mean, 10**lengths.log10_paths) == (0.25, pytest.approx(8))


FOUR_OF_TWO = {
    "cat": lambda h: torch.cat([h, h, h, h.relu()], 1),
    "stack": lambda h: torch.stack([h, h, h, h.relu()], 1).flatten(1),
    "stack last": lambda h: torch.stack([h, h, h, h.relu()], -1).flatten(1),
    "index": lambda h: torch.cat([h, h.relu()], 1)[:, [0, 1, 0, 1, 0, 1, 2, 3]],
    "assignment": lambda h: assigned(h),
}


def assigned(h):
    made = torch.cat([h, h, h, h.relu()], 1).clone()
    made[:, 2:4] = h
    return made


@pytest.mark.parametrize("again", FOUR_OF_TWO.values(), ids=FOUR_OF_TWO)
def test_adjacent_channels_count_each_occurrence(again):
    model = Calls(lambda x, first, last: last(again(first(x))), nn.Linear(3, 2), nn.Linear(8, 1))
    example = torch.zeros(1, 3)
    assert average_path_length(model, example) == 0.25
    assert average_path_length(model, example, normalized=False) == 0.25


def test_channel_assigned_to_two_places_is_two_channels():
    def forward(x, first):
        h = first(x)
        made = torch.zeros_like(h)
        made[:, 0] = h[:, 3]
        made[:, 1] = h[:, 3]
        made[:, 2] = h[:, 3]
        made[:, 3] = h[:, 3].relu()
        return made

    model = Calls(forward, nn.Linear(2, 4))
    assert average_path_length(model, torch.zeros(1, 2)) == 0.25


def test_map_selected_by_channels_counts_each_choice():
    def forward(x, first):
        h = torch.cat([first(x), first(x).relu()], 1)
        return h[:, [0, 3, 3, 3]].mean((2, 3))

    model = Calls(forward, nn.Conv2d(1, 2, 1))
    assert average_path_length(model, torch.zeros(1, 1, 2, 2)) == 0.75


def test_axis_of_a_single_channel_survives_an_index():
    model = Calls(lambda x, unit: unit(x)[:, [0, 0]][:, :1].expand(-1, 2, -1, -1), nn.PReLU(1))
    graph = channel_graph(model, torch.ones(1, 1, 2, 3))
    assert 10 ** counted_lengths(graph).log10_paths == pytest.approx(2)


SAME_CHANNEL = {
    "expand": lambda h: h.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4),
    "repeat": lambda h: h.repeat(1, 1, 2, 2),
    "index": lambda h: h[:, :, [0, 0, 1, 1]][..., torch.tensor([0, 0, 1, 1])],
    "interleave": lambda h: h.repeat_interleave(2, 2).repeat_interleave(2, 3),
    "by a constant": lambda h: h.mean((2, 3), keepdim=True) * torch.ones(4, 4),
    "cat": lambda h: torch.cat([h, h], 2),
}


@pytest.mark.parametrize("again", SAME_CHANNEL.values(), ids=SAME_CHANNEL)
@pytest.mark.parametrize("channels", [1, 3])
def test_positions_taken_again_are_the_same_channel(again, channels):
    model = Calls(lambda x, first: again(first(x)).relu(), nn.Conv2d(2, channels, 1))
    graph = channel_graph(model, torch.zeros(1, 2, 2, 2))
    assert [unit.size for unit in graph.units] == [channels]


BENT = {
    "amax": lambda h: h.view(-1, 3, 2).amax(2),
    "amin": lambda h: h.view(-1, 3, 2).amin(2),
    "max": lambda h: h.view(-1, 3, 2).max(2).values,
    "min": lambda h: h.view(-1, 3, 2).min(2)[0],
    "the largest of all": lambda h: h.max()[None],
    "pooling": lambda h: F.max_pool1d(h.view(-1, 3, 2), 2),
    "adaptive pooling": lambda h: F.adaptive_max_pool1d(h.view(-1, 3, 2), 1),
    "norm pooling": lambda h: F.lp_pool1d(h.view(-1, 3, 2), 2.0, 2),
    "maximum": lambda h: torch.maximum(h, -h),
    "clamp": lambda h: h.clamp(min=0),
    "a rectifier of stacked tensors": lambda h: torch.stack([h, torch.zeros_like(h)], 1).amax(1),
    "a magnitude of stacked tensors": lambda h: torch.stack([h, -h], 1).amax(1),
    "a magnitude of concatenated tensors": lambda h: torch.cat([h[:, None], -h[:, None]], 1).amax(
        1
    ),
    "abs": lambda h: h.abs(),
    "a product with itself": lambda h: h * h,
    "a product with itself, added": lambda h: torch.addcmul(h, h, h),
    "a product with itself, summed": lambda h: torch.einsum("bi,bi->b", h, h),
    "whole numbers": lambda h: h.to(torch.int64).to(torch.float32),
    "whole numbers by type": lambda h: h.type(torch.int32).float(),
    "whole quotients": lambda h: torch.div(h, 2, rounding_mode="floor"),
}


@pytest.mark.parametrize("bend", BENT.values(), ids=BENT)
def test_nonlinear_operation_other_than_units_is_refused(bend):
    model = Calls(
        lambda x, first, last: last(bend(first(x)).float()), nn.Linear(2, 6), nn.Identity()
    )
    with pytest.raises(UnsupportedOperation):
        channel_graph(model, torch.zeros(1, 2))


SIGNS = torch.tensor([1.0, -1.0])


def written_beside(h):
    twice = torch.cat([h, h], 2)
    twice[:, :, :4] = -h
    return twice.view(1, 3, 2, 4).amax(2)


LAID_SIDE_BY_SIDE = {
    "cat": lambda h: torch.cat([h, -h], 2).view(1, 3, 2, 4).amax(2),
    "cat after a layer": lambda h: torch.cat([h, 2 * h], 2).relu().unflatten(2, (2, 4)).amin(2),
    "cat as a whole": lambda h: torch.cat([h, -h], 2).amax(2),
    "cat with zeros": lambda h: torch.cat([h, torch.zeros(1, 3, 4)], 2).view(1, 3, 2, 4).amax(2),
    "cat and pooling": lambda h: F.max_pool1d(
        torch.cat([h, -h], 2).view(1, 3, 2, 4).transpose(2, 3).flatten(2), 2
    ),
    "cat and wide pooling": lambda h: F.max_pool1d(torch.cat([h, -h], 2), 2, dilation=4),
    "cat and picking": lambda h: F.max_pool1d(torch.cat([h, -h], 2)[:, :, [0, 4, 1, 5]], 2),
    "pad": lambda h: F.pad(h, (0, 4)).view(1, 3, 2, 4).max(2).values,
    "pad and pooling": lambda h: F.max_pool1d(
        F.pad(h, (0, 4)).view(1, 3, 2, 4).transpose(2, 3).flatten(2), 2
    ),
    "pad and wide pooling": lambda h: F.max_pool1d(F.pad(h, (0, 4)), 2, dilation=4),
    "pad and picking": lambda h: F.max_pool1d(F.pad(h, (0, 4))[:, :, [0, 4, 1, 5]], 2),
    "cat with itself": lambda h: F.max_pool1d(torch.cat([h, h], 2) * SIGNS.repeat_interleave(4), 2),
    "a new axis": lambda h: (h[:, :, None] * SIGNS[:, None]).amax(2),
    "a new axis, expanded": lambda h: (h[:, :, None].expand(-1, -1, 2, -1) * SIGNS[:, None]).amax(
        2
    ),
    "repetition": lambda h: (h.repeat(1, 1, 2) * SIGNS.repeat_interleave(4)).view(1, 3, 2, 4).amax(
        2
    ),
    "interleaving": lambda h: F.max_pool1d(h.repeat_interleave(2, 2) * SIGNS.repeat(4), 2),
    "enlargement": lambda h: F.max_pool1d(F.interpolate(h, scale_factor=2) * SIGNS.repeat(4), 2),
    "a mask": lambda h: h.repeat(1, 1, 2)
    .masked_fill(torch.arange(8) > 3, 0.0)
    .view(1, 3, 2, 4)
    .amax(2),
    "assignment": written_beside,
    "a norm's factors": lambda h: F.batch_norm(
        h[:, 0][:, None].expand(-1, 2, -1), torch.zeros(2), torch.ones(2), SIGNS
    ).amax(1),
}  # fmt: skip


@pytest.mark.parametrize("bend", LAID_SIDE_BY_SIDE.values(), ids=LAID_SIDE_BY_SIDE)
def test_maximum_over_stacked_positions_is_refused(bend):
    model = Calls(lambda x, first: bend(first(x)), nn.Conv1d(2, 3, 1))
    with pytest.raises(UnsupportedOperation):
        average_path_length(model, torch.zeros(1, 2, 4))


def test_channels_added_to_a_single_one_are_constant():
    model = Calls(
        lambda x, three, one: three(x).relu() + F.pad(one(x), (0, 0, 1, 1)),
        nn.Conv1d(2, 3, 1),
        nn.Conv1d(2, 1, 1),
    )
    # Two of three channels have no way around the unit.
    length = average_path_length(model, torch.zeros(1, 2, 4), normalized=True)
    assert length == pytest.approx((1 + 1 + 0.5) / 3)


def test_channel_assigned_to_its_own_place_stays_same():
    def forward(x):
        y = x.clone()
        y[:, :1] = x[:, :1]
        return y

    graph = channel_graph(Calls(forward), torch.zeros(1, 2, 4))
    assert (graph.nodes, graph.outputs.tolist()) == (2, [0, 1])


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: F.max_pool2d(F.pad(h, (0, 1, 0, 1)), 2),
        lambda h: F.max_pool2d(h * h.mean((2, 3), keepdim=True).expand_as(h), 2),
        lambda h: (h + torch.zeros(4, 4)).flatten(2).amax(2),
        lambda h: (h * torch.ones(3, 1, 1)).amax((2, 3)),
        lambda h: h.amax((2, 3)),
        lambda h: h.flatten(2).max(2).values,
        lambda h: F.adaptive_max_pool2d(h, 1),
        lambda h: F.max_pool2d(h, 2),
    ],
)
def test_maximum_over_positions_keeps_channels_like_any_pooling(pool):
    model = Calls(lambda x, first: pool(first(x)), nn.Conv2d(2, 3, 1))
    assert average_path_length(model, torch.zeros(1, 2, 4, 4)) == 0.0
