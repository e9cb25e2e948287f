"""Breakpoints of small networks in extended precision, computed without the tracer.

A network is a list of layers. Values are recomputed from the input at every point, with 64 bits of
mantissa; nothing is estimated, rounded to zero or interpolated.
"""

import itertools

import numpy as np
import torch
from torch import nn

MIN_BREAKPOINT_GAP = 1e-12


class Layers(nn.Module):
    """A network of layers, each implemented in PyTorch and in NumPy."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.weights = nn.ParameterList(
            [nn.Parameter(p, requires_grad=False) for layer in layers for p in layer.tensors()]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer.torch(x)
        return x


class Affine:
    def __init__(self, weight, bias=None, by="linear"):
        self.weight, self.bias, self.by = weight.double(), bias, by

    def tensors(self):
        return [self.weight]

    def torch(self, x):
        if self.by == "linear":
            return nn.functional.linear(x, self.weight, self.bias)
        if self.by == "conv_transpose":
            return nn.functional.conv_transpose1d(x[..., None], self.weight.T[..., None])[..., 0]
        if self.by == "conv":
            return nn.functional.conv1d(x[..., None], self.weight[..., None], self.bias)[..., 0]
        return x @ self.weight.T

    def numpy(self, x):
        y = x @ self.weight.numpy().astype(np.longdouble).T
        return y if self.bias is None else y + self.bias.numpy().astype(np.longdouble)

    def margins(self, x):
        return None


class Relu:
    """A ReLU, implemented by one of several operations."""

    def __init__(self, by="relu", slope=0.0):
        self.by, self.slope = by, slope

    def tensors(self):
        return []

    def torch(self, x):
        if self.by == "maximum":
            return torch.maximum(x, torch.zeros_like(x))
        if self.by == "clamp":
            return x.clamp(min=0)
        if self.by == "leaky":
            return nn.functional.leaky_relu(x, self.slope)
        if self.by == "pool":
            return nn.functional.max_pool1d(torch.stack([x, torch.zeros_like(x)], -1), 2)[..., 0]
        return torch.relu(x)

    def numpy(self, x):
        return np.where(x > 0, x, x * np.longdouble(self.slope))

    def margins(self, x):
        return x


class Maxout:
    """The maximum of adjacent pairs or larger windows."""

    def __init__(self, members=2, by="maximum"):
        self.members, self.by = members, by

    def tensors(self):
        return []

    def torch(self, x):
        if self.by == "maximum":
            return torch.maximum(x[:, 0::2], x[:, 1::2])
        if self.by == "amax":
            return x.unflatten(1, (-1, self.members)).amax(2)
        return nn.functional.max_pool1d(x[:, None], self.members)[:, 0]

    def numpy(self, x):
        return x.reshape(len(x), -1, self.members).max(-1)

    def margins(self, x):
        return x.reshape(len(x), -1, self.members).argmax(-1)


def values(layers, x):
    for layer in layers:
        x = layer.numpy(x)
    return x


def boundaries(layers, start, end):
    """Find the points of a segment at which units change pieces, layer by layer.

    A layer's margins are affine between the boundaries of earlier layers, so each unit has at most
    one zero in each interval, which linear interpolation finds. Windows have no margins, only
    leaders, whose changes are found by bisection.
    """
    start, end = (v.numpy().astype(np.longdouble) for v in (start.double(), end.double()))

    def at(depth, t):
        t = np.asarray(t, dtype=np.longdouble)[:, None]
        return values(layers[:depth], (1 - t) * start + t * end)

    t = np.array([0, 1], dtype=np.longdouble)
    for depth, layer in enumerate(layers):
        z = layer.margins(at(depth, t))
        if z is None:
            continue
        if np.issubdtype(z.dtype, np.floating):
            left, right = z[:-1], z[1:]
            row, unit = np.nonzero((left > 0) & (right < 0) | (left < 0) & (right > 0))
            weight = left[row, unit] / (left[row, unit] - right[row, unit])
            changes = t[row] + weight * (t[row + 1] - t[row])
        else:
            changes = _bisect(lambda s, d=depth, y=layer: y.margins(at(d, s)), t)
        t = np.unique(np.concatenate([t, np.asarray(changes, dtype=np.longdouble)]))
    # A trace doesn't distinguish points that are closer than this.
    inner = t[(t > MIN_BREAKPOINT_GAP) & (t < 1 - MIN_BREAKPOINT_GAP)]
    is_new = np.concatenate([[True], np.diff(inner) > MIN_BREAKPOINT_GAP]) if len(inner) else []
    return inner[np.asarray(is_new, dtype=bool)]


def _bisect(leaders, t):
    """Find the points between consecutive t at which leaders of windows change."""
    changes = []
    for a, b in itertools.pairwise(t):
        first, last = leaders([a + (b - a) * 1e-15, b - (b - a) * 1e-15])
        changes += _between(leaders, a, b, first, last)
    return changes


def _between(leaders, a, b, first, last):
    # A maximum of affine functions is convex, so a leader that is overtaken never returns.
    if (first == last).all():
        return []
    if b - a < 1e-17:
        return [(a + b) / 2]
    middle = (a + b) / 2
    inner = leaders([middle])[0]
    return _between(leaders, a, middle, first, inner) + _between(leaders, middle, b, inner, last)
