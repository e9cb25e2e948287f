"""Channel and batch axes of tensors, tracked through a forward pass.

A shape alone is ambiguous: (8, 56, 56, 96) is channels-last in ConvNeXt, and (8, 197, 768) is
tokens by channels in a vision transformer, but channels by length after a 1-D convolution. The
operation that created the tensor is not, so both axes are tracked from one operation to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import Undefined

from .axis_rules import GONE, WRITES, axis_map, has_known_indices, moved_axis, selected_entries
from .function_calls import FunctionCall, has_memory, tensors_in, unobserved_calls
from .operations import Operation
from .write_log import WriteLog


def softmax_axis(call: FunctionCall) -> int:
    """Return the axis of a softmax or a gated linear unit, counted from 0.

    By default, a gated linear unit uses the last axis. `torch.nn.functional.softmax` uses the first
    axis of tensors with 0, 1 or 3 axes, and the second axis of others.
    """
    dim = call.argument(1, "dim")
    rank: int = call.input.ndim
    if dim is None:
        dim = -1 if call.operation.kind == "glu" else 0 if rank in (0, 1, 3) else 1
    return int(dim) % max(rank, 1)


def batch_first(tensor: Tensor, batch: int | None) -> Tensor:
    """Move the batch axis to the front. If `batch` is None, the tensor is a single sample."""
    if batch is None:
        return tensor[None]
    return tensor.movedim(batch, 0) if batch else tensor


@dataclass(frozen=True)
class Layout:
    """Axes of a tensor. None if unknown."""

    # channel, batch: `GONE` if the axis was removed
    channel: int | None
    batch: int | None
    # True if the tensor depends on the model's input and therefore differs between samples.
    sampled: bool | None
    # True if the tensor is computed from arguments that hold no samples, and from constants.
    is_whole: bool = False
    # For each entry of the batch axis, the entry that was there before the network reordered them;
    # None if it didn't.
    order: Tensor | None = None

    @property
    def ignores_samples(self) -> bool:
        """True if the tensor is known not to depend on the samples."""
        return self.sampled is False or self.is_whole


_UNKNOWN = Layout(None, None, None)


class Layouts:
    """Layouts of all live tensors in a forward pass on a batch of `batch` samples.

    Attributes
    ----------
    reorders : bool
        True once entries of a batch axis were selected by numbers, even in their own order.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.reorders = False
        self._layouts: MutableMapping[Tensor, Layout] = WeakTensorKeyDictionary()
        # Writes of data into memory that was constant.
        self._written: WriteLog[None] = WriteLog()

    def begin(
        self,
        inputs: Tensor,
        constants: Iterable[Tensor] = (),
        channel: int | None = None,
        whole: Iterable[Tensor] = (),
    ) -> None:
        """Set the layout of an input, with samples along its first axis, and of constants.

        Constants are the model's parameters, buffers and other tensors. Tensors computed only from
        constants are also constant, until data are written into their memory. `whole` are arguments
        that hold no samples, see `whole_arguments`.
        """
        for constant in constants:
            self._layouts[constant] = Layout(None, None, sampled=False)
        for tensor in whole:
            self._layouts[tensor] = Layout(None, None, sampled=None, is_whole=True)
        self._layouts[inputs] = Layout(channel, 0, sampled=True)

    def is_constant(self, tensor: Tensor) -> bool:
        """Return True if a tensor is known not to depend on the model's input."""
        return self._find(tensor).sampled is False

    def is_sampled(self, tensor: Tensor) -> bool:
        """Return True if a tensor depends on the model's input."""
        return self._find(tensor).sampled is True

    def _find(self, tensor: Tensor) -> Layout:
        """Return a tensor's layout. Samples may have been written into a constant."""
        layout = self._layouts.get(tensor, _UNKNOWN)
        if layout.ignores_samples and self._written.has_writes(tensor):
            return replace(layout, sampled=True, is_whole=False)
        return layout

    def channel(self, tensor: Tensor) -> int | None:
        """Return the channel axis of a tensor, or None if unknown."""
        axis = self._layouts.get(tensor, _UNKNOWN).channel
        return axis if axis is not None and 0 <= axis < tensor.ndim else None

    def adopt(self, output: Tensor, source: Tensor) -> None:
        """Copy the layout of `source` to `output`, if `output` has none."""
        if output not in self._layouts and source in self._layouts:
            self._layouts[output] = self._layouts[source]

    def describe(self, tensor: Tensor) -> tuple[int, int, bool]:
        """Return a tensor's batch axis, its channel axis, and True if the latter is assumed.

        If the channel axis is unknown, a tensor with three axes is assumed to be (batch, tokens,
        channels), and one with more axes (batch, channels, ...); with fewer, nothing is assumed.

        If the batch axis is unknown, the first axis is used if its size is a multiple of the batch
        size: it may hold samples, or the windows or tokens of all samples. Size 1 is also accepted
        for tensors that don't depend on the input, such as positional embeddings.
        """
        if tensor.is_nested:
            raise Undefined("its tensor is nested, with another number of rows for each sample")
        if not has_memory(tensor):
            kind = type(tensor).__name__
            raise Undefined(f"its tensor is a {kind} without memory, expected a plain tensor")
        layout = self._find(tensor)
        if layout.is_whole:
            raise Undefined(
                "it is computed from arguments that hold no samples; if their rows are the nodes "
                "of a graph, set sites.rows=nodes"
            )
        batch = layout.batch
        is_reordered = layout.order is not None and len(layout.order) != self._batch
        if (batch == GONE or is_reordered) and self._batch > 1:
            is_long = tensor.shape[:1] == (self._batch,)
            hint = "; if its rows are the nodes of a graph, set sites.rows=nodes" * is_long
            raise Undefined(
                f"the samples are on no axis of this tensor of shape {tuple(tensor.shape)}: an "
                f"earlier operation merged, selected or reordered them{hint}"
            )
        if batch in (None, GONE) or batch >= tensor.ndim:
            batch = 0
            rows = len(tensor) if tensor.ndim else self._batch
            is_row = rows == 1 and not layout.sampled
            if not (self._fits_batch(rows) or is_row):
                raise Undefined(
                    f"its first axis has {rows} entries for {self._batch} samples, so which "
                    "entries belong to which sample is unknown"
                )
        if tensor.ndim <= 2:
            return batch, (0 if batch == 1 else 1), False
        channel = self.channel(tensor)
        if channel is not None and channel != batch:
            return batch, channel, False
        others = [axis for axis in range(tensor.ndim) if axis != batch]
        return batch, others[-1] if tensor.ndim == 3 else others[0], True

    def order(self, tensor: Tensor) -> Tensor | None:
        """Return the sample index of each entry of the batch axis. None if they are in order."""
        return self._layouts.get(tensor, _UNKNOWN).order

    def follow(self, call: FunctionCall, output: object) -> None:
        """Set the layouts of a call's outputs."""
        target = _written_tensor(call)
        if target is not None and not all(self._find(t).ignores_samples for t in call.tensors):
            self._written.write(target, None)
        if call.name == "setitem":
            self._assign(*call.args)
            return
        outputs = output if isinstance(output, tuple | list) else (output,)
        outputs = [tensor for tensor in outputs if isinstance(tensor, Tensor)]
        if not outputs or any(tensor.is_nested for tensor in (*outputs, *call.tensors)):
            return
        operation = call.operation
        sources = call.tensors
        known = [(s, self._find(s)) for s in sources if s in self._layouts]
        is_layer = operation.channels in ("second", "last")
        if not known and not is_layer and operation.takes != "nothing":
            return
        layouts = [layout for _, layout in known]
        sampled = _is_sampled(operation, len(sources), layouts)
        is_whole = _is_whole(len(sources), layouts)
        # Only the first tensor determines the layout.
        rearranges = operation.rearranges and operation.combines != "joins"
        if is_layer or rearranges or operation.channels == "normalized":
            known = [(s, layout) for s, layout in known if s is sources[0]]
        for number, tensor in enumerate(outputs):
            if number and operation.channels == "last":
                # Final states are (layers, batch, channels); attention weights have no channels.
                is_state = operation.hides == "activations" and tensor.ndim == 3
                channel, batch = (2, 1) if is_state else (None, None)
                self._layouts[tensor] = Layout(channel, batch, sampled, is_whole)
                continue
            channel, batch = self._output_axes(call, known, tensor)
            order, is_known = self._order(call, known, tensor, batch)
            batch = batch if is_known else GONE
            self._layouts[tensor] = Layout(channel, batch, sampled, is_whole, order)

    def _order(
        self,
        call: FunctionCall,
        known: Sequence[tuple[Tensor, Layout]],
        output: Tensor,
        batch: int | None,
    ) -> tuple[Tensor | None, bool]:
        """Return the order of an output's samples, and False if it is unknown."""
        if batch is None or not 0 <= batch < output.ndim:
            return None, True
        held = [pair for pair in known if pair[1].sampled and pair[1].batch not in (None, GONE)]
        if not held or call.name in WRITES:
            return None, True
        source, layout = next((pair for pair in held if pair[0] is call.input), held[0])
        order = layout.order
        assert layout.batch is not None
        if layout.batch >= source.ndim or source.shape[layout.batch] != self._batch:
            # Rows of samples and positions; see `nlbench.probes.sites.rows.FoldedRows`.
            return None, True
        with unobserved_calls():
            entries = selected_entries(call, source, layout.batch)
            if entries is not None:
                self.reorders = True
                if len(entries) != source.shape[layout.batch]:
                    return None, order is None
                order = entries if order is None else order[entries]
                if not torch.equal(order.sort().values, torch.arange(len(order))):
                    return None, False
            elif any(not _same_order(other.order, order) for _, other in held):
                # Samples are combined with others, each in the place of one in order, if any is.
                return None, any(other.order is None for _, other in held)
            order = _unless_sorted(order)
        return order, order is None or len(order) == output.shape[batch]

    def _assign(self, target: Tensor, index: Any, value: Any) -> None:
        """Set the layout of a tensor whose rows are assigned by number, all of them."""
        source = self._layouts.get(value, _UNKNOWN) if isinstance(value, Tensor) else _UNKNOWN
        if source.batch != 0 or not isinstance(index, Tensor) or not has_known_indices(index):
            return
        self.reorders = True
        with unobserved_calls():
            rows = index.cpu()
            if len(target) == len(rows) == self._batch and torch.equal(
                rows.sort().values, torch.arange(len(rows))
            ):
                order = rows.argsort()
                order = order if source.order is None else source.order[order]
                self._layouts[target] = replace(source, order=_unless_sorted(order))

    def _output_axes(
        self, call: FunctionCall, known: Sequence[tuple[Tensor, Layout]], output: Tensor
    ) -> tuple[int | None, int | None]:
        """Return the channel axis and the batch axis of an output."""
        operation = call.operation
        sources = call.tensors
        channels = operation.channels
        channel = batch = None
        # Arguments with the output's rank come first: a sum has the layout of the larger term.
        for source, layout in sorted(known, key=lambda pair: pair[0].ndim != output.ndim):
            places = axis_map(call, source, output)
            if channel in (None, GONE) and layout.channel is not None:
                channel = moved_axis(places, layout.channel)
            if batch in (None, GONE) and layout.batch is not None:
                batch = moved_axis(places, layout.batch)
                merged = layout.batch == 0 and operation.arranges == "reshapes" and output.ndim > 0
                is_folded = merged and source.ndim > 0 and len(source) != self._batch
                if is_folded and len(output) == self._batch:
                    # A merged axis of samples and tokens is split again.
                    batch = 0
                if batch is None and merged and self._fits_batch(len(output)):
                    batch = 0
                if batch not in (None, GONE) and not self._fits_batch(output.shape[batch]):
                    batch = GONE
        is_created = operation.ignores_values and all(t.shape != output.shape for t in sources)
        if batch == GONE and (operation.combines == "joins" or is_created):
            # Samples that the network has split may be joined by the call, or in a new tensor.
            batch = None
        if channels == "second":
            channel = 1
        elif channels == "last" or (
            channels == "normalized" and len(call.argument(1, "normalized_shape") or ()) == 1
        ):
            channel = output.ndim - 1
        elif channels == "product":
            # The channels are on the last axis after a two-dimensional weight on the right, and on
            # the second-to-last after one on the left.
            channel = None
            if len(sources) == 2:
                first, second = sources if call.name != "rmatmul" else sources[::-1]
                if second.ndim == 2 and not self.is_sampled(second):
                    channel = output.ndim - 1
                elif first.ndim == 2 < second.ndim and not self.is_sampled(first):
                    channel = output.ndim - 2
        elif channels == "mixed":
            channel = None
        return channel, batch

    def _fits_batch(self, rows: int) -> bool:
        return rows > 0 and rows % max(self._batch, 1) == 0


