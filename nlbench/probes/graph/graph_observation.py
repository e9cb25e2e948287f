"""Observation of the channel graph of a network.

The network runs once on one input while every call of a PyTorch function is intercepted. The values
that flow through it don't matter, so it runs on PyTorch's ``meta`` device, unless its own code
reads values. Samples are run in a separate pass, for measures that need the activity of units.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError, RequestError, UnsupportedOperation, first_line
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.axes import channel_axes
from nlbench.introspection.model_copy import iter_tensors
from nlbench.introspection.model_output import validated_tensor
from nlbench.introspection.model_state import (
    evaluation_mode,
    preserve_attributes,
    refuse_unobservable,
)
from nlbench.introspection.operations import load_operations
from nlbench.introspection.precision import autocast_now
from nlbench.introspection.wrappers import through_wrappers
from nlbench.probes import ProbeFacts, ProbePass

from .activity import unit_activity
from .channel_graph import ChannelGraph
from .tracker import ChannelTracker, DependentMemory


def observe(probe_pass: ProbePass) -> ProbeFacts:
    """Pass the channel graph of a model to listeners.

    The samples are run at most once, when a listener first requests the activity of units.
    """
    model = probe_pass.model
    inputs = probe_pass.samples.inputs
    device = probe_pass.resources.device
    graph = channel_graph(model, inputs[:1].to(device))
    autocast = autocast_now()

    @functools.cache
    def activity() -> Mapping[str, Tensor]:
        parts = -(-len(inputs) // int(probe_pass.options["batch"]))
        batches = torch.tensor_split(inputs, parts)
        with autocast():
            return unit_activity(model, graph, (batch.to(device) for batch in batches))

    probe_pass.show(replace(graph, activity=activity, samples=len(inputs)))
    probe_pass.step()
    return ProbeFacts(nodes=graph.nodes, activation_calls=len(graph.units))


@through_wrappers
def channel_graph(model: nn.Module, example: Tensor | tuple[Tensor, ...]) -> ChannelGraph:
    """Find the channel graph of a network in one forward pass.

    Parameters
    ----------
    model : torch.nn.Module
        Left unchanged; may be on the ``meta`` device.
    example : tensor or tuple of tensor
        Arguments of the model, batch first. Only one sample is used, and for most networks only its
        shape matters. The channel axis of an input is the one on which the first layer operates:
        axis 1, or the last axis if that layer is linear.

    Raises
    ------
    nlbench.UnsupportedOperation
        If it is unknown how an operation mixes channels.
    nlbench.Undefined
        If the output doesn't depend on the input, or is not a tensor.
    nlbench.RequestError
        If the model can't be run on the example.

    Examples
    --------
    >>> graph = channel_graph(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2))
    >>> graph.inputs, [unit.size for unit in graph.units], len(graph.outputs)
    (2, [3], 3)
    """
    refuse_unobservable(model)
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    single = tuple(tensor[:1] for tensor in inputs)
    load_operations("graph")
    with evaluation_mode(model), without_fast_path():
        try:
            return _track(model, single, _placeholders(model))
        except UnsupportedOperation:
            raise
        except Exception:
            # The model's own code may read values, and may fail in any way without them.
            return _track(model, single, {})


def _track(
    model: nn.Module, inputs: tuple[Tensor, ...], placeholders: Mapping[str, Tensor]
) -> ChannelGraph:
    if placeholders:
        inputs = tuple(torch.empty_like(tensor, device="meta") for tensor in inputs)
    else:
        inputs = tuple(tensor.clone() for tensor in inputs)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    real = {id(p): parameters[name] for name, p in placeholders.items() if name in parameters}

    def run(arguments: tuple[Tensor, ...]) -> Any:
        return torch.func.functional_call(model, dict(placeholders), arguments)

    with preserve_attributes(model):
        axes = channel_axes(run, tuple(tensor.clone() for tensor in inputs))
    memory = DependentMemory(inputs)
    tracker = ChannelTracker(model, inputs, axes, real, memory)
    with preserve_attributes(model), tracker.hooked():
        try:
            with memory, tracker:
                output = run(inputs)
        except NlbenchError:
            raise
        except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
            if "TorchScript interpreter" in str(error):
                why = "its operations can't be intercepted"
                raise UnsupportedOperation("a scripted function", tracker.place, why) from error
            reason = first_line(error)
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            raise RequestError(f"the model can't be run on shape {shapes}: {reason}") from error
    return tracker.graph(validated_tensor(output))


def _placeholders(model: nn.Module) -> dict[str, Tensor]:
    """Return placeholders for parameters and buffers, except PReLU slopes, whose values matter."""
    slopes = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, nn.PReLU)
        for tensor in iter_tensors(module)
    }
    empty: dict[int, Tensor] = {}
    placeholders = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if id(tensor) not in slopes:
                placeholder = torch.empty_like(tensor, device="meta")
                placeholders[name] = empty.setdefault(id(tensor), placeholder)
    return placeholders
