"""Networks observed with plain PyTorch hooks, to check traces of segments."""

import copy
import itertools

import torch
from hypothesis import strategies as st
from torch import nn

from nlbench.probes.lines import SegmentTrace

MIN_REGION_WIDTH = 1e-9
"""Width in t below which regions are not checked."""


def on_segment(start, end, t):
    """Return the points of the segment at parameters t, of shape (m, *input)."""
    t = torch.as_tensor(t, dtype=torch.float64).reshape(-1, *[1] * start.ndim)
    return (1 - t) * start.double() + t * end.double()


def patterns(model, points):
    """Return the piece of every unit, of shape (m, units), from pre-hooks on a double copy."""
    twin = copy.deepcopy(model).eval().double()
    pieces = []

    def watch(module, inputs):
        z = inputs[0].clone()
        if isinstance(module, nn.MaxPool2d):
            # All members that attain the maximum; units that are off or duplicates tie.
            cells = nn.functional.unfold(z, module.kernel_size, stride=module.stride)
            cells = cells.reshape(len(z), z.shape[1], -1, cells.shape[-1])
            tolerance = 1e-13 * z.abs().amax(dim=(1, 2, 3), keepdim=True)
            piece = (cells >= cells.amax(2, keepdim=True) - tolerance).long()
        else:
            tolerance = 1e-14 * z.abs().amax(dim=tuple(range(1, z.ndim)), keepdim=True)
            kinks = (0.0, 6.0) if isinstance(module, nn.ReLU6) else (0.0,)
            kinks = (-1.0, 1.0) if type(module) is nn.Hardtanh else kinks
            piece = sum((z > kink + tolerance).long() for kink in kinks)
            if isinstance(module, nn.PReLU):
                bends = (module.weight != 1).reshape(1, -1, *[1] * (z.ndim - 2))
                piece = piece * bends
        pieces.append(piece.flatten(1))

    kinds = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.MaxPool2d)
    for module in twin.modules():
        if isinstance(module, kinds):
            module.register_forward_pre_hook(watch)
    with torch.no_grad():
        twin(points)
    return torch.cat(pieces, 1)


def outputs(model, points):
    twin = copy.deepcopy(model).eval().double()
    with torch.no_grad():
        return twin(points).flatten(1)


def assert_exact(model, start, end, trace):
    """Assert that the network is affine between consecutive breakpoints."""
    assert trace.t[0] == 0
    assert trace.t[-1] == 1
    assert (trace.t.diff() > 0).all()
    weights = torch.tensor([0.0, 0.3, 0.5, 0.9], dtype=torch.float64)
    t = trace.t[:-1, None] + weights * trace.t.diff()[:, None]
    values = outputs(model, on_segment(start, end, t.flatten())).reshape(*t.shape, -1)
    left, right = trace.values[:-1, None], trace.values[1:, None]
    expected = left + weights[:, None] * (right - left)
    scale = float(trace.values.abs().max())
    assert float((values - expected).abs().max()) <= 1e-9 * scale + 1e-300


def assert_patterns(model, start, end, trace):
    """Assert that units keep their pieces in regions, and some unit changes at breakpoints."""
    is_wide = trace.t.diff() > MIN_REGION_WIDTH
    t = trace.t[:-1, None] + torch.tensor([0.2, 0.5, 0.8]) * trace.t.diff()[:, None]
    pieces = patterns(model, on_segment(start, end, t.flatten())).reshape(*t.shape, -1)
    assert (pieces[is_wide] == pieces[is_wide][:, 1:2]).all()
    pairs = is_wide[:-1] & is_wide[1:]
    assert (pieces[:-1, 1] != pieces[1:, 1]).any(1)[pairs].all()


def boundaries(model, start, end, samples=400, width=2e-11):
    """Bracket every change of pattern between dense samples by bisection, in rows of two."""
    left = torch.linspace(0, 1, samples + 1, dtype=torch.float64)
    brackets = []
    pieces = patterns(model, on_segment(start, end, left))
    changed = (pieces[:-1] != pieces[1:]).any(1)
    left, right = left[:-1][changed], left[1:][changed]
    left_pieces, right_pieces = pieces[:-1][changed], pieces[1:][changed]
    while len(left):
        middle = (left + right) / 2
        pieces = patterns(model, on_segment(start, end, middle))
        first, second = (pieces != left_pieces).any(1), (pieces != right_pieces).any(1)
        left, right, left_pieces, right_pieces = (
            torch.cat([left[first], middle[second]]),
            torch.cat([middle[first], right[second]]),
            torch.cat([left_pieces[first], pieces[second]]),
            torch.cat([pieces[first], right_pieces[second]]),
        )
        is_narrow = right - left < width
        brackets.append(torch.stack([left[is_narrow], right[is_narrow]], 1))
        left, right = left[~is_narrow], right[~is_narrow]
        left_pieces, right_pieces = left_pieces[~is_narrow], right_pieces[~is_narrow]
    return torch.cat(brackets) if brackets else torch.zeros(0, 2, dtype=torch.float64)


