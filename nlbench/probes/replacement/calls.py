"""Search for the calls in a network whose outputs can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.model_state import evaluation_mode, refuse_unobservable
from nlbench.introspection.module_stack import HandwrittenCall, SiteName, SiteNames
from nlbench.introspection.wrappers import through_wrappers
from nlbench.probes.sites.modules import find_places
from nlbench.probes.sites.observation import observe_sites
from nlbench.probes.sites.select import Selection

from .interception import CallId, CallInterception, ReplaceableCall, activation_input


@through_wrappers
def find_calls(
    model: nn.Module,
    example: Tensor,
    *,
    of: str = "activations",
    select: str = "*",
    on_unseen: Callable[[str], None] = lambda description: None,
    on_undefined: Callable[[str, str], object] = lambda place, reason: None,
) -> list[ReplaceableCall]:
    """Find the calls in a network that can be replaced, named as in the probe `sites`.

    Parameters
    ----------
    model : torch.nn.Module
        Restored afterwards.
    example : tensor
        A batch of inputs on the model's device.
    of : str
        What to replace, as in ``sites.of``; see `nlbench.probes.sites.modules.find_places`. Places
        that span several modules are skipped.
    select : str
        See `nlbench.probes.sites.select.Selection.parse`.
    on_unseen, on_undefined : callable
        See `nlbench.probes.sites.observation.observe_sites`.

    Returns
    -------
    list of ReplaceableCall
        In call order.

    Raises
    ------
    nlbench.RequestError, nlbench.Undefined
        See `nlbench.probes.sites.observation.observe_sites`.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.Tanh())
    >>> [(place.name, place.channels) for place in find_calls(model, torch.zeros(4, 2))]
    [('1', 3), ('3', 1)]
    """
    refuse_unobservable(model)
    if of != "activations":
        return _module_calls(model, example, of, Selection.parse(select))
    selected: set[str] = set()
    observe_sites(
        model,
        [example],
        lambda batch: selected.add(batch.place),
        select=select,
        on_unseen=on_unseen,
        on_undefined=on_undefined,
    )
    interception = CallInterception(model)
    names = _PlaceNames(model, interception)
    with evaluation_mode(model), without_fast_path(), names.hooked():
        inputs = example.clone()
        names.begin(inputs, constants=[*model.parameters(), *model.buffers()])

        def replace(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            names.last = call
            return compute()

        interception.run(inputs, replace, inner=names)
    return [call.place() for call in names.calls if call.site.text in selected]


def _module_calls(
    model: nn.Module, example: Tensor, of: str, selection: Selection
) -> list[ReplaceableCall]:
    paths = {module: path for path, module in model.named_modules()}
    calls = []
    for place in find_places(model, example, of):
        if place.module is not place.last or not selection.may_take(place.name, place.kind):
            continue
        # The channel axis is given for the layout with the batch axis moved to 0.
        axis, batch = place.before.channel, place.before.batch
        calls.append(
            ReplaceableCall(
                place.name,
                place.kind,
                CallId(paths[place.module], place.call),
                axis - 1 if 0 < axis <= batch else axis,
                place.shape[axis - 1],
                place.shape,
            )
        )
    if not calls:
        raise Undefined(
            f"the network has no {of} that are single modules and match the selection; "
            "replacement.of also takes activations, blocks, mlp, attention and modules:GLOB"
        )
    return calls


@dataclass
class _NamedCall:
    """An activation call, whose name is final at the end of the forward pass."""

    site: SiteName
    call: CallId
    channel_axis: int
    input_shape: tuple[int, ...]
    batch: int | None

    def place(self) -> ReplaceableCall:
        shape = tuple(n for axis, n in enumerate(self.input_shape) if axis != self.batch)
        channels = self.input_shape[self.channel_axis] if self.input_shape else 1
        return ReplaceableCall(
            self.site.text, self.site.kind, self.call, self.channel_axis, channels, shape
        )


class _PlaceNames(SiteNames):
    """Assigns names to the activation calls that an interception receives."""

    def __init__(self, model: nn.Module, interception: CallInterception) -> None:
        super().__init__(model)
        self._interception = interception
        self.last: CallId | None = None
        self.calls: list[_NamedCall] = []
        self._pending: dict[int, _NamedCall] = {}

    def call(self, call: FunctionCall) -> Any:
        if self.current is None:
            return call.run()
        x = activation_input(call)
        self.layouts.adopt(x, call.input)
        batch, channel = self._axes(x)
        output = call.run()
        assert self.last is not None
        self.calls.append(_NamedCall(self.current, self.last, channel, tuple(x.shape), batch))
        return output

    def _axes(self, x: Tensor) -> tuple[int | None, int]:
        if self.layouts.is_constant(x) and (x.ndim == 0 or len(x) > 1):
            return None, x.ndim - 1
        try:
            batch, channel, _ = self.layouts.of(x)
        except Undefined:
            # Its site is not observed either, and is therefore never selected.
            return None, max(x.ndim - 1, 0)
        return batch, channel

    def handwritten_begins(self, handwritten: HandwrittenCall) -> None:
        batch, channel = self._axes(handwritten.source)
        self._pending[id(handwritten)] = _NamedCall(
            SiteName("", "", ""),
            self._interception.running,
            channel,
            tuple(handwritten.source.shape),
            batch,
        )

    def handwritten_ends(
        self, handwritten: HandwrittenCall, output: Any, name: SiteName | None
    ) -> None:
        """Merge all calls inside a handwritten activation into one."""
        pending = self._pending.pop(id(handwritten), None)
        if name is not None and pending is not None:
            inner = {id(site) for site in handwritten.names}
            self.calls = [call for call in self.calls if id(call.site) not in inner]
            pending.site = name
            self.calls.append(pending)
