"""The larger of two tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlbench.probes.ops import line_rule

from .arithmetic import error_of
from .kinks import bending
from .rule import Call, Input, NotAffine, Rule, joined, noise_of


@line_rule("maximum", "minimum", "max", "min", "fmax", "fmin", bends="where the two are equal")
def larger_of_two(call: Call) -> Rule:
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        raise NotAffine("the maximum over an axis is not supported")

    def margin(inputs: Sequence[Tensor]) -> Tensor:
        first, second = (inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2])
        return torch.sub(first, second)

    def noises(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        difference = margin(inputs)
        return [noise_of(difference.dtype) * joined(errors(bounds, difference))]

    def errors(bounds: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        # A constant is exact.
        return [
            error_of(a, bounds, like) if isinstance(a, Input) else like.new_zeros((1,) * like.ndim)
            for a in call.args[:2]
        ]

    def shift(inputs: Sequence[Tensor], change: Tensor) -> list[Tensor]:
        moved, first, second = list(inputs), *call.args[:2]
        if isinstance(first, Input):
            moved[first.index] = inputs[first.index] + change
        else:
            moved[second.index] = inputs[second.index] - change
        return moved

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        first, second = errors(bounds, output)
        if output.shape not in (first.shape, second.shape):
            return torch.maximum(first, second).expand(len(output), *(-1,) * (output.ndim - 1))
        larger = margin(inputs) >= 0
        return torch.where(~larger if "min" in call.name else larger, first, second)

    first, second = call.args[:2]
    shifted = first.index if isinstance(first, Input) else second.index
    return bending(call.apply, bound, lambda inputs: [margin(inputs)], noises, shift, shifted)
