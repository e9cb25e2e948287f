"""Modules and operations that do nothing change no value."""

import functools
import itertools

import pytest
import torch
from torch import nn

from nlbench import evaluate


def layers(kind):
    torch.manual_seed(0)
    second = nn.ReLU() if kind == "relu" else nn.GELU()
    return [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), second, nn.Linear(6, 3)]


class Recording(nn.Module):
    """A module that calls another and keeps the shapes of its inputs, as loggers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.seen = []

    def forward(self, x):
        self.seen.append(tuple(x.shape))
        return self.model(x)


class Apply(nn.Module):
    """A module that calls a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class InList(nn.Module):
    """Layers in a list, called in a loop."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def interleaved(names, layers):
    makes = itertools.cycle(MODULES[name] for name in names)
    parts = [next(makes)()]
    for layer in layers:
        parts += [layer, next(makes)()]
    return nn.Sequential(*parts)


def hooked(model):
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: None)
    return model


MODULES = {
    "identities": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5),
    "contiguous": lambda: Apply(torch.Tensor.contiguous),
    "clone": lambda: Apply(torch.clone),
    "reshape": lambda: Apply(lambda x: x.reshape(x.shape)),
    "transposes": lambda: Apply(lambda x: x.transpose(0, 1).transpose(0, 1)),
    "unsqueeze": lambda: Apply(lambda x: x.unsqueeze(1).squeeze(1)),
    "split": lambda: Apply(lambda x: torch.cat(x.split(2, -1), -1)),
    "add zero": lambda: Apply(lambda x: x + 0.0),
    "times one": lambda: Apply(lambda x: x * 1.0),
    "cast": lambda: Apply(lambda x: x.to(x.dtype)),
    "flatten": nn.Flatten,
}
WRAPPERS = {
    "nested, with hooks": lambda layers: hooked(
        nn.Sequential(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))
    ),
    "recording": lambda layers: Recording(nn.Sequential(*layers)),
    "list": InList,
}
# Each of them in two places.
IN_TURNS = [tuple(MODULES)[first : first + 3] for first in range(0, len(MODULES), 3)]
GELU_TURN = ", ".join(IN_TURNS[1])
WRAPPERS |= {", ".join(names): functools.partial(interleaved, names) for names in IN_TURNS}


@functools.cache
def plain_results(kind):
    return measure(nn.Sequential(*layers(kind)))


def measure(model):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    few = {"samples": 4, "traced": 1, "directions": 2}
    settings = {"lines.number": 2} | {f"local-complexity.{name}": few[name] for name in few}
    labels = torch.arange(24) % 3
    run = evaluate(model, x, "*", labels=labels, settings=settings, name="network", errors="none")
    return {record.measure.name: record.result for record in run.records}


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [*(("relu", wrapper) for wrapper in WRAPPERS), ("gelu", GELU_TURN)],
)
def test_an_identity_changes_no_value(kind, wrapper):
    expected = plain_results(kind)
    results = measure(WRAPPERS[wrapper](layers(kind)))
    assert results.keys() == expected.keys()
    for name, result in results.items():
        plain = expected[name]
        assert result.status == plain.status, (name, result.reason)
        assert result.summary == pytest.approx(plain.summary, rel=1e-5, abs=1e-9), name
        assert len(result.values) == len(plain.values), name
        for value, other in zip(result.values, plain.values, strict=True):
            assert value.status == other.status, (name, value.reason)
            assert value.statistics == pytest.approx(other.statistics, rel=1e-5, abs=1e-9), name
