"""What is known of an activation call, from its input to its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .gates import Gate
from .reduce import Function, Side

__all__ = ["Begun", "Call", "Kept"]


@dataclass(frozen=True)
class Kept:
    """What is kept of an activation call.

    Parameters
    ----------
    reduction : {"spatial", "flatten", "published"}
    functions : mapping of str to callable
        Of the whole tensor, to one number a sample.
    attention : bool
        Whether softmaxes count.
    wanted : callable
        From the name and kind of a call to whether it may be kept; a kind of None is one that
        is not known yet.
    """

    reduction: str = "spatial"
    functions: Mapping[str, Function] = field(default_factory=dict)
    attention: bool = False
    wanted: Callable[[str, str | None], bool] = lambda name, kind: True


@dataclass(frozen=True)
class Begun:
    """The input of a call that has not given its output yet.

    Parameters
    ----------
    side : Side or None
        None where nobody wants it.
    batch : int or None
        Batch axis of the tensor itself; None where it has none, being made of constants.
    axis : int
        Channel axis, with the batch put first.
    shape : tuple of int
        Of one sample.
    assumed : bool
        Whether the channel axis is a guess.
    sampled : bool
        Whether the tensor may come from the model's input.
    """

    side: Side | None
    batch: int | None
    axis: int
    shape: tuple[int, ...]
    assumed: bool
    sampled: bool


@dataclass
class Call:
    """One call of an activation.

    Parameters
    ----------
    name : str
    base : str
        The name without the number of the call.
    kind : str
    begun : Begun
        Its input.
    y : Side or None
        Its output; None where nobody wants it.
    role : {"activation", "gate", "attention"}
    gate : Gate or None
        What tells whether it is a gate, where that is not known at once.
    """

    name: str
    base: str
    kind: str
    begun: Begun
    y: Side | None
    role: str = "activation"
    gate: Gate | None = None

    @property
    def is_settled(self) -> bool:
        """Whether its role is known."""
        return self.gate is None or self.gate.is_settled
