"""Rows of a sample that are folded into the first axis, as after ``x.reshape(-1, d)``."""

import pytest
import torch
from programs import Net, assert_reproduces, record_network
from torch import nn
from torch.nn import functional as F

from nlbench import errors
from nlbench.probes.lines import trace_segment

STEPS = 5


def _layers(inputs, outputs):
    torch.manual_seed(0)
    layers = {
        "first": nn.Linear(inputs, 6),
        "norm": nn.BatchNorm1d(6),
        "slopes": nn.PReLU(6),
        "last": nn.Linear(6, outputs),
        "conv": nn.Conv1d(2, 3, 2),
    }
    layers["norm"].running_mean.normal_()
    layers["slopes"].weight.data = torch.rand(6)
    return {name: layer.requires_grad_(False) for name, layer in layers.items()}


def _tokens(network, h):
    return network.last(F.relu(network.slopes(network.norm(network.first(h)))))


def _by_token(m, x):
    return torch.stack([_tokens(m, token) for token in x.unbind(1)], 1).flatten(1)


def _in_place(m, x):
    rows = x.reshape(-1, x.shape[-1])
    rows = F.relu(m.first(rows), inplace=True).mul_(2).add_(-0.1)
    return m.last(rows.reshape(-1, STEPS, 6)).flatten(1)


def _in_place_plain(m, x):
    return m.last(F.relu(m.first(x)) * 2 - 0.1).flatten(1)


def _windows(m, x):
    h = F.max_pool1d(m.conv(x.reshape(-1, 2, 2)), 1).abs().amax(2)
    return h.reshape(x.shape[0], -1)


def _windows_plain(m, x):
    parts = [m.conv(part.reshape(-1, 2, 2)).abs().amax(2) for part in x.unbind(1)]
    return torch.cat(parts, 1)


def _positions(m, x):
    rows = m.first(x).flatten(0, 1) + torch.arange(STEPS)[:, None].double() / 9
    return m.last(F.relu(rows)).view(-1, STEPS * 3)


def _positions_plain(m, x):
    return m.last(F.relu(m.first(x) + torch.arange(STEPS)[:, None].double() / 9)).flatten(1)


def _alias(m, x):
    h = m.first(x)
    rows = h.view(-1, 6)
    rows.relu_()
    return m.last(h).flatten(1)


def _alias_plain(m, x):
    return m.last(F.relu(m.first(x))).flatten(1)


FOLDS = {
    "samples first": (
        lambda m, x: _tokens(m, x.reshape(-1, 4)).reshape(len(x), STEPS, 3).flatten(1),
        _by_token,
    ),
    "flattened": (
        lambda m, x: _tokens(m, x.flatten(0, 1)).unflatten(0, (-1, STEPS)).flatten(1),
        _by_token,
    ),
    "tokens first": (
        lambda m, x: (
            _tokens(m, x.transpose(0, 1).reshape(-1, 4))
            .reshape(STEPS, -1, 3)
            .permute(1, 0, 2)
            .flatten(1)
        ),
        _by_token,
    ),
    "axes swapped": (
        lambda m, x: (
            m.last(F.relu(m.first(x.transpose(0, 1)) * 0.5).abs()).transpose(0, 1).flatten(1)
        ),
        lambda m, x: m.last(F.relu(m.first(x) * 0.5).abs()).flatten(1),
    ),
    "in place": (_in_place, _in_place_plain),
    "alias": (_alias, _alias_plain),
    "windows": (_windows, _windows_plain),
    "positions": (_positions, _positions_plain),
}


@pytest.mark.parametrize("kind", FOLDS)
def test_a_fold_changes_no_breakpoint(kind):
    folded, plain = FOLDS[kind]
    modules = _layers(4, 3)
    ends = 4 * torch.randn(2, STEPS, 4, generator=torch.Generator().manual_seed(1))
    assert_reproduces(Net(folded, **modules), STEPS, 4)
    traces = [trace_segment(Net(f, **modules).eval(), *ends) for f in (folded, plain)]
    assert traces[0].regions == traces[1].regions > 3
    torch.testing.assert_close(traces[0].t, traces[1].t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.reshape(-1, 4).sum(0, keepdim=True),
        lambda m, x: x.reshape(-1, 4)[:1],
        lambda m, x: x.reshape(-1, 4),
        lambda m, x: x.reshape(-1, 4).flip(0).reshape(-1, 20),
        lambda m, x: x.reshape(-1, 4).roll(1, 0).relu().reshape(-1, 20),
        lambda m, x: x.reshape(-1, 4).cumsum(0).reshape(-1, 20),
        lambda m, x: torch.ones(5, 5).double() @ x.reshape(-1, 4),
        lambda m, x: x.reshape(-1, 4).sort(0)[0].reshape(-1, 20),
        lambda m, x: x.reshape(-1, 4) + x[:, 0],
        lambda m, x: (x.reshape(-1, 4) - x.reshape(-1, 4).mean(0)).reshape(-1, 20),
    ],
)
def test_calls_that_mix_rows_are_refused(function):
    with pytest.raises(errors.Undefined):
        record_network(Net(function), STEPS, 4)
