"""Intercept the module calls of a forward pass, as `intercept` does for activation calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nlbench.introspection.axes import batch_first
from nlbench.introspection.module_stack import CallId, Frame, ModuleStack, SiteName

from .intercept import CapturePolicy, PendingCall, SiteCall
from .modules import ModulePlace, find_places
from .reduce import Side


class ModuleInterceptor(ModuleStack):
    """Intercepts the module calls at a model's places.

    Parameters
    ----------
    of : str
        See `find_places`.
    on_call : callable
        Called with each call as soon as its output is known.
    """

    def __init__(
        self, model: nn.Module, of: str, policy: CapturePolicy, on_call: Callable[[SiteCall], None]
    ) -> None:
        super().__init__(model)
        self.policy = policy
        self._of, self._on_call = of, on_call
        # Places by the calls that receive their inputs, and by those that return their outputs.
        self._starts: dict[CallId, list[ModulePlace]] = defaultdict(list)
        self._ends: dict[CallId, list[ModulePlace]] = defaultdict(list)
        self._pending: dict[ModulePlace, PendingCall] = {}

    def run(self, inputs: Tensor) -> None:
        """Run the model on a batch or a microbatch, and report all calls."""
        if not self._starts:
            for place in find_places(self.model, inputs[:2], self._of):
                self._starts[CallId(self._paths[place.module], place.call)].append(place)
                self._ends[CallId(self._paths[place.last], place.call)].append(place)
        self.restart()
        self._pending.clear()
        self.model(inputs)

    def entered(self, frame: Frame, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Capture the inputs of the places that begin with a call."""
        captured = None
        for place in self._starts.get(frame.call, ()):
            self._pending[place] = pending = self._begin(
                place, place.input_of(args, kwargs), captured
            )
            captured = captured or pending.side

    def left(self, frame: Frame, output: Any) -> None:
        """Capture the outputs of the places that end with a call, and report them."""
        for place in self._ends.get(frame.call, ()):
            if place not in self._pending or output is None:
                continue
            self._end(place, self._pending.pop(place), place.output_of(output))

    def _begin(self, place: ModulePlace, x: Tensor, captured: Side | None) -> PendingCall:
        """Capture the input of a place, unless it was for another place with the same input."""
        name, kind = place.name, place_kind(place)
        axes = place.before
        side = None
        if self.policy.selects(name, kind):
            moved = batch_first(x, axes.batch)
            side = captured or self.policy.capture(moved, axes.channel, name)
        return PendingCall(side, axes.batch, axes.channel, place.shape, axes.assumed, True)

    def _end(self, place: ModulePlace, pending: PendingCall, y: Tensor) -> None:
        axes = place.after
        side = None
        if pending.side is not None:
            moved = batch_first(y, axes.batch)
            side = self.policy.capture(moved, axes.channel, f"{place.name} (output)")
        call = SiteCall(
            SiteName(place.name, place.name, place_kind(place)), pending, side, role=place.kind
        )
        if pending.side and side and len(pending.side.reduced) != len(side.reduced):
            call.problem = (
                f"{len(pending.side.reduced)} rows of the input and {len(side.reduced)} of the "
                "output, so rows don't correspond"
            )
        self._on_call(call)


def place_kind(place: ModulePlace) -> str:
    """Return the kind of a place's site: the class of its module in lower case."""
    return type(place.module).__name__.lower()
