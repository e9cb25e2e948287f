"""Copies of a network with some activation calls or modules replaced by affine maps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line, nearest
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.function_calls import FunctionCall, tensors_in
from nlbench.introspection.model_copy import rebound_copy
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.introspection.wrapped_calls import count_call, replace_module, track_calls, wrap_calls
from nlbench.parsers import unique
from nlbench.probes.replacement import AffineMap, CallInterception, ReplaceableCall, find_calls
from nlbench.probes.replacement.interception import get_tensor
from nlbench.probes.replacement.prefix import run_replaced
from nlbench.probes.sites.modules import replace_entry

REMOVED = "removed_calls"
"""Name of the child that replaces activation calls in a module's own forward."""

OUTPUT_TOLERANCE = 1e-4
"""Relative and absolute tolerance within which two outputs count as equal."""


class AffineActivation(nn.Module):
    """Replacement for an activation, with one slope and one intercept per channel.

    Parameters
    ----------
    axis : int
        Channel axis of the input.

    Examples
    --------
    >>> AffineActivation(2)(torch.tensor([[-1.0, 2.0]])).tolist()
    [[-1.0, 2.0]]
    """

    def __init__(self, channels: int, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        """Scale and shift each channel."""
        shape = [1] * input.ndim
        shape[self.axis] = -1
        return input * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        """Return the number of channels and the axis."""
        return f"{len(self.weight)}, axis={self.axis}"


class AffineModule(nn.Module):
    """Replacement for a module: a full affine map of the channels, initially the identity.

    Parameters
    ----------
    original : torch.nn.Module
        The module to replace. Its plain attributes are copied, since a network may read them.
    inputs, outputs : int
        Numbers of channels.
    axis : int
        Channel axis of the input.
    argument : int, str or None
        Position or keyword of the input among the arguments; None for the first tensor.
    result : int, str or None
        Position or key of the output in what is returned; None if it is all of it.
    returned : tuple, list, mapping or None
        What is returned, whose other entries are None.

    Examples
    --------
    >>> layer = AffineModule(nn.ReLU(), 2, 3, 1, result=0, returned=(None, None))
    >>> output, attention_weights = layer(torch.tensor([[-1.0, 2.0]]))
    >>> output.tolist(), attention_weights
    ([[-1.0, 2.0, 0.0]], None)
    """

    def __init__(
        self,
        original: nn.Module,
        inputs: int,
        outputs: int,
        axis: int,
        *,
        argument: int | str | None = None,
        result: int | str | None = None,
        returned: Any = None,
    ) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        self.axis = axis
        self.argument = argument
        self.result = result
        self.returned = returned
        self.weight = nn.Parameter(torch.eye(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    @classmethod
    def at(
        cls, place: ReplaceableCall, original: nn.Module, x: Tensor, returned: Any
    ) -> AffineModule:
        """Return the replacement of a module with an input, given what it returns."""
        axis = place.channel_axis
        outputs = get_tensor(returned, place.result).shape[axis]
        layer = cls(
            original,
            x.shape[axis],
            outputs,
            axis,
            argument=place.argument,
            result=place.result,
            returned=_without_values(returned),
        )
        return layer.to(x).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the map to the channels of the input."""
        x = get_tensor({**dict(enumerate(args)), **kwargs}, self.argument)
        output = (x.movedim(self.axis, -1) @ self.weight + self.bias).movedim(-1, self.axis)
        return replace_entry(self.returned, self.result, output)

    def extra_repr(self) -> str:
        """Return the numbers of channels and the axis."""
        return f"{len(self.weight)}, {len(self.bias)}, axis={self.axis}"


def _without_values(returned: Any) -> Any:
    """Return a module's return value with None in place of each entry."""
    if isinstance(returned, Tensor):
        return None
    keys = returned if isinstance(returned, Mapping) else range(len(returned))
    for key in list(keys):
        returned = replace_entry(returned, key, None)
    return returned


Layer: TypeAlias = AffineActivation | AffineModule


def remove(
    model: nn.Module, *, places: Sequence[str], example: Tensor, of: str = "activations"
) -> nn.Module:
    """Copy a network and replace some calls by affine maps, which are initially identities.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    places : sequence of str
        Names of calls, as printed by ``nlbench list sites``.
    example : tensor
        A batch of inputs on the model's device, used to find the calls.
    of : str
        What the places refer to; same values as ``sites.of``. Activation calls are replaced by
        per-channel maps, modules by full maps.

    Returns
    -------
    torch.nn.Module
        In evaluation mode.

    Raises
    ------
    nlbench.RequestError
        If a place is unknown, or the network relies on something that an affine map can't
        reproduce: an activation that overwrites its input, or further outputs of a module.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> remove(model, places=["1"], example=torch.zeros(2, 2))[1]
    AffineActivation(3, axis=1)
    """
    return _insert_layers(model, places, example, of)[0]


def network_with_maps(
    model: nn.Module, maps: Mapping[str, AffineMap], example: Tensor, of: str = "activations"
) -> nn.Module:
    """Copy a network and replace calls by fitted maps, keyed by their names. See `remove`."""
    network, layers = _insert_layers(model, list(maps), example, of)
    with torch.no_grad():
        for name, affine in maps.items():
            layers[name].weight.copy_(affine.weight)
            layers[name].bias.copy_(affine.bias)
    return network


def _insert_layers(
    model: nn.Module, places: Sequence[str], example: Tensor, of: str
) -> tuple[nn.Module, dict[str, Layer]]:
    """Copy a network and replace some calls. Also return the new layers, keyed by call name."""
    if isinstance(places, str) or not all(isinstance(place, str) for place in places):
        raise RequestError(f"places is {places!r}, expected a list of names")
    try:
        twin = rebound_copy(model).eval()
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"the model can't be copied: {first_line(error)}") from error
    calls = {call.name: call for call in find_calls(twin, example, of=of)}
    for place in places:
        if place not in calls:
            raise RequestError(f"the model has no place '{place}'{nearest(place, calls)}")
    chosen = [calls[place] for place in unique(places)]
    with evaluation_mode(twin), without_fast_path():
        interception = CallInterception(twin, chosen)
        recorded = record_calls(interception, example)
        layers = {call.name: _layer(twin, call, *recorded[call.call], of) for call in chosen}
        # The new layers start as identities.
        maps = {}
        for call in chosen:
            identity = AffineMap(layers[call.name].weight, layers[call.name].bias)
            maps[call.call] = partial(identity, channel_axis=call.channel_axis)
        expected = run_replaced(interception, example, maps)
    _replace(twin, chosen, list(recorded), layers)
    reason = "an activation that overwrites its input"
    if of != "activations":
        reason = "an output of a module other than its stream"
    try:
        with evaluation_mode(twin), without_fast_path():
            output = twin(example.clone())
        fits = all(
            torch.allclose(a, b, OUTPUT_TOLERANCE, OUTPUT_TOLERANCE, equal_nan=True)
            for a, b in zip(tensors_in((output,)), tensors_in((expected,)), strict=True)
        )
    except Exception as error:
        # A model that uses the missing outputs of a removed module can raise any error.
        raise RequestError(f"the model relies on {reason}: {first_line(error)}") from error
    if not fits:
        raise RequestError(f"the model relies on {reason}, so an affine map can't take its place")
    return twin, layers


def record_calls(
    interception: CallInterception, inputs: Tensor
) -> dict[CallId, tuple[Tensor, Any]]:
    """Return the input and the output of each call of a forward pass."""
    recorded: dict[CallId, tuple[Tensor, Any]] = {}

    def record(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        # Keys are ordered by when the calls start, not by when they return.
        recorded[call] = x, None
        recorded[call] = x, compute()
        return recorded[call][1]

    interception.run(inputs.clone(), record)
    return recorded


def _layer(model: nn.Module, place: ReplaceableCall, x: Tensor, output: Any, of: str) -> Layer:
    """Return the layer that replaces a call."""
    if of == "activations":
        return AffineActivation(place.channels, place.channel_axis).to(x).eval()
    return AffineModule.at(place, model.get_submodule(place.call.path), x, output)


def _replace(
    model: nn.Module,
    chosen: Sequence[ReplaceableCall],
    calls: Sequence[CallId],
    layers: Mapping[str, Layer],
) -> None:
    """Replace calls in place, either as whole modules or within a module's forward."""
    modules = dict(model.named_modules())
    within: dict[nn.Module, dict[str, nn.Module]] = defaultdict(dict)
    for place in chosen:
        call = place.call
        owner = modules[call.path]
        same = [other for other in calls if other.path == call.path]
        activations = [other for other in same if other.position is not None]
        is_activation = call.position is not None
        is_whole = not is_activation or (len(activations) == 1 and not list(owner.children()))
        is_called_once = len(same) - len(activations) == 1
        if is_whole and is_called_once and owner is not model:
            replace_module(model, owner, layers[place.name])
        elif is_activation:
            within[owner][str(activations.index(call))] = layers[place.name]
        else:
            raise RequestError(
                f"{place.name} is a module that is called more than once, so it can't be removed"
            )
    for owner, replacements in within.items():
        owner.add_module(REMOVED, nn.ModuleDict(replacements))
        wrap_calls(owner, _apply_layer, REMOVED)
    track_calls(model)


def _apply_layer(layers: nn.Module, call: FunctionCall) -> Any:
    layer = layers._modules.get(str(count_call(layers)))
    return call.run() if layer is None else layer(call.input)


def transform_metadata(places: Sequence[str], of: str = "activations") -> dict[str, str]:
    """Return the checkpoint metadata needed to load a network with calls removed.

    Examples
    --------
    >>> transform_metadata(["features.1"])["transform_options"]
    '{"places": ["features.1"], "of": "activations"}'
    """
    options = {"places": list(places), "of": of}
    return {"transform": "remove", "transform_options": json.dumps(options)}
