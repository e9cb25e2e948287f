"""Intercept the module calls of a forward pass, as `intercept` does for activation calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.introspection.axes import batch_first
from nlbench.introspection.module_stack import CallId, Frame, ModuleStack, SiteName

from .intercept import CapturePolicy, PendingCall, SiteCall
from .modules import ModulePlace, find_places


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
        self._starts: dict[CallId, ModulePlace] = {}
        self._ends: dict[CallId, ModulePlace] = {}
        self._pending: dict[ModulePlace, PendingCall] = {}

    def run(self, inputs: Tensor) -> None:
        """Run the model on a batch or a microbatch, and report all calls."""
        if not self._starts:
            places = find_places(self.model, inputs[:2], self._of)
            starts = {CallId(self._paths[place.module], place.call): place for place in places}
            ends = {CallId(self._paths[place.last], place.call): place for place in places}
            if len(starts) < len(places) or len(ends) < len(places):
                raise RequestError("two places begin or end with the same call")
            self._starts = starts
            self._ends = ends
        self.restart()
        self._pending.clear()
        self.model(inputs)

    def entered(self, frame: Frame, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Capture the input of a place."""
        place = self._starts.get(frame.call)
        if place is not None:
            self._pending[place] = self._begin(place, place.input_of(args, kwargs))

    def left(self, frame: Frame, output: Any) -> None:
        """Capture the output of a place, and report its call."""
        place = self._ends.get(frame.call)
        if place is not None and place in self._pending and output is not None:
            self._end(place, self._pending.pop(place), place.output_of(output))

    def _begin(self, place: ModulePlace, x: Tensor) -> PendingCall:
        name, kind = place.name, place_kind(place)
        is_selected = self.policy.selects(name, kind)
        axes = place.before
        moved = batch_first(x, axes.batch)
        side = self.policy.capture(moved, axes.channel, name) if is_selected else None
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
