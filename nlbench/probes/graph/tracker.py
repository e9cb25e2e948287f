"""Tracking of the channel graph's nodes through a forward pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import Undefined, UnsupportedOperation
from nlbench.introspection.function_calls import DispatchMode, FunctionCall, tensors_in, written_in
from nlbench.introspection.known_functions import is_root_mean_square_norm, known_kind
from nlbench.introspection.module_stack import HandwrittenCall, SiteName, SiteNames
from nlbench.introspection.write_log import WriteLog, get_memory_key

from .channel_graph import Builder, ChannelGraph, Units
from .rules import ChannelCall, UnfollowableCall, unit


class DependentMemory(DispatchMode):
    """Dispatch mode that tracks memory computed from the input of a network.

    The operations that PyTorch dispatches, below the functions that a network calls, reveal tensors
    created by compiled or vectorised functions, and writes to a constant through a view of it.

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
        # The tensors are kept alive so that their memory isn't reused.
        self._reached: dict[Hashable, Tensor] = {
            get_memory_key(tensor): tensor for tensor in inputs
        }

    def reaches(self, tensor: Tensor) -> bool:
        """Return True if a tensor's memory depends on the input."""
        return get_memory_key(tensor) in self._reached

    def forget(self, tensor: Tensor) -> None:
        """Treat a tensor as independent of the input."""
        self._reached.pop(get_memory_key(tensor), None)

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
                self._reached[get_memory_key(tensor)] = tensor
        return output


