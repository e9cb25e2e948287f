"""Copies of a network with some activation calls or modules replaced by affine maps."""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line, nearest
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.function_calls import tensors_in
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.introspection.wrapped_calls import replace_module, track_calls
from nlbench.probes.replacement import AffineMap, CallInterception, ReplaceableCall, find_calls
from nlbench.probes.replacement.interception import first_tensor
from nlbench.probes.replacement.prefix import run_replaced

from .layers import AffineActivation, AffineModule, replace_calls_of

Layer: TypeAlias = AffineActivation | AffineModule

OUTPUT_TOLERANCE = 1e-4
"""Relative and absolute tolerance within which two outputs count as equal."""


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
    return _with_layers(model, places, example, of)[0]


def network_with_maps(
    model: nn.Module, maps: Mapping[str, AffineMap], example: Tensor, of: str = "activations"
) -> nn.Module:
    """Copy a network and replace some calls by fitted maps.

    Parameters
    ----------
    maps : mapping of str to AffineMap
        Keyed by call name.

    Raises
    ------
    nlbench.RequestError
        See `remove`.
    """
    network, layers = _with_layers(model, list(maps), example, of)
    with torch.no_grad():
        for name, affine in maps.items():
            layers[name].weight.copy_(affine.weight)
            layers[name].bias.copy_(affine.bias)
    return network


def _with_layers(
    model: nn.Module, places: Sequence[str], example: Tensor, of: str
) -> tuple[nn.Module, dict[str, Layer]]:
    """Copy a network and replace some calls; also return the new layers, keyed by call name."""
    if isinstance(places, str) or not all(isinstance(place, str) for place in places):
        raise RequestError(f"places is {places!r}, expected a list of names")
    try:
        twin = copy.deepcopy(model).eval()
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"the model can't be copied: {first_line(error)}") from error
    calls = {call.name: call for call in find_calls(twin, example, of=of)}
    for place in places:
        if place not in calls:
            raise RequestError(f"the model has no place '{place}'{nearest(place, calls)}")
    chosen = [calls[place] for place in dict.fromkeys(places)]
    with evaluation_mode(twin), without_fast_path():
        interception = CallInterception(twin)
        recorded: dict[CallId, tuple[Tensor, Any]] = {}

        def record(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            # Keys are ordered by when the calls start, not by when they return.
            recorded[call] = x, None
            recorded[call] = x, compute()
            return recorded[call][1]

        interception.run(example.clone(), record)
        layers = {call.name: _layer(twin, call, *recorded[call.call], of) for call in chosen}
        # The new layers start as identities.
        maps = {call.call: partial(_apply_map, layers[call.name]) for call in chosen}
        expected = run_replaced(interception, example, maps)
    _replace(twin, chosen, list(recorded), layers)
    track_calls(twin)
    reason = "an activation that overwrites its input"
    if of != "activations":
        reason = "an output of a module other than the first"
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


def _apply_map(layer: Layer, x: Tensor) -> Tensor:
    mapped = first_tensor((layer(x),))
    assert mapped is not None
    return mapped


def _layer(model: nn.Module, place: ReplaceableCall, x: Tensor, output: Any, of: str) -> Layer:
    """Return the layer that replaces a call."""
    if of == "activations":
        return AffineActivation(place.channels, place.channel_axis).to(x).eval()
    y = first_tensor((output,))
    assert y is not None
    others = len(output) - 1 if isinstance(output, tuple) else None
    axis, original = place.channel_axis, model.get_submodule(place.call.path)
    return AffineModule(original, x.shape[axis], y.shape[axis], axis, others).to(x).eval()


def _replace(
    model: nn.Module,
    chosen: Sequence[ReplaceableCall],
    calls: Sequence[CallId],
    layers: Mapping[str, Layer],
) -> None:
    """Replace calls in place, either as whole modules or within a module's forward."""
    modules = dict(model.named_modules())
    activations: dict[str, list[CallId]] = defaultdict(list)
    module_calls: Counter[str] = Counter()
    for call in calls:
        if call.position is None:
            module_calls[call.path] += 1
        else:
            activations[call.path].append(call)
    layers_within: dict[nn.Module, dict[int, Layer]] = defaultdict(dict)
    for place in chosen:
        call, owner, layer = place.call, modules[place.call.path], layers[place.name]
        is_whole = call.position is None or (
            len(activations[call.path]) == 1 and not list(owner.children())
        )
        if is_whole and module_calls[call.path] == 1 and owner is not model:
            replace_module(model, owner, layer)
        elif call.position is not None:
            layers_within[owner][activations[call.path].index(call)] = layer
        else:
            raise RequestError(
                f"{place.name} is a module that is called more than once, so it can't be removed"
            )
    for owner, replacements in layers_within.items():
        replace_calls_of(owner, replacements)


def transform_metadata(places: Sequence[str], of: str = "activations") -> dict[str, str]:
    """Return the checkpoint metadata needed to load a network with calls removed.

    Examples
    --------
    >>> transform_metadata(["features.1"])["transform_options"]
    '{"places": ["features.1"], "of": "activations"}'
    """
    options = {"places": list(places), "of": of}
    return {"transform": "remove", "transform_options": json.dumps(options)}
