"""Untrained networks whose nonlinearity is set by one parameter and known in closed form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .formulas import Formula, LinearMap
from .held_out import DEGREES, NAMES, draw

WIDTH = 32
OUTPUTS = 4
BLOCKS = 4
TOKENS = 6
GAUSSIAN_DEPTH = 8


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Randomly initialise a linear layer that preserves the variance of its inputs."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    if bias:
        nn.init.normal_(layer.bias, std=0.3)
    return layer


def _assign(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def _rotation(size: int) -> Tensor:
    rotation: Tensor = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q.float()
    return rotation.contiguous()


def _mixing(inputs: int) -> nn.Linear:
    """Build a random rotation of the outputs, for which the closed forms still hold."""
    return _assign(_rotation(inputs), torch.zeros(inputs))


def _activation(kind: str, amount: float) -> nn.Module:
    if kind == "relu":
        return nn.LeakyReLU(1 - amount)
    return nn.Softplus(amount) if kind == "softplus" else Formula(kind, amount)


def _perceptron(inputs: int, kind: str, amount: float) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (inputs, WIDTH):
        layers += [_linear(width, WIDTH), _activation(kind, amount)]
    return nn.Sequential(*layers, _linear(WIDTH, OUTPUTS))


def _elementwise(inputs: int, kind: str, amount: float) -> nn.Module:
    return nn.Sequential(Formula(kind, amount), _mixing(inputs))


def _sine(inputs: int, _: str, k: float) -> nn.Module:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(math.pi * k * x)

    return nn.Sequential(Sine(), _mixing(inputs))


def _spiral(inputs: int, _: str, turns: float) -> nn.Module:
    """Build a map that rotates points in each plane by an angle proportional to their radius."""

    class Spiral(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            planes = x.reshape(len(x), -1, 2)
            angle = 2 * math.pi * turns * planes.norm(dim=2)
            first, second = planes.unbind(2)
            return torch.stack(
                [
                    first * angle.cos() - second * angle.sin(),
                    first * angle.sin() + second * angle.cos(),
                ],
                2,
            ).flatten(1)

    return nn.Sequential(Spiral(), _mixing(inputs))


def _product(inputs: int, _: str, k: float) -> nn.Module:
    """Build products of k neighbouring inputs. For inputs of ±1, these are parities."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            factors = [x.roll(-step, 1) for step in range(int(k))]
            return torch.stack(factors).prod(0)

    return nn.Sequential(Product(), _mixing(inputs))


def _zigzag(inputs: int, _: str, kinks: float) -> nn.Module:
    """Build, from ReLUs, zigzags on [-1, 1] between -1 and 1 with evenly spaced kinks."""
    pieces = int(kinks) + 1
    signs = 2 * (-1.0) ** torch.arange(pieces)
    signs[0] = 1
    eye = torch.eye(inputs)
    first = _assign(
        eye.repeat(pieces, 1), (1 - 2 * torch.arange(pieces) / pieces).repeat_interleave(inputs)
    )
    rotation = _rotation(inputs)
    last = pieces * torch.kron(signs[None], rotation)
    return nn.Sequential(first, nn.ReLU(), _assign(last, -rotation.sum(1)))


def _tents(inputs: int, _: str, times: float) -> nn.Module:
    """Build, from ReLUs, n-times iterated tent maps on [0, 1], each with 2ⁿ linear pieces."""
    layers: list[nn.Module] = []
    eye = torch.eye(inputs)
    zeros = torch.zeros(inputs)
    for _step in range(int(times)):
        layers += [_assign(eye.repeat(2, 1), torch.cat([zeros, zeros - 0.5])), nn.ReLU()]
        layers += [_assign(torch.cat([2 * eye, -4 * eye], 1), zeros)]
    return nn.Sequential(*layers, _mixing(inputs))


