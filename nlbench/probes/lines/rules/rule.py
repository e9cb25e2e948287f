"""Rules: how to apply a recorded call to many points of a segment, and where its output bends.

The leading axis of a recorded tensor, of size 1, becomes the axis of points. `rounding` estimates
rounding errors, and `pieces` describes the affine pieces of units. The functions that create rules
are in `kinks`, `maxima`, `arithmetic` and `shapes`, and are registered with the decorator
`nlbench.introspection.operations.line_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nlbench.introspection.pytree import tree_iter

from .pieces import UnitPieces
from .rounding import Bound

OutputFunction = Callable[[Sequence[Tensor]], Tensor]
SnapFunction = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


class NotAffine(Exception):
    """Reason why a call has no rule."""


@dataclass(frozen=True)
class Input:
    """Placeholder in a call's arguments for the traced tensor at `index`."""

    index: int


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call of an operation."""

    # Name of the operation, without its overload or the underscore of an in-place variant.
    name: str
    function: Callable[..., Any]  # the out-of-place operation
    # args, kwargs: arguments, with traced tensors replaced by `Input`
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    # Shapes of the traced tensors, with a leading axis of size 1.
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]  # shape of the result, with a leading axis of size 1

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument that may have been passed by position or by keyword."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def apply(self, points: Sequence[Tensor]) -> Any:
        """Run the call on other tensors."""
        args = [_fill(a, points) for a in self.args]
        kwargs = {name: _fill(a, points) for name, a in self.kwargs.items()}
        return self.function(*args, **kwargs)


def _fill(argument: Any, points: Sequence[Tensor]) -> Any:
    if isinstance(argument, Input):
        return points[argument.index]
    if isinstance(argument, (list, tuple)):
        return [_fill(a, points) for a in argument]
    return argument


@dataclass(frozen=True)
class Rule:
    """Action of a call on points of a segment."""

    apply: OutputFunction  # maps the inputs at P points, each (P, ...), to the output there
    bound: Bound  # maps inputs, their bounds and the output to the output's bound
    # Pieces of the units, and where they bend. None if the call is affine.
    pieces: UnitPieces | None = None
    # Like `apply`, but maps inputs and their bounds, and moves inputs within the tolerance
    # of a kink onto it. At a breakpoint a unit is zero up to rounding; where all others are off,
    # the sign of that rounding error would determine the pieces of the next layer.
    snap: SnapFunction | None = None
    # Elements per point that `apply` or `pieces` need in addition to inputs and output.
    workspace: int = 0
    reserve: int = 0  # elements that they need regardless of the number of points
    # PyTorch's own call, if `apply` is an implementation for float64 on a CPU.
    direct: OutputFunction | None = None


def check_only_first_traced(
    call: RecordedCall, why: str = "its parameters depend on the input"
) -> None:
    """Raise if any argument of a call other than the first depends on the input."""
    others = (*call.args[1:], *call.kwargs.values())
    if not isinstance(call.args[0], Input) or any(isinstance(a, Input) for a in tree_iter(others)):
        raise NotAffine(why)


def inner_axis(call: RecordedCall, position: int) -> int:
    """Return the axis along which a call operates. Raise if it is the batch axis."""
    axis = int(call.argument(position, "dim", 0)) % len(call.shapes[0])
    if axis == 0:
        raise NotAffine("it mixes the samples of a batch")
    return axis