def assert_complete(model, start, end, trace):
    """Assert that every change of pattern is close to a breakpoint.

    Brute force detects changes in a pooling window slightly late, since members within a relative
    1e-13 of each other count as tied.
    """
    for left, right in boundaries(model, start, end).tolist():
        distance = float(torch.maximum(left - trace.t, trace.t - right).min())
        assert distance < 1e-6


class Block(nn.Module):
    """Residual or concatenating block whose activation module is called twice."""

    def __init__(self, layer, act, mode):
        super().__init__()
        self.first, self.second, self.act, self.mode = layer(), layer(), act, mode

    def forward(self, x):
        h = self.second(self.act(self.first(x)))
        if self.mode == "cat":
            return self.act(torch.cat([h[:, ::2], x[:, 1::2]], 1))
        h += x
        return self.act(h)


ACTIVATIONS = [
    nn.ReLU, lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.1),
    lambda: nn.LeakyReLU(0.1, inplace=True), nn.PReLU, nn.ReLU6, nn.Hardtanh,
]  # fmt: skip


def mlp(seed, act=nn.ReLU, widths=(3, 8, 8, 2), bias=True):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), act()]
    return nn.Sequential(*layers[:-1])


def small_residual(seed=0, act=nn.ReLU, mode="add", pool=nn.AvgPool2d, channels=4):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        act(),
        Block(lambda: nn.Conv2d(channels, channels, 3, padding=1, groups=2), act(), mode),
        pool(2),
        Block(lambda: nn.Conv2d(channels, channels, 3, padding=1), act(), mode),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(channels, 3),
    )
    norm = net[1]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return net


@st.composite
def networks(draw):
    """Draw a network and the two ends of a segment."""
    seed = draw(st.integers(0, 10**6))
    act = draw(st.sampled_from(ACTIVATIONS))
    kind = draw(st.sampled_from(["mlp", "add", "cat"]))
    if kind == "mlp":
        width = draw(st.integers(1, 10))
        net = mlp(seed, act, (3, *[width] * draw(st.integers(1, 3)), 2))
        ends = torch.randn(2, 3)
    else:
        pool = draw(st.sampled_from([nn.AvgPool2d, nn.MaxPool2d]))
        net = small_residual(seed, act, kind, pool)
        ends = torch.randn(2, 2, 4, 4)
        if draw(st.booleans()):
            ends[:, :, :, 2:] = ends[:, :, :, 1:2]  # replicated edges: exact ties
    with torch.no_grad():
        layers = [m for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]
        if draw(st.booleans()):
            for layer in layers:
                layer.bias.zero_()
        for layer in layers:
            if draw(st.booleans()) and len(layer.weight) > 1:
                layer.weight[1] = layer.weight[0]  # a duplicate
                layer.bias[1] = layer.bias[0]
            if draw(st.booleans()):
                layer.weight[-1] = 0  # a dead unit
                layer.bias[-1] = min(0.0, float(layer.bias[-1]))
        for module in net.modules():
            if isinstance(module, nn.PReLU) and draw(st.booleans()):
                module.weight.fill_(1.0)  # linearised
    return net, ends[0], ends[1]


class Functional(nn.Module):
    """A network that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Depthwise(nn.Module):
    """Depthwise and pointwise convolutions, a channel shuffle, and overlapping max pooling."""

    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.point, self.depth = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.act, self.pool = act(), nn.MaxPool2d(2, 1)
        self.shuffle, self.head = nn.ChannelShuffle(2), nn.Linear(6, 3)

    def forward(self, x):
        h = self.pool(self.act(self.point(x)))
        h = self.shuffle(self.act(self.depth(h) + h))
        return self.head(h.mean((2, 3)))


@st.composite
def hostile_networks(draw):
    """Draw a depthwise network or an MLP, and a segment that often touches boundaries."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        net, start, end = Depthwise(draw(st.sampled_from(ACTIVATIONS))), *torch.randn(2, 2, 4, 4)
    else:
        net, start, end = mlp(draw(st.integers(0, 10**6))), *torch.randn(2, 3)
    if draw(st.booleans()):
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, (nn.Linear, nn.Conv2d)):
                    module.bias.zero_()
    kind = draw(
        st.sampled_from(["", "from the origin", "to the origin", "through it", "ray", "none"])
    )
    if kind == "from the origin":
        start = torch.zeros_like(start)
    elif kind == "to the origin":
        end = torch.zeros_like(end)
    elif kind == "through it":
        end = -start
    elif kind == "ray":
        end = 2 * start
    elif kind == "none":
        end = start.clone()
    return net, start, end


def polyline(t, values):
    """Return the trace of a segment of length 1 with the values at each of its breakpoints."""
    t, values = (torch.as_tensor(array, dtype=torch.float64) for array in (t, values))
    return SegmentTrace(t, values.reshape(len(t), -1), 1.0, -torch.ones(len(t)).long(), ())
