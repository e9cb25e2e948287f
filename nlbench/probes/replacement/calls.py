"""Search for the calls in a network whose outputs can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.model_state import refuse_unobservable
from nlbench.introspection.module_stack import CallId
from nlbench.introspection.wrappers import through_wrappers
from nlbench.probes.sites.modules import find_places
from nlbench.probes.sites.select import Selection
from nlbench.probes.sites.site import SiteBatch
from nlbench.probes.sites.sites_observation import observe_sites

from .interception import ReplaceableCall


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
        What to replace, as in ``sites.of``; see `nlbench.probes.sites.modules.find_places`. MLPs
        whose layers are several children of a block are skipped.
    select : str
        See `nlbench.probes.sites.select.Selection.parse`.
    on_unseen, on_undefined : callable
        See `nlbench.probes.sites.sites_observation.observe_sites`.

    Returns
    -------
    list of ReplaceableCall
        In call order.

    Raises
    ------
    nlbench.RequestError, nlbench.Undefined
        See `nlbench.probes.sites.sites_observation.observe_sites`.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.Tanh())
    >>> [(place.name, place.channels) for place in find_calls(model, torch.zeros(4, 2))]
    [('1', 3), ('3', 1)]
    """
    refuse_unobservable(model)
    if of != "activations":
        orders: dict[str, str] = {}
        observe_sites(
            model,
            [example],
            lambda batch: orders.update({batch.place: batch.row_order}),
            of=of,
            select=select,
        )
        return _module_calls(model, example, of, Selection.parse(select), orders)
    calls: list[ReplaceableCall] = []

    def add(batch: SiteBatch) -> None:
        assert batch.call is not None
        site = batch.site
        axis = _own_axis(site.channel_axis, batch.batch_axis)
        channels = site.shape[site.channel_axis - 1] if site.shape else 1
        calls.append(
            ReplaceableCall(
                site.name,
                site.kind,
                batch.call,
                axis,
                channels,
                site.shape,
                batch_axis=batch.batch_axis,
                row_order=batch.row_order,
            )
        )

    observe_sites(
        model,
        [example],
        add,
        select=select,
        on_unseen=on_unseen,
        on_undefined=on_undefined,
    )
    return calls


def _own_axis(axis: int, batch: int | None) -> int:
    """Return a channel axis in the tensor's own layout, given it with the batch axis first."""
    return axis - 1 if batch is None or 0 < axis <= batch else axis


def _module_calls(
    model: nn.Module, example: Tensor, of: str, selection: Selection, orders: Mapping[str, str]
) -> list[ReplaceableCall]:
    paths = {module: path for path, module in model.named_modules()}
    calls = []
    for place in find_places(model, example, of):
        is_one_call = place.module is place.last
        if not (is_one_call or place.kind == "span"):
            continue
        if not selection.may_take(place.name, place.kind):
            continue
        axis = place.before.channel
        calls.append(
            ReplaceableCall(
                place.name,
                place.kind,
                CallId(paths[place.module], place.call),
                _own_axis(axis, place.before.batch),
                place.shape[axis - 1],
                place.shape,
                None if is_one_call else CallId(paths[place.last], place.call),
                place.before.batch,
                orders.get(place.name, ""),
            )
        )
    if not calls:
        raise Undefined(
            f"the network has no {of} that are single modules and match the selection; "
            "replacement.of also takes activations, blocks, mlp, attention, spans:L and "
            "modules:GLOB"
        )
    return calls
