"""Probe ``graph``: the channel graph of a network, from input to output.

The network is run once on one input while every PyTorch function is watched. No number
that flows through it matters, so that it runs without data, on PyTorch's ``meta`` device,
unless its own code looks at values. How often the graph's units do anything is seen in a pass
over samples, where a measure asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import (
    NlbenchError,
    NotFinite,
    RequestError,
    Undefined,
    UnsupportedOperation,
    first_line,
)
from nlbench.introspection.axes import channel_axes
from nlbench.introspection.model_state import (
    attributes_kept,
    evaluation_mode,
    given_tensor,
    refuse_unobservable,
    tensors_of,
    without_fast_path,
)
from nlbench.introspection.module_stack import QUESTIONS, SiteName, SiteNames
from nlbench.introspection.operations import (
    DispatchMode,
    FunctionCall,
    in_each_dimension,
    storage_of,
    tensors_in,
    written_in,
)
from nlbench.introspection.precision import autocast_now, exact_by_default
from nlbench.probes import Listener, OnStep, ProbeOptions, Resources, Samples

from .channel_graph import Builder, ChannelGraph, Units
from .rules import ChannelCall, Refused, unit

__all__ = ["ChannelTracker", "channel_graph", "observe", "unit_activity"]


Example = Tensor | tuple[Tensor, ...]


def channel_graph(model: nn.Module, example: Example) -> ChannelGraph:
    """Find the channel graph of a network, by one run of it.

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
            return _tracked(model, single, _stand_ins(model))
        except UnsupportedOperation:
            raise
        except Exception:
            # Code of the model's own may look at values, and fail in any way without them.
            return _tracked(model, single, {})


