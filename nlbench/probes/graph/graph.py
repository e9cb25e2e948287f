"""Probe ``graph``: the channel graph of a network, from input to output.

The network is run once on one input while every PyTorch function is watched. No number
that flows through it matters, so that it runs without data, on PyTorch's ``meta`` device,
unless its own code looks at values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError, RequestError, UnsupportedOperation
from nlbench.probes import Listener, ProbeOptions, Resources, Samples, Step
from nlbench.probes.model_state import (
    attributes_kept,
    autocast_now,
    evaluation_mode,
    given_tensor,
    refuse_unobservable,
    without_fast_path,
)
from nlbench.probes.site_names import SiteNames

from .activity import unit_activity
from .channel_graph import ChannelGraph
from .channel_recorder import ChannelRecorder, Descent
from .nodes import channel_axes

__all__ = ["channel_graph", "observe"]


Example = Tensor | tuple[Tensor, ...]


def channel_graph(model: nn.Module, example: Example) -> ChannelGraph:
    """Record the channel graph of a network.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is; it may lie on the ``meta`` device.
    example : tensor or tuple of tensor
        What the model is called with, the batch first; one sample is used, of which only
        the shape matters as a rule. Channels of an input are the axis that the first layer
        takes as such, as a rule axis 1, or the last where that layer is linear.

    Raises
    ------
    nlbench.UnsupportedOperation
        If it isn't known how an operation mixes channels.
    nlbench.Undefined
        If the output doesn't depend on the input, or is no tensor.
    nlbench.RequestError
        If the model can't be run on the example.

    Examples
    --------
    >>> graph = channel_graph(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2))
    >>> graph.inputs, [unit.size for unit in graph.units], len(graph.outputs)
    (2, [3], 3)
    """
    refuse_unobservable(model)
    given = (example,) if isinstance(example, Tensor) else tuple(example)
    single = tuple(tensor[:1] for tensor in given)
    with evaluation_mode(model), without_fast_path():
        try:
            return _recorded(model, single, _stand_ins(model))
        except UnsupportedOperation:
            raise
        except Exception:
            # Code of the model's own may look at values, and fail in any way without them.
            return _recorded(model, single, {})


def _recorded(
    model: nn.Module, inputs: tuple[Tensor, ...], stand_ins: Mapping[str, Tensor]
) -> ChannelGraph:
    if stand_ins:
        inputs = tuple(torch.empty_like(tensor, device="meta") for tensor in inputs)
    else:
        inputs = tuple(tensor.clone() for tensor in inputs)
    own = dict(model.named_parameters(remove_duplicate=False))
    real = {id(stand_in): own[name] for name, stand_in in stand_ins.items() if name in own}

    def run(given: tuple[Tensor, ...]) -> Any:
        return torch.func.functional_call(model, dict(stand_ins), given)

    with attributes_kept(model):
        axes = channel_axes(run, tuple(tensor.clone() for tensor in inputs))
    names = SiteNames(model)
    with (
        attributes_kept(model),
        names.hooked(),
        Descent(inputs) as descent,
        ChannelRecorder(names, inputs, axes, real, descent) as recorder,
    ):
        names.begin(*inputs)
        try:
            with names:
                output = run(inputs)
        except NlbenchError:
            raise
        except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
            if "TorchScript interpreter" in str(error):
                why = "its operations can't be watched"
                raise UnsupportedOperation("a scripted function", names.place, why) from error
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            raise RequestError(f"the model can't be run on shape {shapes}: {reason}") from error
    graph: ChannelGraph = recorder.graph(given_tensor(output))
    return graph


def _stand_ins(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers without numbers, but for the slopes of PReLU, which matter."""
    slopes = {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.PReLU)
        for own in module.state_dict()
    }
    made: dict[int, Tensor] = {}
    stand_ins = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if name not in slopes:
                empty = torch.empty_like(tensor, device="meta")
                stand_ins[name] = made.setdefault(id(tensor), empty)
    return stand_ins


def observe(
    model: nn.Module,
    samples: Samples,
    options: ProbeOptions,
    listeners: Sequence[Listener],
    resources: Resources,
    step: Step,
    facts: dict[str, Any],
) -> None:
    """Show the channel graph of a model.

    The samples are run only if a measure asks how active the units are, once for all.
    """
    graph = channel_graph(model, samples.inputs[:1].to(resources.device))
    facts |= {"nodes": graph.nodes, "activation_calls": len(graph.units)}
    found: list[Mapping[str, Tensor]] = []
    as_now = autocast_now()

    def activity() -> Mapping[str, Tensor]:
        if not found:
            parts = -(-len(samples.inputs) // int(options["batch"]))
            batches = torch.tensor_split(samples.inputs, parts)
            on_device = (batch.to(resources.device) for batch in batches)
            with as_now():
                found.append(unit_activity(model, graph, on_device))
        return found[0]

    observation = replace(graph, activity=activity, samples=len(samples.inputs))
    for listener in listeners:
        listener.update(observation)
    step()
