"""Points that move along a segment: values and their rates, and what units do next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._duals import dual
from .rules import Apply, Bound, Crossings, Front, Margin, Rule, sign_changes

__all__ = ["bending", "changed", "pushed"]

Margins = Callable[[Sequence[Tensor]], list[Tensor]]
Noises = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
Shift = Callable[[Sequence[Tensor], Tensor], list[Tensor]]


def pushed(
    apply: Apply, values: Sequence[Tensor], rates: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Carry values and rates through an operation, by forward-mode differentiation.

    Examples
    --------
    >>> y, rate = pushed(lambda x: 2 * x[0], [torch.tensor([3.0])], [torch.tensor([1.0])])
    >>> y.item(), rate.item()
    (6.0, 2.0)
    """
    (result,) = _pushed(lambda x: [apply(x)], values, rates)
    return result


def _pushed(
    apply: Margins, values: Sequence[Tensor], rates: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    with forward_ad.dual_level():
        results = list(map(_parts, apply(list(map(dual, values, rates)))))
    return results


def _parts(moving: Tensor) -> tuple[Tensor, Tensor]:
    value, rate = forward_ad.unpack_dual(moving)  # type: ignore[no-untyped-call]
    # A constant has none.
    return value, torch.zeros_like(value) if rate is None else rate


def changed(apart: Callable[[Tensor, Tensor], Tensor], state: Tensor) -> Tensor:
    """Tell between which neighbours, of a row of samples, some unit changes to another piece.

    Where a sample lies on a boundary its neighbours are compared, and the change is taken to
    be behind it.

    Parameters
    ----------
    apart : callable
        From two rows of states to whether a unit is on different pieces.
    state : tensor of shape (P, ...)

    Returns
    -------
    bool tensor of shape (P - 1,)

    Examples
    --------
    >>> sign = torch.tensor([[0], [1], [0], [-1], [-1]])
    >>> changed(lambda a, b: a * b < 0, sign).tolist()
    [False, False, True, False]
    """
    pairs = apart(state[:-1], state[1:])
    if len(state) > 2:
        pairs[1:] |= apart(state[:-2], state[2:]) & ~pairs[:-1] & ~pairs[1:]
    return pairs.flatten(1).any(1)


def bending(apply: Apply, bound: Bound, margins: Margins, noises: Noises, shift: Shift) -> Rule:
    """Make the rule of units each of which bends where a margin of its own is zero.

    Parameters
    ----------
    apply, bound : callable
        See `Rule`.
    margins : callable
        From the inputs to tensors that are zero where units bend, affine in the inputs.
    noises : callable
        From inputs and bounds to what can't be told from zero, one a margin.
    shift : callable
        From inputs, or rates, and a change to inputs whose margins are changed by that.
    """

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        pairs = zip(margins(inputs), noises(inputs, bounds), strict=True)
        found = [sign_changes(margin, noise) for margin, noise in pairs]
        if len(found) == 1:
            return found[0]
        return torch.cat([i for i, _ in found]), torch.cat([s for _, s in found])

    def differ(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        different = torch.zeros(len(inputs[0]) - 1, dtype=torch.bool, device=inputs[0].device)
        for margin, noise in zip(margins(inputs), noises(inputs, bounds), strict=True):
            sign = (margin > noise).to(torch.int8) - (margin < -noise).to(torch.int8)
            different |= changed(lambda a, b: a * b < 0, sign)
        return different

    def advance(
        inputs: Sequence[Tensor],
        rates: Sequence[Tensor],
        bounds: Sequence[Tensor],
        rate_bounds: Sequence[Tensor],
    ) -> Front:
        found = []
        for pair, noise, rest in zip(
            _pushed(margins, inputs, rates),
            noises(inputs, bounds),
            noises(rates, rate_bounds),
            strict=True,
        ):
            value, speed = pair
            found.append(Margin(value, speed, noise))
            # On a kink a unit is where it is heading; if it stays there it is no more
            # than rounding, and goes nowhere.
            near = value.abs() <= noise
            still = near & (speed.abs() <= noise + rest)
            heading = torch.where(still, 0.0, speed.sign() * noise)
            inputs = shift(inputs, torch.where(near, heading - value, 0.0))
            rates = shift(rates, torch.where(still, -speed, 0.0))
        return Front(*pushed(apply, inputs, rates), found)

    return Rule(apply, bound, bend, advance=advance, differ=differ)