def _tracked(
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
    memory = DependentMemory(inputs)
    tracker = ChannelTracker(model, inputs, axes, real, memory)
    with attributes_kept(model), tracker.hooked():
        try:
            with memory, tracker:
                output = run(inputs)
        except NlbenchError:
            raise
        except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
            if "TorchScript interpreter" in str(error):
                why = "its operations can't be watched"
                raise UnsupportedOperation("a scripted function", tracker.place, why) from error
            reason = first_line(error)
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            raise RequestError(f"the model can't be run on shape {shapes}: {reason}") from error
    return tracker.graph(given_tensor(output))


def _stand_ins(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers without numbers, but for the slopes of PReLU, which matter."""
    slopes = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, nn.PReLU)
        for tensor in tensors_of(module)
    }
    made: dict[int, Tensor] = {}
    stand_ins = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if id(tensor) not in slopes:
                empty = torch.empty_like(tensor, device="meta")
                stand_ins[name] = made.setdefault(id(tensor), empty)
    return stand_ins


def observe(
    model: nn.Module,
    samples: Samples,
    options: ProbeOptions,
    listeners: Sequence[Listener],
    resources: Resources,
    step: OnStep,
    facts: dict[str, Any],
) -> None:
    """Show the channel graph of a model.

    The samples are run only if a measure asks how active the units are, once for all.
    """
    graph = channel_graph(model, samples.inputs[:1].to(resources.device))
    facts |= {"nodes": graph.nodes, "activation_calls": len(graph.units)}
    as_now = autocast_now()

    @functools.cache
    def activity() -> Mapping[str, Tensor]:
        parts = -(-len(samples.inputs) // int(options["batch"]))
        batches = torch.tensor_split(samples.inputs, parts)
        with as_now():
            return unit_activity(model, graph, (batch.to(resources.device) for batch in batches))

    observation = replace(graph, activity=activity, samples=len(samples.inputs))
    for listener in listeners:
        listener.update(observation)
    step()


CONSTANTS = {
    "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like",
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
}  # fmt: skip
"""Operations that take nothing but shape and kind from a tensor."""

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
"""Operations whose truth values about integers, as token ids, are masks."""

DECISIONS = COMPARISONS | {
    "all", "any", "isfinite", "isinf", "isnan", "logical_and", "logical_not", "logical_or",
}  # fmt: skip
"""Operations whose truth values a network may read; nothing else may come of them."""

NUMBERS = {
    "__array__", "__complex__", "__dlpack__", "__float__", "__index__", "__int__", "data_ptr",
    "item", "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
"""Functions, as they are called, that hand a tensor's numbers to whatever is not PyTorch."""

MIXING = {
    "addmm", "baddbmm", "bmm", "einsum", "embedding", "linear", "matmul", "mm", "rmatmul",
    *in_each_dimension("conv"),
}  # fmt: skip
"""Operations by which truth values would become numbers that flow, as one-hot tokens do."""


class DependentMemory(DispatchMode):  # type: ignore[no-untyped-call]
    """Watches, while a network runs, which memory is computed from the input.

    Below the functions that a network calls lie the operations that PyTorch dispatches. Those
    show what a compiled or vectorised function makes, and what is written into a constant
    through a view of it.

    Parameters
    ----------
    inputs : iterable of tensor

    Examples
    --------
    >>> import torch
    >>> x, constant = torch.ones(2), torch.zeros(2)
    >>> with DependentMemory([x]) as memory:
    ...     _ = constant[:1].copy_(x[:1])
    >>> memory.reaches(constant), memory.reaches(torch.zeros(2))
    (True, False)
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        # By storage, since views share it; the tensors are kept so that none is used again.
        self._reached: dict[Hashable, Tensor] = {memory_of(tensor): tensor for tensor in inputs}

    def reaches(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory holds anything that comes of the input."""
        return memory_of(tensor) in self._reached

    def forget(self, tensor: Tensor) -> None:
        """Take a tensor as a constant, of which only the shape comes of the input."""
        self._reached.pop(memory_of(tensor), None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if any(map(self.reaches, tensors_in((args, kwargs)))):
            for tensor in (*tensors_in((output,)), *written_in(func, args, kwargs)):
                self._reached[memory_of(tensor)] = tensor
        return output


def memory_of(tensor: Tensor) -> Hashable:
    """Identify a tensor's memory; the tensor itself where it has none of its own."""
    return storage_of(tensor) or -id(tensor)


class ChannelTracker(SiteNames):
    """Follows the nodes of every tensor while one forward pass runs.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : sequence of tensor
        What it is called with.
    axes : sequence of int
        Which axis of each input holds its channels.
    real : mapping of int to tensor
        Parameters by the identity of what stands in for them.
    memory : DependentMemory
        Active in the same pass.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        axes: Sequence[int],
        real: Mapping[int, Tensor],
        memory: DependentMemory,
    ) -> None:
        super().__init__(model)
        pairs = list(zip(inputs, axes, strict=True))
        # Of whole numbers, as token ids, no axis holds channels.
        channels = [axis if tensor.is_floating_point() else None for tensor, axis in pairs]
        self.begin(*inputs, channels=channels)
        self._real, self._memory = real, memory
        # Names by what the units of a call bear until they are settled.
        self._sites: dict[str, SiteName] = {}
        self._builder = Builder()
        self._inputs: MutableMapping[Tensor, int] = WeakTensorKeyDictionary(dict(pairs))
        self._nodes: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._bound_at: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._refused: MutableMapping[Tensor, UnsupportedOperation] = WeakTensorKeyDictionary()
        self._tokens: set[int] = set()  # Nodes of integer inputs.
        # Made of truth values about integer inputs.
        self._masks: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._changed_at: dict[Hashable, int] = {}
        self._clock = 0

    def graph(self, output: Tensor) -> ChannelGraph:
        """Give the graph, from what the network returned."""
        self._begin("", [output])  # An input may be handed on as it is.
        for refusal in self._refusals([output]):
            raise refusal
        nodes = self._nodes_of(output)
        graph = self._builder.graph(torch.empty(0).long() if nodes is None else nodes)
        if not len(graph.outputs):
            raise Undefined("the output doesn't depend on the input, so there are no paths")
        steps = (
            replace(step, site=self._sites[step.site].text) if isinstance(step, Units) else step
            for step in graph.steps
        )
        return replace(graph, steps=tuple(steps))

    def _site(self, name: SiteName | None) -> str:
        """Give the call at hand a name of its own, if it is an activation's."""
        if name is None:
            return ""
        site = name.text if name.text not in self._sites else f"{name.text} ({len(self._sites)})"
        self._sites[site] = name
        return site

    def call(self, call: FunctionCall) -> Any:
        """Call a function of PyTorch's, and follow nodes through it."""
        name, given = call.name, call.tensors
        self._begin(name, given)
        site = self._site(self.current)
        refusals = self._refusals(given)
        is_constant = not refusals and all(self._nodes_of(tensor) is None for tensor in given)
        if is_constant:
            return self._constant(name, call.run(), given)
        if name in COMPARISONS and not refusals and self._are_tokens(given):
            # Where a sentence is padded, say: a mask, through which no number flows.
            output = call.run()
            self._memory.forget(output)
            self._masks[output] = None
            return output
        if name in CONSTANTS:
            output = call.run()
            self._memory.forget(output)
            return output
        if (called := getattr(call.function, "__name__", "")) in NUMBERS:
            raise self._refusal(
                called, "what is computed with the numbers it reads is not followed"
            )
        # Slopes, which have numbers, don't go with inputs that have none.
        output = given[0].clone() if name == "prelu" else call.run()
        target = call.args[0] if name in ("setitem", "data") and output is None else output
        made = list(tensors_in((target,)))
        if refusals:
            self._refuse(made, given, refusals[0])
        elif name == "data" and output is None:
            self._refuse(made, given, self._refusal(name, "it is assigned to"))
        elif name in DECISIONS:
            why = "numbers are computed with its answer, which is not followed"
            self._refuse(made, given, self._refusal(name, why))
        elif made:
            seen = ChannelCall(
                call,
                output,
                site,
                self._nodes_of,
                self.layouts.channel,
                lambda tensor: self._real.get(id(tensor), tensor),
                self._builder,
            )
            try:
                self._follow_nodes(seen, made)
            except Refused as error:
                self._refuse(made, given, self._refusal(name, str(error)))
        return output

    def _constant(self, name: str, output: Any, given: list[Tensor]) -> Any:
        """Hand on what is made of constants; a mask may hide numbers, but not become some."""
        if name not in CONSTANTS and any(tensor in self._masks for tensor in given):
            made = list(tensors_in((output,)))
            self._masks.update(dict.fromkeys(made))
            if name in MIXING:
                why = "it computes with truth values about the input"
                self._refuse(made, given, self._refusal(name, why))
        return output

    def _are_tokens(self, given: Iterable[Tensor]) -> bool:
        """Whether all that comes of the input are whole numbers that were given as such."""
        for tensor in given:
            nodes = self._nodes_of(tensor)
            if nodes is not None and (
                tensor.is_floating_point() or not self._tokens.issuperset(nodes.flatten().tolist())
            ):
                return False
        return True

    def _follow_nodes(self, call: ChannelCall, made: list[Tensor]) -> None:
        rule, given = call.operation.graph or (unit if call.site else None), call.tensors
        if rule is None:
            raise Refused("it is not known how it mixes channels")
        nodes = rule(call)
        numbers = [nodes] if isinstance(nodes, Tensor) else [n for n in nodes if n is not None]
        for tensor, own in zip(made, numbers, strict=False):
            changed = any(tensor is t for t in given) and own is not self._nodes.get(tensor)
            self._bind(tensor, own, changed)
        indices = made[len(numbers) :]
        self._refuse(indices, given, self._refusal(call.name, "it uses the positions of maxima"))

    def _refusals(self, given: Sequence[Tensor]) -> list[UnsupportedOperation]:
        """Why tensors can't be followed, with those that no watched function has made."""
        for tensor in given:
            is_known = any(tensor in seen for seen in (self._nodes, self._inputs, self._refused))
            if not is_known and self._memory.reaches(tensor):
                self._refused[tensor] = self._refusal(
                    "an unknown function",
                    "it makes or changes a tensor where that can't be watched",
                )
        return [self._refused[tensor] for tensor in given if tensor in self._refused]

    def _refuse(self, made: list[Tensor], given: list[Tensor], why: UnsupportedOperation) -> None:
        """Remember why tensors can't be followed; it matters if the output comes of them."""
        for tensor in made:
            self._refused[tensor] = why
            if any(tensor is t for t in given):
                self._mark_changed(tensor)

    def _mark_changed(self, tensor: Tensor) -> None:
        self._clock += 1
        self._changed_at[memory_of(tensor)] = self._clock

    def _refusal(self, name: str, why: str) -> UnsupportedOperation:
        return UnsupportedOperation(name, self.place, why)

    def _begin(self, name: str, given: Iterable[Tensor]) -> None:
        """Make the nodes of an input when the first function takes it."""
        for tensor in given:
            if tensor in self._inputs and name not in QUESTIONS:
                axis = self._inputs.pop(tensor)
                self._bind(tensor, self._input_nodes(tensor, axis), changed=False)

    def _input_nodes(self, tensor: Tensor, axis: int) -> Tensor:
        if not tensor.is_floating_point() or tensor.ndim < 2:
            nodes = self._builder.inputs(1)
            if not tensor.is_floating_point():
                self._tokens.update(nodes.tolist())
            return nodes.expand(tuple(tensor.shape))
        nodes = self._builder.inputs(tensor.shape[axis])
        return nodes.reshape(-1, *(1,) * (tensor.ndim - 1 - axis)).expand(tuple(tensor.shape))

    def _bind(self, tensor: Tensor, nodes: Tensor, changed: bool) -> None:
        if changed:
            self._mark_changed(tensor)
        self._nodes[tensor] = nodes
        self._bound_at[tensor] = self._clock

    def _nodes_of(self, value: Any) -> Tensor | None:
        nodes = self._nodes.get(value) if isinstance(value, Tensor) else None
        if nodes is None:
            return None
        if self._changed_at.get(memory_of(value), 0) > self._bound_at[value]:
            raise self._refusal(
                "an in-place operation",
                "a tensor is read whose memory was changed under another name",
            )
        return nodes


@exact_by_default()
def unit_activity(
    model: nn.Module, graph: ChannelGraph, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Share of samples and positions at which each unit's output differs from its input.

    Parameters
    ----------
    model : torch.nn.Module
    graph : ChannelGraph
        Of the same model, at the same size of input.
    batches : iterable of tensor
        Samples, at least one, on the model's device.

    Returns
    -------
    dict of str to float64 tensor of shape (m,)
        By site, for each of its units.

    Raises
    ------
    nlbench.NotFinite
        If an activation's output isn't finite.
    nlbench.Undefined
        If an activation isn't called on the samples as it was on the graph's example.

    Examples
    --------
    >>> from nlbench.probes.graph.probe import channel_graph
    >>> samples = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    >>> unit_activity(nn.ReLU(), channel_graph(nn.ReLU(), samples), [samples])["relu"].tolist()
    [0.0, 0.5]
    """
    totals = {unit.site: torch.zeros(unit.size, dtype=torch.float64) for unit in graph.units}
    samples = 0
    observer = _Observer(model, graph)
    with evaluation_mode(model), without_fast_path(), observer.hooked():
        for batch in batches:
            try:
                found = [observer.shares(batch)]
            except _Folded:
                found = [observer.shares(sample) for sample in torch.split(batch, 1)]
            for site, total in totals.items():
                if any(site not in shares for shares in found):
                    raise Undefined(f"{site}: it is not called on the samples")
                total += sum(shares[site] for shares in found) * (len(batch) / len(found))
            samples += len(batch)
    return {site: total / samples for site, total in totals.items()}


class _Folded(Exception):
    """Samples and channels share an axis, in an order that shapes don't tell."""


class _Observer(SiteNames):
    """Compares the input and the output of each activation call of a forward pass."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        super().__init__(model)
        self._units = {unit.site: unit for unit in graph.units}

    def shares(self, batch: Tensor) -> dict[str, Tensor]:
        """Share of samples and positions at which units do anything, by site."""
        self._shares: dict[str, Tensor] = {}
        self._samples = len(batch)
        given = batch.clone()
        self.begin(given)
        with self:
            self.model(given)
        return self._shares

    def call(self, call: FunctionCall) -> Any:
        """Call a function of PyTorch's, and see what it does if it is a unit's."""
        unit = next((self._units[name] for name in self.candidates if name in self._units), None)
        if unit is None:
            return call.run()
        if unit.site in self._shares:
            raise Undefined(f"{unit.site}: it is called more often on the samples")
        given = call.input
        if self.current is not None and self.current.kind == "glu":
            self._shares[unit.site] = unit.active  # The sigmoid inside is nowhere the identity.
            return call.run()
        # A copy where the call may overwrite it.
        overwrites = call.function.__name__.endswith("_") or any(
            a is True for a in (*call.args, *call.kwargs.values())
        )
        before = given.clone() if overwrites else given
        output = call.run()
        if not bool(torch.isfinite(output).all()):
            raise NotFinite(f"{unit.site}: the output is not finite")
        self._shares[unit.site] = self._share(unit, output != before)
        return output

    def _share(self, unit: Units, differs: Tensor) -> Tensor:
        share = _one_sample(differs, unit, self._samples).float()
        entries = unit.entries.reshape((1,) * (share.ndim - unit.entries.ndim) + unit.entries.shape)
        alike = [axis for axis in range(share.ndim) if entries.shape[axis] == 1]
        share = share.mean(alike, keepdim=True) if alike else share
        share, flat = share.cpu().double().reshape(-1), entries.reshape(-1)
        there = flat >= 0
        total = torch.zeros(unit.size, dtype=torch.float64)
        count = torch.bincount(flat[there], minlength=unit.size)
        return total.index_add(0, flat[there], share[there]) / count


def _one_sample(differs: Tensor, unit: Units, samples: int) -> Tensor:
    """Average over samples: to the shape that the activation has for one."""
    if tuple(differs.shape) == unit.shape and samples == 1:
        return differs
    axes = [
        axis
        for axis, size in enumerate(unit.shape)
        if differs.ndim == len(unit.shape) and differs.shape[axis] != size
    ]
    if len(axes) != 1 or differs.shape[axes[0]] != samples * unit.shape[axes[0]]:
        raise Undefined(
            f"{unit.site}: its shape is {tuple(differs.shape)} for {samples} samples, "
            f"but {unit.shape} for one"
        )
    axis = axes[0]
    if unit.entries.ndim == len(unit.shape) and unit.entries.shape[axis] > 1:
        raise _Folded
    # Windows or tokens are folded into the axis of samples: they are alike, so that it doesn't
    # matter in which order they lie.
    apart = (*unit.shape[:axis], samples, *unit.shape[axis:])
    return differs.float().reshape(apart).mean(axis)
