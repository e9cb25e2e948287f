"""Networks with planted nonlinearity, ``ladders/NAME``: the rungs of the benchmark of measures.

docs/benchmark.md lists the ladders and explains how their order is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest, shorten
from nlbench.registry import Family
from nlbench.subjects.model import model

from .held_out import NAMES, draw
from .perceptrons import perceptron, vector_length

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS = ("relu", "tanh", "gelu")
SLOPES = (1, 0.75, 0.5, 0.25, 0)
GAINS = (0.5, 1, 2, 4, 8)
DEPTHS = (1, 2, 3, 4, 6)
TWINS = (
    "plain",
    "hidden-units",
    "outputs-scaled",
    "outputs-moved",
    "outputs-rotated",
    "doubled",
    "cancelling",
)
"""Variants of one function, all equally nonlinear; see `_twin`."""

MAPS = ("identity", "negation", "permutation", "rotation")
CONSTRUCTED: Mapping[str, str] = {
    **dict.fromkeys(("relu", "gelu", "tanh", "silu"), "perceptron of (1 - t) x + t φ(x)"),
    **dict.fromkeys(("softplus", "swish"), "perceptron with sharpness β"),
    "residual": "blocks x + α F(x) of ReLUs",
    "attention": "attention with inverse temperature τ",
    "cubic": "√(1 - s) x + √s He₃(x)/√6 of each input",
    "degree": "Hermite polynomial of degree k of each input",
    "sine": "sin(πkx) of each input",
    "spiral": "rotation of each plane by t turns at radius 1",
    "product": "products of k inputs",
    "zigzag": "zigzag of k kinks of each input, from ReLUs",
    "tents": "tent map of each input, iterated n times, from ReLUs",
    "tent": "tent map of each input, iterated n times, as one activation",
    "wiggle": "(3 - 2t) x + t sin(10x) / 5 of each input",
    "sums": "(1 - t) x + t |x| from the same ReLUs",
    "gaussian": "layers of ReLUs without biases, weights from N(0, v / fan-in)",
    **{name: draw(name).text for name in NAMES},
    "map": f"affine map as an activation: {', '.join(MAPS)}",
}
"""Descriptions by kind of the networks built by `constructed`, which have an amount parameter."""
OURS = Source("", "ours, for the benchmark of measures (docs/benchmark.md)")

_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)"
_SLOPE = re.compile(rf"cnn-slope{_NUMBER}")
_CONSTRUCTED = re.compile(rf"({'|'.join(CONSTRUCTED)})-{_NUMBER}")
_MLP = re.compile(rf"mlp-({'|'.join(ACTIVATIONS)})-gain{_NUMBER}-depth([0-9]{{1,3}})")
_TWIN_SCALE = 3.7
EXTRA_PAIRS = 16


class Ladders(Family):
    """Networks with planted nonlinearity."""

    description = "networks with planted nonlinearity, for the benchmark of measures"

    def names(self) -> Sequence[str]:
        """Return the names of the benchmark's networks. Other numbers are also valid."""
        return (
            "cnn",
            *(f"cnn-slope{slope:g}" for slope in SLOPES),
            *(f"{kind}-1" for kind in CONSTRUCTED),
            *(f"mlp-{name}-gain{gain:g}-depth3" for name in ACTIVATIONS for gain in GAINS),
            *(f"mlp-{name}-gain3-depth{depth}" for name in ACTIVATIONS for depth in DEPTHS),
            *(f"twin-{twin}" for twin in TWINS),
        )

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network."""
        kind, twin = name.partition("-")[::2]
        if name == "cnn":
            return _cnn(0.0)
        if match := _SLOPE.fullmatch(name):
            return _cnn(float(match[1]))
        if match := _CONSTRUCTED.fullmatch(name):
            return _constructed(match[1], float(match[2]))
        if (match := _MLP.fullmatch(name)) and int(match[3]) > 0:
            weights = f"weights times {match[2]}"
            gain = float(match[2])
            depth = int(match[3])
            return perceptron(match[1], weights, recipe="adam", scale=gain, depth=depth)
        if kind == "twin" and twin in TWINS:
            return _twin(twin)
        hint = nearest(name, self.names(), "ladders/")
        raise RequestError(f"there is no model 'ladders/{shorten(name)}'{hint}")

    def describe(self, name: str) -> str:
        """Return a one-line description of a network."""
        if name == "cnn":
            return "small network of convolutions, average pooling and ReLUs"
        if match := _SLOPE.fullmatch(name):
            return f"cnn whose ReLUs have the slope {match[1]} below 0"
        if match := _CONSTRUCTED.fullmatch(name):
            return f"{CONSTRUCTED[match[1]]}, amount {match[2]}"
        if match := _MLP.fullmatch(name):
            return f"random perceptron: {match[1]}, weights times {match[2]}, {match[3]} layers"
        return f"perceptron, one of several variants of one function: {name[5:]}"


def _leaky(slope: float) -> nn.Module:
    from torch import nn

    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def _cnn(slope: float) -> Callable[..., nn.Module]:
    def build(in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> nn.Module:
        from torch import nn

        from nlbench.models.networks.vgg import initialize

        if image_size % 8:
            raise RequestError(
                "expected images whose side is a multiple of 8 pixels, "
                f"got {image_size}x{image_size}"
            )
        layers: list[nn.Module] = [nn.AvgPool2d(image_size // 8)]
        for inputs, outputs in ((in_channels, 16), (16, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), _leaky(slope)]
            layers += [nn.AvgPool2d(2)] if inputs == outputs else []
        layers += [nn.Flatten(), nn.Linear(128, 64), _leaky(slope), nn.Linear(64, num_classes)]
        network = nn.Sequential(*layers)
        initialize(network)
        return network

    build.__doc__ = "Small network of convolutions, average pooling and (leaky) ReLUs."
    return model(source=OURS, recipe="adam")(build)


def _constructed(kind: str, amount: float) -> Callable[..., nn.Module]:
    def build(num_classes: int = 4, input_shape: tuple[int, ...] = (8,)) -> nn.Module:
        from .constructed import BUILDERS

        return BUILDERS[kind](vector_length(input_shape), kind, amount)

    build.__doc__ = f"{CONSTRUCTED[kind]}: {kind}, {amount:g}."
    return model(source=OURS)(build)


def _twin(twin: str) -> Callable[..., nn.Module]:
    def build(num_classes: int = 10, input_shape: tuple[int, ...] = (8,)) -> nn.Module:
        import torch
        from torch import nn

        inputs = vector_length(input_shape)
        first = nn.Linear(inputs, 16)
        second = nn.Linear(16, 12)
        last = nn.Linear(12, num_classes)
        rotation = torch.linalg.qr(torch.randn(num_classes, num_classes, dtype=torch.float64)).Q
        with torch.no_grad():
            if twin == "hidden-units":
                for layer in (first, second):
                    _scale(layer, _TWIN_SCALE)
                # The second layer's inputs are already scaled.
                second.weight /= _TWIN_SCALE
                last.weight /= _TWIN_SCALE
            elif twin == "outputs-scaled":
                _scale(last, _TWIN_SCALE)
            elif twin == "outputs-moved":
                last.bias.add_(torch.linspace(-2, 3, num_classes))
            elif twin == "outputs-rotated":
                last.weight.copy_((rotation @ last.weight.double()).float())
                last.bias.copy_((rotation @ last.bias.double()).float())
            elif twin == "doubled":
                first, second, last = _duplicate_units(first, second, last)
            elif twin == "cancelling":
                second, last = _cancelling(second, last)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    build.__doc__ = f"Perceptron of two hidden layers, a variant of one function: {twin}."
    return model(source=OURS)(build)


def _scale(layer: Any, factor: float) -> None:
    layer.weight *= factor
    layer.bias *= factor


def _duplicate_units(*layers: Any) -> list[Any]:
    """Duplicate every hidden unit and halve its outgoing weights, preserving the function."""
    from torch import nn

    doubled = []
    for index, layer in enumerate(layers):
        weight = layer.weight
        bias = layer.bias
        if index > 0:
            weight = weight.repeat_interleave(2, dim=1) / 2
        if index + 1 < len(layers):
            weight = weight.repeat_interleave(2, dim=0)
            bias = bias.repeat_interleave(2)
        wide = nn.Linear(weight.shape[1], weight.shape[0])
        wide.weight.copy_(weight)
        wide.bias.copy_(bias)
        doubled.append(wide)
    return doubled


def _cancelling(layer: Any, last: Any) -> list[Any]:
    """Add pairs of equal hidden units with opposite outgoing weights, preserving the function."""
    import torch
    from torch import nn

    weight = torch.randn(EXTRA_PAIRS, layer.in_features)
    bias = torch.randn(EXTRA_PAIRS)
    outgoing = torch.randn(last.out_features, EXTRA_PAIRS)
    wider = nn.Linear(layer.in_features, layer.out_features + 2 * EXTRA_PAIRS)
    wider.weight.copy_(torch.cat([layer.weight, weight, weight]))
    wider.bias.copy_(torch.cat([layer.bias, bias, bias]))
    after = nn.Linear(wider.out_features, last.out_features)
    after.weight.copy_(torch.cat([last.weight, outgoing, -outgoing], 1))
    after.bias.copy_(last.bias)
    return [wider, after]
