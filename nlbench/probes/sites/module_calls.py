"""Intercept the module calls of a forward pass, as `intercept` does for activation calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from nlbench.introspection.axes import batch_first
from nlbench.introspection.module_stack import CallId, ModuleCall, ModuleStack, SiteName

from .intercept import CapturePolicy, SiteCall
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
        self._begun: dict[ModulePlace, SiteCall] = {}

    def run(self, inputs: Tensor) -> None:
        """Run the model on a batch or a microbatch, and report all calls."""
        if not self._starts:
            for place in find_places(self.model, inputs[:2], self._of):
                self._starts[CallId(self._paths[place.module], place.call)].append(place)
                self._ends[CallId(self._paths[place.last], place.call)].append(place)
        self.restart()
        self._begun.clear()
        self.model(inputs)

    def around(self, call: ModuleCall) -> Any:
        """Capture the inputs of the places that begin with a call, and the outputs at their end."""
        x: Side | None = None
        for place in self._starts.get(call.id, ()):
            name = place.name
            site = SiteName(name, name, type(place.module).__name__.lower())
            axes = place.before
            selected = self.policy.selects(name, site.kind)
            if selected and x is None:
                # Places that begin with one call have the same input.
                x = self.policy.capture(
                    batch_first(place.input_of(call), axes.batch), axes.channel, name
                )
            self._begun[place] = SiteCall(
                name,
                x if selected else None,
                axes.batch,
                axes.channel,
                place.shape,
                axes.assumed,
                site=site,
                role=place.kind,
            )
        output = super().around(call)
        for place in self._ends.get(call.id, ()):
            if place in self._begun:
                self._end(place, self._begun.pop(place), place.output_of(output))
        return output

    def _end(self, place: ModulePlace, call: SiteCall, y: Tensor) -> None:
        if call.x is not None:
            moved = batch_first(y, place.after.batch)
            call.y = self.policy.capture(moved, place.after.channel, f"{place.name} (output)")
            rows = len(call.x.reduced), len(call.y.reduced)
            if rows[0] != rows[1]:
                call.problem = (
                    f"{rows[0]} rows of the input and {rows[1]} of the output, so rows don't "
                    "correspond"
                )
        self._on_call(call)
