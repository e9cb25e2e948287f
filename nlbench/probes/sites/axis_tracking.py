"""Which axis of an activation holds the channels, and which the samples.

A shape alone doesn't say: (8, 56, 56, 96) is channels-last in ConvNeXt, and
(8, 197, 768) is tokens by channels in a vision transformer but channels by length
after a 1-D convolution. What made the tensor does say, so the axis is followed
from one operation to the next while the network runs, and so is the batch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import Undefined

from .axis_rules import EXPANSIONS, GONE, MOVES, RESHAPES, argument, at, axis_map, reduces

__all__ = ["Layout", "Layouts", "tensors_in"]


# Operations whose output has its channels second, whatever came in.
_CHANNELS_SECOND = {
    f"{name}{d}d"
    for d in (1, 2, 3)
    for name in (
        "conv",
        "conv_transpose",
        "max_pool",
        "avg_pool",
        "lp_pool",
        "adaptive_avg_pool",
        "adaptive_max_pool",
    )
} | {"batch_norm", "instance_norm", "group_norm"}
# Operations whose output has its channels last.
_RECURRENT = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
_CHANNELS_LAST = _RECURRENT | {
    "linear", "embedding", "multi_head_attention_forward", "bilinear",
}  # fmt: skip
# Operations that make a tensor of nothing but numbers.
_FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros",
}  # fmt: skip
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__"}
# Operations after which nothing is known of the channels.
_FORGET = _PRODUCTS | {"bmm", "baddbmm", "einsum", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Layout:
    """What is known of a tensor's axes; None where nothing is.

    Parameters
    ----------
    channel, batch : int or None
        -1 where the axis is gone.
    sampled : bool or None
        Whether it comes from the model's input, and so differs from sample to sample.
    """

    channel: int | None
    batch: int | None
    sampled: bool | None


class Layouts:
    """Remembers the layout of every live tensor that the model's operations give.

    Parameters
    ----------
    batch : int
        Number of samples in the batch.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._layouts: MutableMapping[Tensor, Layout] = WeakTensorKeyDictionary()

    def begin(
        self, given: Tensor, constants: Iterable[Tensor] = (), channel: int | None = None
    ) -> None:
        """Note the model's input: samples along its first axis, channels as a rule unknown.

        Constants are the model's parameters and buffers; what is made of them alone is
        constant too.
        """
        for constant in constants:
            self._layouts[constant] = Layout(None, None, sampled=False)
        self._layouts[given] = Layout(channel, 0, sampled=True)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is known not to come from the model's input."""
        layout = self._layouts.get(tensor)
        return layout is not None and layout.sampled is False

    def is_sampled(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from the model's input."""
        layout = self._layouts.get(tensor)
        return layout is not None and layout.sampled is True

    def is_over_samples(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation on its first tensor takes a statistic of all samples."""
        if name == "batch_norm":
            return bool(argument(args, kwargs, 5, "training"))
        layout = self._layouts.get(args[0]) if args and isinstance(args[0], Tensor) else None
        if layout is None or layout.batch in (None, GONE) or not layout.sampled:
            return False
        return reduces(name, args, kwargs, args[0].ndim, layout.batch)

    def channel(self, tensor: Tensor) -> int | None:
        """Give the axis that is known to hold a tensor's channels; None where none is."""
        layout = self._layouts.get(tensor)
        axis = layout.channel if layout is not None else None
        return axis if axis is not None and 0 <= axis < tensor.ndim else None

    def adopt(self, output: Tensor, source: Tensor) -> None:
        """Note that an output is arranged as its source, where nothing is known of it."""
        if output not in self._layouts and source in self._layouts:
            self._layouts[output] = self._layouts[source]

    def of(self, tensor: Tensor) -> tuple[int, int, bool]:
        """Give a tensor's batch axis, its channel axis, and whether the latter is assumed.

        The channel axis is the one followed. Where nothing is known of it a tensor of three
        axes is taken as (batch, tokens, channels), a larger one as (batch, channels, ...),
        and that is said. Up to two axes leave no choice.

        Where nothing is known of the batch axis it is the first if that has a multiple of
        the batch's entries: samples, or the windows or tokens of all samples. A single entry
        that doesn't come from the model's input, such as a table of positions, is one row.

        Raises
        ------
        nlbench.Undefined
            If the batch isn't found.
        """
        layout = self._layouts.get(tensor)
        batch = layout.batch if layout else None
        if batch == GONE and self._batch > 1:
            raise _lost(len(tensor) if tensor.ndim else 1, self._batch)
        if batch in (None, GONE) or batch >= tensor.ndim:
            batch = 0
            rows = len(tensor) if tensor.ndim else self._batch
            is_row = rows == 1 and not (layout and layout.sampled)
            if not (self._holds(rows) or is_row):
                raise _lost(rows, self._batch)
        if tensor.ndim <= 2:
            return batch, (0 if batch == 1 else 1), False
        channel = layout.channel if layout else None
        if channel is not None and 0 <= channel < tensor.ndim and channel != batch:
            return batch, channel, False
        usual = [axis for axis in range(tensor.ndim) if axis != batch]
        return batch, usual[-1] if tensor.ndim == 3 else usual[0], True

    def follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: object
    ) -> None:
        """Note the layout of an operation's output.

        Parameters
        ----------
        name : str
            The operation's name.
        args, kwargs
            What it was called with.
        output
            What it gave; all tensors of a tuple or list are followed.
        """
        outputs = output if isinstance(output, tuple | list) else (output,)
        if not any(isinstance(tensor, Tensor) for tensor in outputs):
            return
        name = name if name.startswith("__") else name.removesuffix("_")
        sources = list(tensors_in((*args, *kwargs.values())))
        known = [(s, self._layouts[s]) for s in sources if s in self._layouts]
        if not known and name not in _LAYERS | _FACTORIES:
            return
        sampled = _origin(name, len(sources), [layout for _, layout in known])
        if name in _OF_FIRST:
            known = [(s, layout) for s, layout in known if s is sources[0]]
        for number, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                continue
            if number and name in _CHANNELS_LAST:
                # Last states are (layers, batch, channels); attention weights have none.
                state = name in _RECURRENT and tensor.ndim == 3
                channel, batch = (2, 1) if state else (None, None)
                self._layouts[tensor] = Layout(channel, batch, sampled)
                continue
            channel, batch = self._after(name, args, kwargs, sources, known, tensor)
            self._layouts[tensor] = Layout(channel, batch, sampled)

    def _after(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sources: Sequence[Tensor],
        known: Sequence[tuple[Tensor, Layout]],
        output: Tensor,
    ) -> tuple[int | None, int | None]:
        channel = batch = None
        # Arguments of the output's own rank first: a sum has the layout of the larger term.
        for source, layout in sorted(known, key=lambda pair: pair[0].ndim != output.ndim):
            moved = axis_map(name, args, kwargs, source, output)
            if channel in (None, GONE) and layout.channel is not None:
                channel = at(moved, layout.channel)
            if batch in (None, GONE) and layout.batch is not None:
                batch = at(moved, layout.batch)
                merged = layout.batch == 0 and name in RESHAPES and output.ndim > 0
                if batch is None and merged and self._holds(len(output)):
                    batch = 0
                if batch not in (None, GONE) and not self._holds(output.shape[batch]):
                    batch = GONE
        if batch == GONE and name in ("stack", "cat", "concat", "concatenate"):
            # Single samples may have been put together again.
            batch = None
        if name in _CHANNELS_SECOND:
            channel = 1
        elif name in _CHANNELS_LAST or (name == "layer_norm" and _normalizes_last(args, kwargs)):
            channel = output.ndim - 1
        elif name in _FORGET:
            # A two-dimensional weight on the right makes features of the last axis.
            is_weight = name in _PRODUCTS and len(sources) == 2 and sources[1].ndim == 2
            by_weight = is_weight and not self.is_sampled(sources[1])
            channel = output.ndim - 1 if by_weight else None
        return channel, batch

    def _holds(self, rows: int) -> bool:
        return rows > 0 and rows % max(self._batch, 1) == 0


def _origin(name: str, sources: int, known: Sequence[Layout]) -> bool | None:
    """Whether what an operation gives comes from the model's input; None if that isn't known."""
    if any(layout.sampled for layout in known):
        return True
    are_constant = len(known) == sources and all(layout.sampled is False for layout in known)
    return False if are_constant and (sources or name in _FACTORIES) else None


def _lost(rows: int, batch: int) -> Undefined:
    return Undefined(
        f"its first axis has {rows} entries, the batch {batch}: "
        "which axis holds the samples is not known"
    )


_LAYERS = _CHANNELS_SECOND | _CHANNELS_LAST
# Operations whose output is arranged by their first tensor, whatever the others are.
_OF_FIRST = {*MOVES, *RESHAPES, *EXPANSIONS, *_LAYERS, "layer_norm"} - {"stack"}


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors among arguments, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


def _normalizes_last(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())) == 1
