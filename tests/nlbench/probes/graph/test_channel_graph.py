"""Lengths of paths compared with an enumeration, on random small networks."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from nlbench.measures.pathlength import average_path_length
from nlbench.probes.graph.channel_graph import (
    Builder,
    ChannelGraph,
    Inputs,
    Merge,
    Units,
    compact,
    counted_lengths,
    differs,
    expand_constant,
    varies,
    walked_length,
)
from nlbench.probes.graph.graph_observation import channel_graph


class Drawn(nn.Module):
    """A network of drawn steps, beside the channel graph written down by hand.

    Each tensor is a list of nodes; ``before[node]`` are the nodes that it is made of, and
    ``active`` has those that are nonlinear units.
    """

    def __init__(self, channels, steps):
        super().__init__()
        self.steps, self.layers = [], nn.ModuleList()
        self.before, self.active = [[] for _ in range(channels)], set()
        tensors = [list(range(channels))]
        for kind, first, second, number in steps:
            a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
            step = [kind, first % len(tensors), second % len(tensors), None]
            if kind == "mix":
                made = self._merge([a] * (1 + number % 3))
                step[3] = self._layer(nn.Conv2d(len(a), len(made), 1))
            elif kind == "depthwise":
                made = self._merge([[node] for node in a])
                step[3] = self._layer(nn.Conv2d(len(a), len(a), 3, padding=1, groups=len(a)))
            elif kind == "grouped" and len(a) % 2 == 0:
                half = len(a) // 2
                made = self._merge([a[:half]] * 2 + [a[half:]] * 2)
                step[3] = self._layer(nn.Conv2d(len(a), 4, 1, groups=2))
            elif kind in ("add", "gate") and len(a) == len(b):
                made = self._merge([[one, two] for one, two in zip(a, b, strict=True)])
            elif kind == "cat" and len(a) + len(b) <= 6:
                made = a + b
            elif kind == "shuffle" and len(a) % 2 == 0:
                made = [a[i * len(a) // 2 + j] for j in range(len(a) // 2) for i in range(2)]
            elif kind == "half" and len(a) > 1:
                made = a[len(a) // 2 :]
            elif kind == "unit":
                made = self._merge([[node] for node in a])
                slopes = [(number >> place) % 2 for place in range(len(a))]
                self.active |= {node for node, slope in zip(made, slopes, strict=True) if not slope}
                step[3] = self._layer(nn.PReLU(len(a)))
                with torch.no_grad():
                    self.layers[-1].weight.copy_(torch.tensor(slopes))
            else:
                continue
            self.steps.append(step)
            tensors.append(made)
        self.nodes = tensors[-1]

    def _merge(self, sets):
        self.before += sets
        return list(range(len(self.before) - len(sets), len(self.before)))

    def _layer(self, layer):
        self.layers.append(layer)
        return len(self.layers) - 1

    def forward(self, x):
        tensors = [x]
        for kind, first, second, layer in self.steps:
            a, b = tensors[first], tensors[second]
            if layer is not None:
                made = self.layers[layer](a)
            elif kind == "add":
                made = a + b
            elif kind == "gate":
                made = a * b.mean((2, 3), keepdim=True)
            elif kind == "cat":
                made = torch.cat([a, b], 1)
            elif kind == "shuffle":
                made = a.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            else:
                made = a[:, a.shape[1] // 2 :]
            tensors.append(made)
        return tensors[-1]

    def number_of_paths(self):
        paths = []
        for before in self.before:
            paths.append(sum(paths[node] for node in before) if before else 1)
        return sum(paths[node] for node in self.nodes)

    def enumerated(self):
        """Every path as (length, probability of the walk back)."""

        def back(node, length, chance):
            length += node in self.active
            if not self.before[node]:
                yield length, chance
            for earlier in self.before[node]:
                yield from back(earlier, length, chance / len(self.before[node]))

        for node in self.nodes:
            yield from back(node, 0, Fraction(1, len(self.nodes)))


kinds = ["mix", "mix", "unit", "unit", "unit", "depthwise", "grouped", "add", "add", "gate"]
steps = st.tuples(
    st.sampled_from([*kinds, "cat", "shuffle", "half"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 63),
)
# The last tensors are taken more often, so that the drawn networks are deep.
late = steps.map(lambda step: (step[0], -1 - min(step[1], 2), -1 - step[2] % 4, step[3]))


@given(st.integers(1, 4), st.lists(st.one_of(steps, late, late), min_size=1, max_size=10))
def test_lengths_equal_an_enumeration_of_paths(channels, drawn):
    network = Drawn(channels, drawn)
    assume(0 < network.number_of_paths() <= 3000)
    paths = list(network.enumerated())
    graph = channel_graph(network, torch.zeros(1, channels, 2, 3))
    counted = counted_lengths(graph)
    expected = sum(length for length, _ in paths) / len(paths)
    assert counted.mean == pytest.approx(expected, abs=1e-12)
    assert counted.log10_paths == pytest.approx(math.log10(len(paths)), abs=1e-9)
    walked = float(sum(length * chance for length, chance in paths))
    assert walked_length(graph) == pytest.approx(walked, abs=1e-12)


class Bridged(nn.Module):
    """Four hidden layers of width 4 bridged by a residual connection, one node at either end."""

    def __init__(self):
        super().__init__()
        widths = [1, 4, 4, 4, 4]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)
        )
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + self.last(y)


def test_bridged_network_has_257_paths_of_1024_units():
    graph = channel_graph(Bridged(), torch.zeros(1, 1))
    lengths = counted_lengths(graph)
    assert lengths.mean == 1024 / 257
    assert 10**lengths.log10_paths == pytest.approx(257)
    assert walked_length(graph) == 2.0
    assert average_path_length(Bridged(), torch.zeros(3, 1), normalized=False) == 1024 / 257


@pytest.mark.parametrize("depth", [0, 1, 7, 40])
def test_plain_chain_has_length_of_its_activation_layers(depth):
    layers = [m for _ in range(depth) for m in (nn.Linear(5, 5), nn.Tanh())]
    chain = nn.Sequential(*layers, nn.Linear(5, 3))
    for normalized in (True, False):
        length = average_path_length(chain, torch.zeros(1, 5), normalized=normalized)
        assert length == pytest.approx(depth, abs=1e-12)


def test_the_number_of_paths_may_exceed_any_float():
    chain = nn.Sequential(*(m for _ in range(400) for m in (nn.Linear(10, 10), nn.ReLU())))
    lengths = counted_lengths(channel_graph(chain, torch.zeros(1, 10)))
    assert lengths.log10_paths == pytest.approx(401)
    assert lengths.mean == pytest.approx(400, rel=1e-12)


def test_linear_units_shorten_paths_by_their_fraction():
    prelu = nn.PReLU(4)
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([0.0, 1.0, 0.3, 1.0]))
    chain = nn.Sequential(nn.Linear(2, 4), prelu, nn.Linear(4, 3), nn.LeakyReLU(1.0))
    assert average_path_length(chain, torch.zeros(1, 2)) == 0.5


def test_activity_weighs_units():
    chain = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    graph = channel_graph(chain, torch.zeros(1, 2))
    activity = {"1": torch.tensor([0.0, 1.0, 0.5, 0.25], dtype=torch.float64)}
    assert walked_length(graph, activity) == 0.4375
    assert counted_lengths(graph, activity).mean == 0.4375


def test_traced_and_written_graph_agree_on_sizes():
    network = Drawn(2, [("mix", 0, 0, 2), ("unit", 1, 0, 0), ("cat", 1, 2, 0), ("add", 3, 3, 0)])
    assert network(torch.zeros(1, 2, 2, 2)).shape[1] == len(network.nodes) == 6
    assert Counter(len(before) for before in network.before) == {0: 2, 1: 3, 2: 9}


def unit(nodes, active=1.0):
    """Units on nodes, all of one activity."""
    sources, entries = torch.tensor(nodes), torch.arange(len(nodes))
    activity = torch.full((len(nodes),), active, dtype=torch.float64)
    return Units("unit", sources, activity, entries, (len(nodes),))


def test_padding_of_a_set_adds_no_branch():
    sources = torch.tensor([[2, 3, 1], [3, -1, -1]])
    steps = (Inputs(2), unit([0, 1]), Merge(sources, 2), unit([4, 6]))
    graph = ChannelGraph(steps, torch.tensor([8, 9]))
    # Of the first set, two of three nodes have a unit behind them; of the second, the only one.
    assert walked_length(graph) == ((1 + 2 / 3) + 2) / 2
    lengths = counted_lengths(graph)
    assert lengths.mean == pytest.approx((2 + 2 + 1 + 2) / 4)
    assert lengths.log10_paths == pytest.approx(math.log10(4))


def test_copies_of_a_set_are_adjacent():
    steps = (Inputs(1), unit([0]), Merge(torch.tensor([[0], [1]]), 3))
    lengths = [walked_length(ChannelGraph(steps, torch.tensor([node]))) for node in range(2, 8)]
    assert lengths == [0, 0, 0, 1, 1, 1]
    counted = [counted_lengths(ChannelGraph(steps, torch.tensor([n]))).mean for n in range(2, 8)]
    assert counted == lengths


def merges(builder):
    steps = builder.graph(torch.zeros(1).long()).steps
    return [step.sources.tolist() for step in steps if isinstance(step, Merge)]


def test_a_constant_that_occurs_again_stays_constant():
    builder = Builder()
    nodes = torch.cat([builder.inputs(2), torch.tensor([-1])])
    again = builder.new_channels(nodes.repeat(2), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert again.tolist() == [0, 1, -1, 2, 3, -1]
    assert merges(builder) == [[[0], [1]]]


def test_third_occurrence_is_another_channel_than_the_second():
    builder = Builder()
    again = builder.new_channels(builder.inputs(1).repeat(4), torch.tensor([0, 1, 2, 1]))
    assert again.tolist() == [0, 1, 2, 1]


def test_constants_vary_from_channels_but_do_not_differ():
    nodes = torch.tensor([[3, -1, 3], [4, 4, 4], [-1, -1, -1], [3, 4, -1]])
    assert [differs(row[None], 1) for row in nodes] == [False, False, False, True]
    assert [varies(row[None], 1) for row in nodes] == [True, False, False, True]
    assert not differs(torch.tensor([[3, 4]]), 0)
    assert not varies(torch.tensor([[3, 4]]), 0)


def test_channel_repeated_in_a_sum_is_one_branch():
    builder = Builder()
    builder.inputs(4)
    rows = torch.tensor([[2, 1, 2, -1], [1, 2, 1, 1], [3, 3, 3, 0], [3, -1, 3, 3]])
    reduced = builder.reduce(rows, [1])
    assert merges(builder) == [[[2, 1], [3, 0]]]
    assert reduced.tolist() == [4, 4, 5, 3]
    assert builder.reduce(rows[:1], [1]).tolist() == [6]
    assert merges(builder)[1:] == [[[1, 2]]]


def test_a_mix_of_constants_is_constant():
    builder = Builder()
    nodes = torch.stack([builder.inputs(2), torch.tensor([-1, -1]), torch.tensor([0, -1])])
    mixed = builder.mix(nodes, 2)
    assert mixed.tolist()[1] == [-1, -1]
    assert merges(builder) == [[[0, -1], [1, 0]]]
    assert {tuple(mixed.tolist()[i]) for i in (0, 2)} == {(2, 3), (4, 5)}
    assert mixed.tolist()[0] == [4, 5]


def test_a_constant_adds_no_branch_to_a_pair():
    builder = Builder()
    a = torch.cat([builder.inputs(3), torch.tensor([-1, -1])])
    b = torch.tensor([2, -1, 2, 1, -1])
    assert builder.merge(a, b).tolist() == [3, 1, 4, 1, -1]
    assert merges(builder) == [[[0, 2], [2, 2]]]


def test_units_are_distinct_by_node_and_slope():
    builder = Builder()
    nodes = torch.cat([builder.inputs(2), torch.tensor([-1])]).expand(2, 3)
    active = torch.tensor([1.0, 0.0], dtype=torch.float64)
    units = builder.activate(nodes, "act", active, torch.tensor([[0], [1]]))
    (step,) = builder.graph(units).units
    assert step.sources.tolist() == [0, 0, 1, 1]
    assert step.active.tolist() == [1, 0, 1, 0]
    assert step.entries.tolist() == [[0, 2, -1], [1, 3, -1]]
    assert units.tolist() == [[2, 4, -1], [3, 5, -1]]
    assert walked_length(builder.graph(units)) == 0.5


def test_channel_for_all_groups_is_convolved_by_each():
    builder = Builder()
    convolved = builder.convolve(builder.inputs(1).expand(2, 4, 3), 2, (2, 6, 3))
    assert convolved.shape == (2, 6, 3)
    assert merges(builder) == [[[0]]]
    assert compact(convolved).flatten().tolist() == [1, 2, 3, 1, 2, 3]


def test_groups_mix_their_own_channels():
    builder = Builder()
    convolved = builder.convolve(builder.inputs(4)[None, :, None].expand(1, 4, 5), 2, (1, 6, 3))
    assert merges(builder) == [[[1, 0], [3, 2]]]
    assert convolved[0, :, 0].tolist() == [4, 5, 6, 7, 8, 9]


def test_outputs_count_once_and_constants_never():
    builder = Builder()
    nodes = builder.inputs(2)
    graph = builder.graph(torch.tensor([1, 1, -1, 0]))
    assert graph.outputs.tolist() == nodes.tolist()
    assert (graph.inputs, graph.nodes) == (2, 2)


def test_constant_axes_are_expanded():
    nodes = torch.tensor([[1, 1], [2, 2]])
    assert torch.equal(expand_constant(nodes), nodes)
    assert compact(expand_constant(nodes)).tolist() == [[1], [2]]
