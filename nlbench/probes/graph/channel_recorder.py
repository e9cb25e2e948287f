"""Follow the channels of every tensor while a network runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nlbench.errors import Undefined, UnsupportedOperation
from nlbench.probes.axes import Layouts
from nlbench.probes.ops import Operation, known, qualified_name
from nlbench.probes.site_names import SiteName, SiteNames

from .channel_graph import ChannelGraph, Units
from .nodes import Builder
from .rules import COMPARISONS, CONSTANTS, DECISIONS, MIXING, NUMBERS, Call, Refused, unit

__all__ = ["ChannelRecorder", "Descent", "storage_of"]


class Descent(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
    >>> with Descent([x]) as descent:
    ...     _ = constant[:1].copy_(x[:1])
    >>> descent.reaches(constant), descent.reaches(torch.zeros(2))
    (True, False)
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage, since views share it; the tensors are kept so that none is used again.
        self._reached: dict[int, Tensor] = {storage_of(tensor): tensor for tensor in inputs}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and shielding from the compiler would import it.
        return False

    def reaches(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory holds anything that comes of the input."""
        return storage_of(tensor) in self._reached

    def forget(self, tensor: Tensor) -> None:
        """Take a tensor as a constant, of which only the shape comes of the input."""
        self._reached.pop(storage_of(tensor), None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        if any(self.reaches(tensor) for tensor in given):
            for value in (*tree_iter(output), *_written(func, args, kwargs)):
                if isinstance(value, Tensor):
                    self._reached[storage_of(value)] = value
        return output


def storage_of(tensor: Tensor) -> int:
    """Identify a tensor's memory; the tensor itself where it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """List what a call changes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_iter(args[place] if place < len(args) else kwargs.get(argument.name))


class ChannelRecorder(TorchFunctionMode):
    """Follows the nodes of every tensor while one forward pass runs.

    Parameters
    ----------
    names : SiteNames
        Of the network; active inside this mode.
    inputs : sequence of tensor
        What it is called with.
    axes : sequence of int
        Which axis of each input holds its channels.
    real : mapping of int to tensor
        Parameters by the identity of what stands in for them.
    descent : Descent
        Active in the same pass.
    """

    def __init__(
        self,
        names: SiteNames,
        inputs: Sequence[Tensor],
        axes: Sequence[int],
        real: Mapping[int, Tensor],
        descent: Descent,
    ) -> None:
        super().__init__()
        self._names, self._real, self._descent = names, real, descent
        # Names by what the units of a call bear until they are settled.
        self._sites: dict[str, SiteName] = {}
        self._builder = Builder()
        self._inputs = {id(tensor): axis for tensor, axis in zip(inputs, axes, strict=True)}
        self._layouts = Layouts(1)
        for tensor, axis in zip(inputs, axes, strict=True):
            self._layouts.begin(tensor, channel=axis if tensor.is_floating_point() else None)
        # Tensors by identity; `_alive` keeps them, so that no identity is used again.
        self._nodes: dict[int, Tensor] = {}
        self._alive: list[Tensor] = list(inputs)
        self._refused: dict[int, UnsupportedOperation] = {}
        self._tokens: set[int] = set()  # Nodes of integer inputs.
        self._masks: set[int] = set()  # Tensors made of truth values about integer inputs.
        self._bound_at: dict[int, int] = {}
        self._changed_at: dict[int, int] = {}
        self._clock = 0

    def graph(self, output: Any) -> ChannelGraph:
        """Give the graph, from what the network returned."""
        tensors = [tensor for tensor in tree_iter(output) if isinstance(tensor, Tensor)]
        self._begin("", tensors)  # An input may be handed on as it is.
        for refusal in self._refusals(tensors):
            raise refusal
        nodes = [self._nodes_of(tensor) for tensor in tensors]
        found = [numbers.reshape(-1) for numbers in nodes if numbers is not None]
        graph = self._builder.graph(torch.cat(found) if found else torch.empty(0).long())
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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        called = getattr(func, "__name__", "")
        name = qualified_name(func)
        if called in ("__get__", "__set__"):
            name = called = getattr(getattr(func, "__self__", None), "__name__", "")
        operation = known(name)
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        self._begin(name, given)
        site = self._site(self._names.current)
        refusals = self._refusals(given)
        is_constant = not refusals and all(self._nodes_of(tensor) is None for tensor in given)
        if is_constant:
            return self._constant(name, func(*args, **kwargs), given)
        if name in COMPARISONS and not refusals and self._are_tokens(given):
            # Where a sentence is padded, say: a mask, through which no number flows.
            output = func(*args, **kwargs)
            self._descent.forget(output)
            self._masks.add(id(output))
            self._alive.append(output)
            return output
        if name in CONSTANTS:
            output = func(*args, **kwargs)
            self._descent.forget(output)
            self._layouts.follow(func, args, kwargs, output)
            return output
        if called in NUMBERS:
            raise self._refusal(
                called, "what is computed with the numbers it reads is not followed"
            )
        # Slopes, which have numbers, don't go with inputs that have none.
        output = given[0].clone() if name == "prelu" else func(*args, **kwargs)
        target = args[0] if name in ("setitem", "data") and output is None else output
        made = [t for t in tree_iter(target) if isinstance(t, Tensor)]
        if refusals:
            self._refuse(made, given, refusals[0])
        elif name == "data" and output is None:
            self._refuse(made, given, self._refusal(name, "it is assigned to"))
        elif name in DECISIONS:
            why = "numbers are computed with its answer, which is not followed"
            self._refuse(made, given, self._refusal(name, why))
        elif made:
            self._layouts.follow(func, args, kwargs, output)
            call = Call(
                name,
                func,
                args,
                kwargs,
                output,
                site,
                self._nodes_of,
                self._layouts.channel,
                lambda tensor: self._real.get(id(tensor), tensor),
                self._builder,
            )
            try:
                self._follow(call, operation, made, given)
            except Refused as error:
                self._refuse(made, given, self._refusal(name, str(error)))
        return output

    def _constant(self, name: str, output: Any, given: list[Tensor]) -> Any:
        """Hand on what is made of constants; a mask may hide numbers, but not become some."""
        if name not in CONSTANTS and any(id(tensor) in self._masks for tensor in given):
            made = [tensor for tensor in tree_iter(output) if isinstance(tensor, Tensor)]
            self._masks.update(id(tensor) for tensor in made)
            self._alive.extend(made)
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

    def _follow(
        self, call: Call, operation: Operation | None, made: list[Tensor], given: list[Tensor]
    ) -> None:
        rule = operation.graph if operation else None
        if rule is None and call.site:
            rule = unit
        if rule is None:
            raise Refused("it is not known how it mixes channels")
        nodes = rule(call)
        numbers = [nodes] if isinstance(nodes, Tensor) else [n for n in nodes if n is not None]
        for tensor, own in zip(made, numbers, strict=False):
            changed = any(tensor is t for t in given) and own is not self._nodes.get(id(tensor))
            self._bind(tensor, own, changed)
        indices = made[len(numbers) :]
        self._refuse(indices, given, self._refusal(call.name, "it uses the positions of maxima"))

    def _refusals(self, given: Iterable[Tensor]) -> list[UnsupportedOperation]:
        """Why tensors can't be followed, with those that no watched function has made."""
        given = list(given)
        for tensor in given:
            known = any(id(tensor) in place for place in (self._nodes, self._inputs, self._refused))
            if not known and self._descent.reaches(tensor):
                self._refused[id(tensor)] = self._refusal(
                    "an unknown function",
                    "it makes or changes a tensor where that can't be watched",
                )
                self._alive.append(tensor)
        return [self._refused[id(t)] for t in given if id(t) in self._refused]

    def _refuse(self, made: list[Tensor], given: list[Tensor], why: UnsupportedOperation) -> None:
        """Remember why tensors can't be followed; it matters if the output comes of them."""
        for tensor in made:
            self._refused[id(tensor)] = why
            self._alive.append(tensor)
            if any(tensor is t for t in given):
                self._mark_changed(tensor)

    def _mark_changed(self, tensor: Tensor) -> None:
        self._clock += 1
        self._changed_at[storage_of(tensor)] = self._clock

    def _refusal(self, name: str, why: str) -> UnsupportedOperation:
        return UnsupportedOperation(name, self._names.place, why)

    def _begin(self, name: str, given: Iterable[Tensor]) -> None:
        """Make the nodes of an input when the first function takes it."""
        for tensor in given:
            if id(tensor) in self._inputs and name not in _SHAPE:
                axis = self._inputs.pop(id(tensor))
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
        self._nodes[id(tensor)] = nodes
        self._bound_at[id(tensor)] = self._clock
        self._alive.append(tensor)

    def _nodes_of(self, value: Any) -> Tensor | None:
        nodes = self._nodes.get(id(value))
        if nodes is None:
            return None
        if self._changed_at.get(storage_of(value), 0) > self._bound_at[id(value)]:
            raise self._refusal(
                "an in-place operation",
                "a tensor is read whose memory was changed under another name",
            )
        return nodes


_SHAPE = frozenset(
    ("shape", "size", "dim", "ndim", "dtype", "device", "numel", "len", "is_floating_point")
)