class ChannelTracker(SiteNames):
    """Follows the nodes of every tensor through one forward pass, in which `memory` is active.

    `real` holds the parameters by the id of their placeholder on the meta device.
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
        # Integer inputs, such as token ids, have no channel axis.
        channels = [axis if tensor.is_floating_point() else None for tensor, axis in pairs]
        self.begin(*inputs, channels=channels)
        self._real = real
        self._memory = memory
        # Names are final only at the end of the pass; until then, the units of a call have a key.
        self._sites: dict[str, SiteName] = {}
        self.builder = Builder()
        self._inputs: MutableMapping[Tensor, int] = WeakTensorKeyDictionary(dict(pairs))
        self._nodes: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._refused: MutableMapping[Tensor, UnsupportedOperation] = WeakTensorKeyDictionary()
        # Nodes of the inputs to modules that may be a single activation or norm.
        self._sources: dict[int, Tensor | None] = {}
        self._writes: WriteLog[None] = WriteLog()
        self._tokens: set[int] = set()  # Nodes of integer inputs.
        # Results of comparisons of integer inputs.
        self._masks: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()

    def graph(self, output: Tensor) -> ChannelGraph:
        """Return the graph that ends at the given output of the network."""
        self._add_inputs([output])  # An input may be returned unchanged.
        for refusal in self._refusals([output]):
            raise refusal
        nodes = self.nodes_of(output)
        graph = self.builder.graph(torch.empty(0).long() if nodes is None else nodes)
        if not len(graph.outputs):
            raise Undefined("no operation that can be followed leads from the input to the output")
        steps = (
            replace(step, site=self._sites[step.site].text) if isinstance(step, Units) else step
            for step in graph.steps
        )
        return replace(graph, steps=tuple(steps))

    def handwritten_begins(self, handwritten: HandwrittenCall) -> None:
        """Store the nodes of the input, which the module may overwrite."""
        self._add_inputs([handwritten.source])
        if not self._refusals([handwritten.source]):
            self._sources[id(handwritten)] = self.nodes_of(handwritten.source)

    def handwritten_ends(
        self, handwritten: HandwrittenCall, output: Any, name: SiteName | None
    ) -> None:
        """Follow a module as a whole where its operations can't be followed."""
        nodes = self._sources.pop(id(handwritten), None)
        if nodes is None or not isinstance(output, Tensor) or output not in self._refused:
            return
        if name is not None and known_kind(handwritten.module):
            nodes = self.builder.activate(nodes, self._site(name))
        elif not is_root_mean_square_norm(handwritten.module, output.shape[-1]):
            return
        if nodes.shape == output.shape:
            del self._refused[output]
            self._bind(output, nodes, changed=False)

    def _site(self, name: SiteName | None) -> str:
        """Return a unique key for an activation call. It is empty for other calls."""
        if name is None:
            return ""
        site = name.text if name.text not in self._sites else f"{name.text} ({len(self._sites)})"
        self._sites[site] = name
        return site

    def call(self, call: FunctionCall) -> Any:
        """Call a PyTorch function, and follow nodes through it."""
        operands = call.tensors
        operation = call.operation
        if operation.takes != "metadata":
            self._add_inputs(operands)
        site = self._site(self.current)
        refusals = self._refusals(operands)
        is_constant = not refusals and all(self.nodes_of(tensor) is None for tensor in operands)
        if is_constant:
            return self._constant(call)
        if operation.truth == "comparison" and not refusals and self._are_tokens(operands):
            # For example a padding mask, through which no values flow.
            output = call.run()
            self._memory.forget(output)
            self._masks[output] = None
            return output
        if operation.ignores_values:
            output = call.run()
            self._memory.forget(output)
            return output
        if call.takes in ("number", "memory"):
            raise self._refusal(
                call.function_name, "what is computed from the values it reads is not followed"
            )
        return self._dependent(call, site, refusals)

    def _constant(self, call: FunctionCall) -> Any:
        """Run a call on constants, and refuse it if it computes with a mask of the input."""
        output = call.run()
        operands = call.tensors
        operation = call.operation
        if not operation.ignores_values and any(tensor in self._masks for tensor in operands):
            results = list(tensors_in((output,)))
            self._masks.update(dict.fromkeys(results))
            if operation.combines in ("contraction", "layer"):
                why = "it computes with truth values about the input"
                self._refuse(results, operands, self._refusal(call.name, why))
        return output

    def _dependent(
        self, call: FunctionCall, site: str, refusals: Sequence[UnsupportedOperation]
    ) -> Any:
        """Run a call on tensors that depend on the input, and follow their nodes."""
        name = call.name
        operands = call.tensors
        # PReLU slopes have values, so they can't be combined with an input on the meta device.
        output = operands[0].clone() if name == "prelu" else call.run()
        is_assigned = name in ("setitem", "data") and output is None
        results = list(tensors_in((call.args[0] if is_assigned else output,)))
        if refusals:
            self._refuse(results, operands, refusals[0])
        elif name == "data" and is_assigned:
            self._refuse(results, operands, self._refusal(name, "it is assigned to"))
        elif call.operation.truth:
            why = "values are computed from its result, which is not followed"
            self._refuse(results, operands, self._refusal(name, why))
        elif results:
            try:
                self._follow_nodes(ChannelCall(call, self, output, site), results)
            except UnfollowableCall as error:
                self._refuse(results, operands, self._refusal(name, str(error)))
        return output

    def _are_tokens(self, operands: Iterable[Tensor]) -> bool:
        """Return True if all operands that depend on the input are integer inputs."""
        for tensor in operands:
            nodes = self.nodes_of(tensor)
            if nodes is not None and (
                tensor.is_floating_point() or not self._tokens.issuperset(nodes.flatten().tolist())
            ):
                return False
        return True

    def _follow_nodes(self, call: ChannelCall, results: list[Tensor]) -> None:
        rule = call.operation.graph or (unit if call.site else None)
        operands = call.tensors
        if rule is None:
            raise UnfollowableCall("it is not known how it mixes channels")
        nodes = rule(call)
        parts = [nodes] if isinstance(nodes, Tensor) else [n for n in nodes if n is not None]
        for tensor, new in zip(results, parts, strict=False):
            changed = any(tensor is t for t in operands) and new is not self._nodes.get(tensor)
            self._bind(tensor, new, changed)
        indices = results[len(parts) :]
        self._refuse(indices, operands, self._refusal(call.name, "it uses the positions of maxima"))

    def _refusals(self, operands: Sequence[Tensor]) -> list[UnsupportedOperation]:
        """Return why tensors can't be followed, including any that no intercepted call created."""
        for tensor in operands:
            is_known = any(tensor in known for known in (self._nodes, self._inputs, self._refused))
            if not is_known and self._memory.reaches(tensor):
                self._refused[tensor] = self._refusal(
                    "an unknown function",
                    "it makes or changes a tensor where that can't be intercepted",
                )
        return [self._refused[tensor] for tensor in operands if tensor in self._refused]

    def _refuse(
        self, results: list[Tensor], operands: list[Tensor], why: UnsupportedOperation
    ) -> None:
        """Record the reason why tensors can't be followed, in case the output depends on them."""
        for tensor in results:
            self._refused[tensor] = why
            if any(tensor is t for t in operands):
                self._writes.write(tensor, None)

    def _refusal(self, name: str, why: str) -> UnsupportedOperation:
        return UnsupportedOperation(name, self.place, why)

    def _add_inputs(self, operands: Iterable[Tensor]) -> None:
        """Add the nodes of an input when it is first used."""
        for tensor in operands:
            if tensor in self._inputs:
                axis = self._inputs.pop(tensor)
                self._bind(tensor, self._input_nodes(tensor, axis), changed=False)

    def _input_nodes(self, tensor: Tensor, axis: int) -> Tensor:
        if not tensor.is_floating_point() or tensor.ndim < 2:
            nodes = self.builder.inputs(1)
            if not tensor.is_floating_point():
                self._tokens.update(nodes.tolist())
            return nodes.expand(tuple(tensor.shape))
        nodes = self.builder.inputs(tensor.shape[axis])
        return nodes.reshape(-1, *(1,) * (tensor.ndim - 1 - axis)).expand(tuple(tensor.shape))

    def _bind(self, tensor: Tensor, nodes: Tensor, changed: bool) -> None:
        if changed:
            self._writes.write(tensor, None)
        self._nodes[tensor] = nodes
        self._writes.bind(tensor)

    def real(self, tensor: Tensor) -> Tensor:
        """Return a parameter in place of its placeholder."""
        return self._real.get(id(tensor), tensor)

    def nodes_of(self, value: Any) -> Tensor | None:
        """Return the nodes of a tensor, or None for anything that doesn't depend on the input."""
        nodes = self._nodes.get(value) if isinstance(value, Tensor) else None
        if nodes is None:
            return None
        if self._writes.is_outdated(value):
            raise self._refusal(
                "an in-place operation",
                "a tensor is read whose memory was changed under another name",
            )
        return nodes
