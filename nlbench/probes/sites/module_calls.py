"""Intercept the module calls of a forward pass, as `intercept` does for activation calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from nlbench.introspection.axes import batch_first
from nlbench.introspection.module_stack import SiteName

from .intercept import CapturePolicy, PendingCall, SiteCall
from .modules import Place, find_places, place_hooks


class ModuleInterceptor:
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
        self.model, self.policy = model, policy
        self._of, self._on_call = of, on_call
        self._has_places = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Allow `run` to register hooks, and remove them on exit."""
        self._has_places = False
        with ExitStack() as self._hooks:
            yield

    def run(self, inputs: Tensor) -> None:
        """Run the model on a batch or a microbatch, and report all calls."""
        if not self._has_places:
            places = find_places(self.model, inputs[:2], self._of)
            self._hooks.enter_context(place_hooks(self.model, places, self._enter, self._leave))
            self._has_places = True
        self.model(inputs)

    def _enter(self, place: Place, x: Tensor) -> PendingCall:
        name, kind = place.name, place_kind(place)
        is_selected = self.policy.selects(name, kind)
        axes = place.before
        moved = batch_first(x, axes.batch)
        side = self.policy.capture(moved, axes.channel, name) if is_selected else None
        return PendingCall(side, axes.batch, axes.channel, place.shape, axes.assumed, True)

    def _leave(self, place: Place, pending: PendingCall, y: Tensor) -> None:
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


def place_kind(place: Place) -> str:
    """Return the kind of a place's site: the class of its module in lower case."""
    return type(place.module).__name__.lower()