class _Block(nn.Module):
    """x + t F(x), where F has one hidden layer."""

    def __init__(self, inputs: int, width: int, activation: nn.Module, amount: float) -> None:
        super().__init__()
        self.amount = amount
        hidden = _linear(inputs, width)
        self.branch = nn.Sequential(hidden, activation, _linear(width, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.amount * self.branch(x)


def _residual(inputs: int, _: str, alpha: float) -> nn.Module:
    blocks = [_Block(inputs, WIDTH, nn.ReLU(), alpha) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, _linear(inputs, OUTPUTS))


def _attention(inputs: int, _: str, sharpness: float) -> nn.Module:
    """Build one attention head over tokens. With sharpness 0, it averages the tokens."""
    size = inputs // TOKENS

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (_linear(size, size, bias=False) for _ in range(3))
            self.softmax = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.reshape(len(x), TOKENS, size)
            logits = self.query(tokens) @ self.key(tokens).transpose(1, 2) / size**0.5
            mixed: Tensor = self.softmax(sharpness * logits) @ self.value(tokens)
            return mixed.flatten(1)

    return nn.Sequential(Attention())


def _two_sums(inputs: int, _: str, t: float) -> nn.Module:
    """Build (1 - t) x + t |x| from ReLUs of x and -x, which are the same for any amount t."""
    eye = torch.eye(inputs)
    first = _assign(torch.cat([eye, -eye]), torch.zeros(2 * inputs))
    last = _rotation(inputs) @ torch.cat([eye, (2 * t - 1) * eye], 1)
    return nn.Sequential(first, nn.ReLU(), _assign(last, torch.zeros(inputs)))


def _gaussian(inputs: int, _: str, variance: float) -> nn.Module:
    layers: list[nn.Module] = []
    widths = [inputs, *[WIDTH] * GAUSSIAN_DEPTH, inputs]
    for fan_in, width in itertools.pairwise(widths):
        layer = nn.Linear(fan_in, width, bias=False)
        nn.init.normal_(layer.weight, std=math.sqrt(variance / fan_in))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _map(inputs: int, _: str, index: float) -> nn.Module:
    """Build one of the affine maps in `planted.MAPS`, used in place of an activation."""
    permutation = torch.eye(inputs)[torch.randperm(inputs)]
    maps: tuple[Callable[[], nn.Module], ...] = (
        lambda: Formula("degree", 1),
        lambda: Formula("negation"),
        lambda: LinearMap(permutation),
        lambda: LinearMap(_rotation(inputs)),
    )
    return nn.Sequential(maps[int(index)](), _mixing(inputs))


class _Polynomial(nn.Module):
    """√(1 - t) x + √t g(x) of each input, where g is a sum of Hermite polynomials."""

    def __init__(self, coefficients: tuple[float, ...], amount: float) -> None:
        super().__init__()
        self.coefficients = coefficients
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        before = x * 0
        value = x * 0 + 1
        total = math.sqrt(1 - self.amount) * x
        for k in range(max(DEGREES)):
            before, value = value, x * value - k * before
            if k + 1 in DEGREES:
                weight = self.coefficients[DEGREES.index(k + 1)] / math.sqrt(math.factorial(k + 1))
                total = total + math.sqrt(self.amount) * weight * value
        return total


def _held_out(inputs: int, kind: str, amount: float) -> nn.Module:
    """Build a network of a held-out ladder. See `held_out.draw`."""
    drawn = draw(kind)
    if drawn.form == "function":
        return nn.Sequential(_Polynomial(drawn.coefficients, amount), _mixing(inputs))
    layers: list[nn.Module] = []
    size = inputs
    for _layer in range(drawn.depth):
        if drawn.form == "branches":
            activation = _activation(drawn.activation, 1.0)
            layers.append(_Block(inputs, drawn.width, activation, amount))
        else:
            layers += [_linear(size, drawn.width), _activation(drawn.activation, amount)]
            size = drawn.width
    return nn.Sequential(*layers, _linear(size, OUTPUTS))


BUILDERS: Mapping[str, Callable[[int, str, float], nn.Module]] = {
    **dict.fromkeys(("relu", "gelu", "tanh", "silu", "softplus", "swish"), _perceptron),
    **dict.fromkeys(("cubic", "degree", "tent", "wiggle"), _elementwise),
    **dict.fromkeys(NAMES, _held_out),
    "residual": _residual,
    "attention": _attention,
    "sine": _sine,
    "spiral": _spiral,
    "product": _product,
    "zigzag": _zigzag,
    "tents": _tents,
    "sums": _two_sums,
    "gaussian": _gaussian,
    "map": _map,
}
"""Builders, called with inputs, kind and amount, keyed by the kinds in `planted.CONSTRUCTED`."""