def _written_tensor(call: FunctionCall) -> Tensor | None:
    """Return the tensor that a call writes into, or None."""
    name = call.function_name
    is_in_place = call.name == "setitem" or name.startswith("__i") or name.rstrip("_") + "_" == name
    target = call.input if is_in_place else call.kwargs.get("out")
    return target if isinstance(target, Tensor) else None


def _unless_sorted(order: Tensor | None) -> Tensor | None:
    return None if order is None or torch.equal(order, torch.arange(len(order))) else order


def _same_order(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _is_sampled(operation: Operation, sources: int, known: Sequence[Layout]) -> bool | None:
    """Return True if an output depends on the model's input, or None if unknown."""
    if any(layout.sampled for layout in known):
        return True
    are_constant = len(known) == sources and all(layout.sampled is False for layout in known)
    return False if are_constant and (sources or operation.takes == "nothing") else None


def _is_whole(sources: int, known: Sequence[Layout]) -> bool:
    """Return True if an output depends on arguments that hold no samples, and on no sample."""
    ignores_samples = len(known) == sources and all(layout.ignores_samples for layout in known)
    return ignores_samples and any(layout.is_whole for layout in known)


def whole_arguments(model: nn.Module) -> list[Tensor]:
    """Return the tensors that a model's hook adds to the samples in each call, such as edges."""
    tensors: list[Tensor] = []
    for hook in getattr(model, "_forward_pre_hooks", {}).values():
        tensors += getattr(getattr(hook, "layout", None), "whole_tensors", {}).values()
    return tensors


def channel_axes(
    run: Callable[[tuple[Tensor, ...]], object], inputs: tuple[Tensor, ...]
) -> list[int]:
    """Find, for each input (n, ...), the axis that the first layer uses as channels.

    It is 1 if there is no layer. The forward pass stops once all axes are known. The caller must
    restore any state it changes.

    Examples
    --------
    >>> import torch
    >>> layer, tokens = torch.nn.Linear(4, 2), torch.zeros(1, 3, 4)
    >>> channel_axes(lambda inputs: layer(inputs[0] + 1), (tokens,))
    [2]
    """
    finder = _ChannelAxisFinder(inputs)
    if finder.pending:
        # An error is raised again when the network's calls are recorded.
        with contextlib.suppress(_StopPass, Exception), finder:
            run(inputs)
    return [finder.axes.get(number, 1) for number in range(len(inputs))]


def _channel_axis(operation: Operation, rank: int) -> int | None:
    """Return the input axis that a layer uses as channels. Return None for other operations."""
    if operation.channels == "second" or operation.name == "prelu":
        return 1
    is_last = operation.channels in ("last", "normalized") or operation.name == "matmul"
    return rank - 1 if is_last else None


class _StopPass(BaseException):
    """Signal that stops a forward pass. It is not an Exception, which a network might catch."""


class _ChannelAxisFinder(TorchFunctionMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.pending: set[int] = set()
        self.axes: dict[int, int] = {}
        # For each tensor, the index of its input and the positions of that input's axes in it.
        self._places: MutableMapping[Tensor, tuple[int, list[int | None]]] = (
            WeakTensorKeyDictionary()
        )
        for number, tensor in enumerate(inputs):
            if tensor.ndim > 2 and tensor.is_floating_point():
                self._places[tensor] = number, list(range(tensor.ndim))
                self.pending.add(number)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        sources = [tensor for tensor in call.tensors if tensor in self._places]
        for tensor in sources:
            axis = _channel_axis(call.operation, tensor.ndim)
            if axis is not None:
                self._decide(tensor, axis)
        output = call.run()
        for tensor in sources:
            number, places = self._places[tensor]
            for result in tensors_in((output,)):
                if result is not tensor and number not in self.axes:
                    moved = axis_map(call, tensor, result)
                    after = [None if axis is None else moved_axis(moved, axis) for axis in places]
                    self._places[result] = number, after
        return output

    def _decide(self, tensor: Tensor, axis: int) -> None:
        number, places = self._places[tensor]
        if number not in self.axes:
            self.axes[number] = places.index(axis) if axis in places else 1
        if self.axes.keys() == self.pending:
            raise _StopPass
