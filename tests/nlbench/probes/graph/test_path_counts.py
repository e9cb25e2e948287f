"""Lengths of paths against numbers that flow through the very same random networks.

All weights are 1 and an active unit multiplies by ``base``: with base 1 an output is its
number of paths, and the slope in base is the sum of their lengths. Where every mean is
taken over what meets, the slope is the expected length of the walk back.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from nlbench.probes.graph.channel_graph import counted_lengths, walked_length
from nlbench.probes.graph.graph_observation import channel_graph


class Numbers:
    """The operations of a network on numbers that count; positions are equal."""

    def __init__(self, base, walked):
        self.base, self.walked = base, walked

    def mixed(self, x, axis, outputs, groups=1):
        parts = x.movedim(axis, -1).unflatten(-1, (groups, -1))
        met = parts.mean(-1, keepdim=True) if self.walked else parts.sum(-1, keepdim=True)
        return met.repeat_interleave(outputs // groups, -1).flatten(-2).movedim(-1, axis)

    def unit(self, x, active, axis=1):
        shape = [1] * x.ndim
        shape[axis] = -1
        return x * torch.where(active, self.base, 1.0).reshape(shape)

    def met(self, *branches):
        total = sum(branches)
        return total / len(branches) if self.walked else total


class Layers(nn.ModuleList):
    """The same operations as a network has them; made when first called, then reused."""

    def __init__(self):
        super().__init__()
        self.place = 0

    def _next(self, make):
        if self.place == len(self):
            self.append(make())
        self.place += 1
        return self[self.place - 1]

    def mixed(self, x, axis, outputs, groups=1):
        if x.ndim == 3 and axis == 2 and groups == 1:
            return self._next(lambda: nn.Linear(x.shape[2], outputs))(x)
        kinds = [nn.Conv1d, nn.Conv2d] if outputs % 2 else [nn.ConvTranspose1d, nn.ConvTranspose2d]
        kind = kinds[x.ndim - 3]
        return self._next(lambda: kind(x.shape[1], outputs, 1, groups=groups))(
            x.transpose(1, axis)
        ).transpose(1, axis)

    def unit(self, x, active, axis=1):
        def make():
            layer = nn.PReLU(len(active))
            layer.weight.data = torch.where(active, 0.25, 1.0)
            return layer

        return self._next(make)(x.transpose(1, axis)).transpose(1, axis)

    def met(self, first, second):
        return first + second


def step(run, kind, x, y, number):
    """One drawn step of (batch, channels, height, width) tensors, by either of the two."""
    channels = x.shape[1]
    groups = 2 if channels % 2 == 0 else channels
    picked = torch.tensor([(number + (number // 8) * i) % channels for i in range(1 + number % 4)])
    active = torch.tensor([(number >> i) % 2 == 0 for i in range(channels)])
    if kind == "mix":
        return run.mixed(x, 1, 1 + number % 4)
    if kind == "grouped":
        return run.mixed(x, 1, groups * (1 + number % 2), groups)
    if kind == "unit":
        return run.unit(x, active)
    if kind == "add" and x.shape == y.shape:
        return run.met(x, y)
    if kind == "broadcast":
        return run.met(x, run.mixed(y, 1, 1).mean((2, 3), keepdim=True))
    if kind == "cat" and channels + y.shape[1] <= 6:
        return torch.cat([x, y], 1)
    if kind == "repeat" and channels * 2 <= 6:
        again = [
            lambda: x.repeat(1, 2, 1, 1),
            lambda: x.tile(2, 1, 1),
            lambda: x.repeat_interleave(2, 1),
            lambda: torch.stack([x, x * 2 / 2], 1).flatten(1, 2) if channels > 1 else x,
            lambda: x[:, :1].expand(-1, 2, -1, -1),
            lambda: x[:, :1] * x.new_ones(2, 1, 1),
            lambda: torch.cat([x, x], 1),
        ]
        return again[number % len(again)]()
    if kind == "index":
        taken = [
            lambda: x[:, picked],
            lambda: x[:, picked.tolist()],
            lambda: x.index_select(1, picked),
            lambda: x[..., picked, :, :],
            lambda: torch.take_along_dim(x, picked[None, :, None, None], 1),
            lambda: x[:, torch.stack([picked, picked])].flatten(1, 2),
        ]
        return taken[number % len(taken)]()
    if kind == "tokens":
        tokens = run.unit(run.mixed(x.flatten(2).transpose(1, 2), 2, 3), active[:1].repeat(3), 2)
        return tokens.transpose(1, 2).unflatten(2, tuple(x.shape[2:]))
    if kind == "shuffle":
        return F.channel_shuffle(x, groups) if channels % groups == 0 else x
    if kind == "split":
        return x.tensor_split(2, 1)[1] if channels > 1 else x
    if kind == "memory":
        return x.contiguous(memory_format=torch.channels_last).roll(1, 1)
    if kind == "written":
        made = torch.zeros_like(x)
        made[:, :1] = x[:, picked[:1]]
        made[:, 1:] = x[:, 1:].flip(1)
        return made
    return x


class Drawn(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps, self.layers = steps, Layers()

    def forward(self, x):
        self.layers.place = 0
        return flowing(self.layers, self.steps, x)


def flowing(run, steps, x):
    tensors = [x]
    for kind, first, second, number in steps:
        x, y = tensors[-1 - first % len(tensors)], tensors[-1 - second % len(tensors)]
        tensors.append(step(run, kind, x, y, number))
    return tensors[-1]


KINDS = ["mix", "unit", "unit", "unit", "grouped", "add", "add", "broadcast", "cat", "repeat"]
KINDS += ["index", "tokens", "shuffle", "split", "memory", "written"]
STEPS = st.tuples(
    st.sampled_from(KINDS), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 3), st.integers(0, 63)
)


@given(st.integers(1, 4), st.lists(STEPS, min_size=1, max_size=9))
def test_lengths_equal_those_of_flow_through_network(channels, steps):
    x = torch.ones(1, channels, 2, 3, dtype=torch.float64)
    base = torch.ones((), dtype=torch.float64, requires_grad=True)
    paths = flowing(Numbers(base, walked=False), steps, x)[0, :, 0, 0].sum()
    chances = flowing(Numbers(base, walked=True), steps, x)[0, :, 0, 0].mean()
    assert chances.item() == pytest.approx(1)
    assume(paths.requires_grad)
    network = Drawn(steps)
    network(x.float())  # Makes the layers.
    graph = channel_graph(network, x.float())
    counted = counted_lengths(graph)
    total = torch.autograd.grad(paths, base)[0].item()
    assert 10**counted.log10_paths == pytest.approx(paths.item())
    assert counted.mean == pytest.approx(total / paths.item())
    walk = torch.autograd.grad(chances, base)[0].item()
    assert walked_length(graph) == pytest.approx(walk)
