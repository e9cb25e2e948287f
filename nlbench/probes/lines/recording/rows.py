"""Calls on tensors whose first axis holds several rows of a sample, as after ``x.reshape(-1, d)``.

The value of such a tensor (rows, ...) has the points on an axis of its own, (P, rows, ...). A call
that treats the rows as samples is applied to the rows of all points at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nlbench.introspection.operations import known
from nlbench.introspection.pytree import tree_iter, tree_map
from nlbench.probes.lines.rules.pieces import Kinks, MaxGroups, Ranks, UnitPieces
from nlbench.probes.lines.rules.rounding import rearranged
from nlbench.probes.lines.rules.rule import NotAffine, RecordedCall, Rule
from nlbench.probes.lines.rules.shapes import view


def permutation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the source position of each element of a call's result, if it only moves them.

    Examples
    --------
    >>> x = torch.zeros(1, 2, 3)
    >>> permutation(torch.transpose, (x, 1, 2), {}).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    others = [a for a in tree_iter((args[1:], kwargs)) if isinstance(a, Tensor)]
    if others or not isinstance(args[0], Tensor):
        return None
    count = args[0].numel()
    result = func(torch.arange(count).reshape(args[0].shape), *args[1:], **kwargs)
    if not isinstance(result, Tensor) or result.numel() != count:
        return None
    positions = result.flatten()
    is_bijection = bool((positions.sort().values == torch.arange(count)).all())
    return positions if is_bijection else None


def may_permute(name: str) -> bool:
    """Return True for an operation that may move the elements of a tensor to other axes."""
    moves = known(name).line is view or known(name).arranges in ("moves", "reshapes")
    return moves and name not in ("squeeze", "unsqueeze")


def permuting_rule(positions: Tensor, shape: Sequence[int]) -> Rule:
    """Create the rule for a call that moves the elements at `positions` within each point."""
    is_reshape = torch.equal(positions, torch.arange(len(positions)))

    def apply(points: Sequence[Tensor]) -> Tensor:
        flat = points[0].reshape(len(points[0]), -1)
        moved = flat if is_reshape else flat[:, positions.to(flat.device)]
        return moved.reshape(-1, *shape)

    return Rule(apply, rearranged(apply))


def row_rule(call: RecordedCall, make_rule: Callable[[RecordedCall], Rule]) -> Rule:
    """Create the rule for a call on rows from the rule for the call on samples.

    Raise NotAffine if the rows are not computed independently of each other, or there is no rule.
    """
    rows = call.shape[1]
    if any(len(shape) != len(call.shapes[0]) or shape[1] != rows for shape in call.shapes):
        raise NotAffine("it mixes the samples of a batch")

    def differs_between_rows(argument: Any) -> bool:
        is_full = isinstance(argument, Tensor) and argument.ndim == len(call.shape) - 1
        return is_full and len(argument) == rows

    if known(call.name).acts and any(map(differs_between_rows, tree_iter(call.args))):
        lifted = tree_map(lambda a: a[None] if differs_between_rows(a) else a, call.args)
        return make_rule(replace(call, args=lifted))
    shapes = tuple((1, *shape[2:]) for shape in call.shapes)
    return _Rows(make_rule(replace(call, shapes=shapes, shape=(1, *call.shape[2:]))), rows).rule()


@dataclass(frozen=True)
class _Rows:
    """A rule for samples (P × rows, ...), applied to points (P, rows, ...)."""

    samples: Rule
    rows: int

    def rule(self) -> Rule:
        samples = self.samples
        return replace(
            samples,
            apply=self._lifted(samples.apply),
            bound=self._bound,
            snap=samples.snap and self._lifted(samples.snap),
            workspace=self.rows * samples.workspace,
            pieces=samples.pieces and self._pieces(samples.pieces),
            direct=samples.direct and self._lifted(samples.direct),
        )

    def _merge(self, points: Sequence[Tensor]) -> list[Tensor]:
        return [x.flatten(0, 1) for x in points]

    def _split(self, samples: Tensor) -> Tensor:
        return samples.reshape(-1, self.rows, *samples.shape[1:])

    def _expand(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        """Expand bounds to one for each row."""
        return [b.expand(*x.shape[:2], *b.shape[2:]) for x, b in zip(inputs, bounds, strict=True)]

    def _bound(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        merged = self._merge(self._expand(inputs, bounds))
        bound = self.samples.bound(self._merge(inputs), merged, output.flatten(0, 1))
        return self._split(bound.expand(len(output) * self.rows, *bound.shape[1:]))

    def _lifted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function of samples (inputs and their bounds) as a function of points."""

        def lifted(inputs: Sequence[Tensor], *bounds: Sequence[Tensor]) -> Tensor:
            merged = [self._merge(self._expand(inputs, bound)) for bound in bounds]
            return self._split(function(self._merge(inputs), *merged))

        return lifted

    def _pieces(self, pieces: UnitPieces) -> UnitPieces:
        if isinstance(pieces, Kinks):
            return replace(
                pieces, value=self._lifted(pieces.value), error=self._lifted(pieces.error)
            )
        if isinstance(pieces, Ranks):
            return replace(
                pieces,
                groups=lambda x: self._groups(pieces.groups(self._merge(x))),
                output=lambda x: self._output(pieces.output, x),
            )
        if isinstance(pieces, MaxGroups):
            fast = pieces.fast_argmax

            def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
                assert fast is not None
                position, values = fast(x.flatten(0, 1))
                return self._groups(position), self._groups(values)

            return replace(
                pieces,
                lines=lambda x: self._split(pieces.lines(x.flatten(0, 1))),
                output=lambda x: self._output(pieces.output, x),
                fast_argmax=None if fast is None else argmax,
            )
        raise NotAffine("its pieces are not known")

    def _output(self, output: Callable[[Tensor], Tensor], groups: Tensor) -> Tensor:
        """Return a call's output from the values of groups of units, (P, rows × groups, ...)."""
        return self._split(output(groups.reshape(len(groups) * self.rows, -1, *groups.shape[2:])))

    def _groups(self, samples: Tensor) -> Tensor:
        """Return groups of units of each point, (P, rows × groups, ...), from those of samples."""
        return self._split(samples).flatten(1, 2)
