"""Selection of an activation's rows: one per sample or one per token, excluding padding."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.batch_independence import row_order
from nlbench.introspection.function_calls import tensors_in, unobserved_calls

from .sites_probe import RowPolicy

SEED = 0

# Argument names of padding masks; True if nonzero entries mark padding.
_MASKS = {
    "attention_mask": False,
    "src_key_padding_mask": True,
    "tgt_key_padding_mask": True,
    "key_padding_mask": True,
    "padding_mask": True,
    "pad_mask": True,
    "mask": False,
}
# Names by which libraries call masks of tokens as well as masks of padding.
_UNCLEAR = ("padding_mask", "pad_mask", "mask")
# Argument names of the number of tokens per sample, before padding.
_LENGTHS = ("lengths", "length", "lens", "seq_lens", "seq_lengths", "input_lengths", "src_lengths")
_FORMS = (
    "expected attention_mask with 1 or True for tokens and 0 or False for padding, "
    "src_key_padding_mask with True for padding, or a mask that is added, with 0 for tokens and "
    "at most -1e3 for padding"
)
# A module with masks for two sequences passes each mask to one of its parts.
_TWO_SEQUENCES = (
    {"decoder_attention_mask"},
    {"src_key_padding_mask", "tgt_key_padding_mask"},
    {"key", "key_padding_mask"},
)


@dataclass(frozen=True)
class SelectedPositions:
    """The selected positions of a tensor with n samples of p positions."""

    # bool (n, p): True at selected positions; None if all are selected.
    valid: Tensor | None = None
    # (rows,): sample index for each row; None if each row is the mean over a sample.
    sample_index: Tensor | None = None
    # (rows,): index of each row among all n · p positions; None if every position is a row.
    index: Tensor | None = None


class PositionSelector:
    """Selects positions in the tensors of a forward pass."""

    def __init__(self, policy: RowPolicy) -> None:
        self.policy = policy
        self.first = self.samples = 0
        self.outermost: Tensor | None = None
        # Padding masks (n, t) of the modules that are running; True for tokens.
        self._masks: list[Tensor] = []
        self._priorities: dict[tuple[int, int, int], Tensor] = {}

    def begin(self, first: int, samples: int) -> None:
        """Begin a forward pass."""
        self.first = first
        self.samples = samples
        self.outermost = None
        self._masks.clear()
        self._priorities.clear()

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Register hooks that read padding masks, and remove them on exit."""
        with ExitStack() as stack:
            for module in model.modules():
                names = _mask_names(module)
                if names:
                    self._hook(module, names, stack, module is model)
            yield

    def _hook(
        self, module: nn.Module, names: Mapping[str, int | None], stack: ExitStack, is_model: bool
    ) -> None:
        pushed: list[bool] = []
        thread = threading.get_ident()

        def enter(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
        ) -> None:
            # Another thread may run the model at the same time, even while hooks are removed.
            if threading.get_ident() != thread or kwargs is None:
                return
            with unobserved_calls():
                mask = self._mask(names, args, kwargs, is_model)
                pushed.append(mask is not None)
                if mask is not None:
                    if self.outermost is None:
                        self.outermost = mask
                    self._masks.append(mask)

        def leave(module: nn.Module, args: object, returned: object) -> None:
            if threading.get_ident() == thread and pushed and pushed.pop() and self._masks:
                self._masks.pop()

        stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _mask(
        self,
        names: Mapping[str, int | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_model: bool = False,
    ) -> Tensor | None:
        """Return True for the tokens (n, t) that a mask marks; None if there is no padding."""
        for name, position in names.items():
            value = kwargs.get(name)
            if value is None and position is not None and position < len(args):
                value = args[position]
            if name in _LENGTHS:
                value = _mask_of_lengths(value, [*args, *kwargs.values()], self.samples)
            if not isinstance(value, Tensor) or value.ndim not in (1, 2, 3, 4) or not value.numel():
                continue
            if name in _UNCLEAR and self._masks:
                continue
            value = _with_samples(value, self.samples)
            # Inside a network, a mask may be of windows, or of samples and heads.
            if not is_model and (value.ndim == 1 or len(value) != self.samples):
                continue
            is_token = _token_mask(name, value)
            if is_token is None:
                continue
            if bool(is_token.all()) or not bool(is_token.any()):
                return None
            if name in _UNCLEAR:
                raise Undefined(f"'{name}' may mark tokens or padding; {_FORMS}")
            if is_token.ndim == 2 and len(is_token) == self.samples:
                return is_token
            others = [t for t in tensors_in((args, kwargs)) if t.ndim > 1]
            if sum(len(t) == len(value) for t in others) > 1:
                return None  # The network runs on some of the samples.
            raise Undefined(f"'{name}' has shape {tuple(value.shape)}, expected one row per sample")
        return None

    def is_unmasked(self, tensor: Tensor, axis: int) -> bool:
        """Return True if there is a padding mask, but not for as many positions as a tensor has."""
        sizes = [size for index, size in enumerate(tensor.shape) if index not in (0, axis)]
        mask = self._masks[-1] if self._masks else None
        return mask is not None and math.prod(sizes) > 1 and trimmed_mask(mask, sizes) is None

    def select(self, tensor: Tensor, axis: int) -> SelectedPositions | None:
        """Select positions of a tensor. Return None if rows are means over all positions."""
        sizes = [size for index, size in enumerate(tensor.shape) if index not in (0, axis)]
        n, positions = (len(tensor), math.prod(sizes)) if tensor.ndim else (1, 1)
        valid = self._valid(n, sizes, tensor.device)
        if not self.policy.tokens:
            return None if valid is None else SelectedPositions(valid)
        index = self._index(n, positions, valid, tensor.device)
        rows = torch.arange(n * positions, device=tensor.device) if index is None else index
        return SelectedPositions(valid, rows // positions, index)

    def _valid(self, n: int, sizes: Sequence[int], device: torch.device) -> Tensor | None:
        valid = None
        mask = self._masks[-1] if self._masks else None
        mask = trimmed_mask(mask, sizes) if mask is not None and n == len(mask) else None
        if mask is not None:
            length = mask.shape[1]
            place = next((i for i, size in enumerate(sizes) if size == length), None)
            if place is not None:
                shape = [n] + [length if i == place else 1 for i in range(len(sizes))]
                valid = mask.to(device).reshape(shape).expand(n, *sizes).reshape(n, -1)
        positions = math.prod(sizes)
        if self.policy.skip and sizes and positions > 1:
            is_selected = torch.arange(positions, device=device) >= self.policy.skip
            valid = is_selected.expand(n, -1) if valid is None else valid & is_selected
        return valid

    def _index(
        self, n: int, positions: int, valid: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the indices of the rows among all n · p positions, or None for all positions."""
        policy = self.policy
        chosen = valid
        if policy.last:
            everywhere = torch.ones(n, positions, dtype=torch.bool, device=device)
            chosen = everywhere if valid is None else valid
            # Counted from the end, the last position is the first.
            from_end = chosen.flip(1).cumsum(1).flip(1)
            chosen = chosen & (from_end == 1)
        elif policy.count is not None and policy.count < positions:
            priorities = self._draw_priorities(n, positions).to(device)
            if valid is not None:
                priorities = priorities.masked_fill(~valid, math.inf)
            limit = priorities.sort(1).values[:, policy.count - 1 : policy.count]
            chosen = (priorities <= limit) & priorities.isfinite()
        return None if chosen is None else chosen.flatten().nonzero()[:, 0]

    def _draw_priorities(self, n: int, positions: int) -> Tensor:
        """Draw random numbers (n, p), using a separate generator for each sample."""
        key = self.first, n, positions
        if key not in self._priorities:
            rows = [
                np.random.default_rng([SEED, self.first + sample]).random(positions)
                for sample in range(n)
            ]
            self._priorities[key] = torch.from_numpy(np.stack(rows))
        return self._priorities[key]


class UnknownRowOrder(Exception):
    """Signal that a network folds samples and positions into one axis, before the probe has run."""


class FoldedRows:
    """Unfolds first axes that hold the positions of all samples, as after ``x.reshape(-1, d)``.

    The order of the rows is found by a probe: a pair of samples is run three times, as it is and
    with one of the two changed.
    """

    def __init__(self) -> None:
        self.samples = 0  # number of samples in the current forward pass
        # During the probe, the folded tensors of each place as matrices.
        self.recorded: dict[str, list[Tensor]] | None = None
        # For each folded place, the number of rows per sample and their order.
        self._orders: dict[str, tuple[int, str]] = {}
        self.is_probed = False

    def conclude(self, passes: Sequence[Mapping[str, list[Tensor]]]) -> None:
        """Derive the order of rows from the tensors recorded in the probe's three passes."""
        self.is_probed = True
        for place in passes[0] if passes else ():
            calls = [recorded.get(place, []) for recorded in passes]
            shapes = []
            for tensors in calls:
                shapes.append([tensor.shape for tensor in tensors])
            orders = {""}
            if shapes[0] == shapes[1] == shapes[2]:
                orders = {row_order(*tensors) for tensors in zip(*calls, strict=True)}
            sizes = {len(tensor) // 2 for tensor in calls[0]}
            if len(orders) == len(sizes) == 1:
                self._orders[place] = sizes.pop(), orders.pop()

    def order(self, place: str) -> str:
        """Return the order of a place's rows, as `row_order` does. Return "" if none are folded."""
        return self._orders.get(place, (0, ""))[1]

    def unfold(self, tensor: Tensor, axis: int, place: str) -> tuple[Tensor, int, str]:
        """Return a tensor (n, ...), its channel axis, and why its rows are unknown, or ""."""
        if tensor.ndim == 0 or self.samples < 1:
            return tensor, axis, ""
        positions = len(tensor) // self.samples
        if positions < 2 or len(tensor) % self.samples:
            return tensor, axis, ""
        if self.recorded is not None:
            self.recorded.setdefault(place, []).append(tensor.detach().flatten(1).clone())
            return tensor, axis, ""
        if self.samples > 1 and not self.is_probed:
            raise UnknownRowOrder
        size, order = self._orders.get(place, (positions, ""))
        if self.samples == 1:
            size = positions
            order = "contiguous"
        if not order or size != positions:
            return (
                tensor,
                axis,
                (
                    f"its first axis has {len(tensor)} rows for {self.samples} samples, and which "
                    "rows belong to which sample is unknown"
                ),
            )
        tensor = tensor[:, None] if tensor.ndim == 1 else tensor
        return unfold_rows(tensor, self.samples, order), max(axis, 1) + 1, ""


def unfold_rows(tensor: Tensor, samples: int, order: str) -> Tensor:
    """Reshape (n · p, ...) to (n, p, ...), given the order of the rows.

    Examples
    --------
    >>> unfold_rows(torch.arange(6)[:, None], 3, "interleaved")[0, :, 0]
    tensor([0, 3])
    """
    positions = len(tensor) // samples
    if order == "contiguous":
        return tensor.reshape(samples, positions, *tensor.shape[1:])
    return tensor.reshape(positions, samples, *tensor.shape[1:]).transpose(0, 1)


def _token_mask(name: str, value: Tensor) -> Tensor | None:
    """Return True for the tokens (n, t) that a mask marks, or None if it is causal."""
    is_token = value if name in _LENGTHS else _allowed(value, name)
    if is_token.ndim == 4:
        is_token = is_token.any(1)
    if is_token.ndim == 3:
        is_token = is_token.mT if is_token.shape[2] == 1 else is_token
        return is_token[:, 0] if is_token.shape[1] == 1 else _attended_positions(is_token)
    return None if is_token.ndim == 2 and _is_causal(is_token) else is_token


def _allowed(value: Tensor, name: str) -> Tensor:
    """Return True where a mask lets one attend to a position, or to the second one of a pair.

    Masks that are added to attention scores may contain biases, if they are of pairs. Raise
    Undefined for other forms.

    Examples
    --------
    >>> _allowed(torch.tensor([[1, 0]]), "attention_mask").tolist()
    [[True, False]]
    >>> _allowed(torch.tensor([[0.0, -torch.inf]]), "attention_mask").tolist()
    [[True, False]]
    """
    if bool(((value == 0) | ((value == value.amax()) & (value > 0))).all()):
        return value == 0 if _MASKS[name] else value != 0
    # Entries of an added mask of pairs up to which they mask; larger ones are biases.
    is_masked = value <= -1e3
    has_biases = value.ndim > 2 and value.is_floating_point()
    if has_biases or not bool(value.masked_fill(is_masked, 0).any()):
        return ~is_masked
    raise Undefined(f"'{name}' has values from {value.amin():g} to {value.amax():g}; {_FORMS}")


def _mask_of_lengths(lengths: object, arguments: Sequence[object], samples: int) -> Tensor | None:
    """Return True for the tokens (n, t) of sequences of given lengths. None if t is unknown.

    Examples
    --------
    >>> _mask_of_lengths(torch.tensor([2, 1]), [torch.zeros(2, 3, 5)], 2).tolist()
    [[True, True, False], [True, False, False]]
    """
    if not isinstance(lengths, Tensor) or lengths.shape != (samples,):
        return None
    if lengths.is_floating_point() or lengths.dtype == torch.bool or not samples:
        return None
    longest = int(lengths.max())
    tensors = [value for value in arguments if isinstance(value, Tensor) and value.ndim > 1]
    sizes = [size for value in tensors if len(value) == samples for size in value.shape[1:]]
    sizes = sorted((size for size in sizes if size >= longest), key=lambda size: size != longest)
    if not sizes or int(lengths.min()) < 1:
        return None
    return torch.arange(sizes[0], device=lengths.device) < lengths[:, None]


def _with_samples(mask: Tensor, samples: int) -> Tensor:
    """Return a mask with an axis of samples, if it is one for all of them: (t,), (t, t) or (1, …).

    Examples
    --------
    >>> _with_samples(torch.ones(4), 2).shape, _with_samples(torch.ones(4, 4), 2).shape
    (torch.Size([2, 4]), torch.Size([2, 4, 4]))
    """
    is_pairs = mask.ndim == 2 and mask.shape[0] == mask.shape[1] != samples
    if is_pairs or (mask.ndim == 1 and len(mask) != samples):
        mask = mask[None]
    return mask.expand(samples, *mask.shape[1:]) if len(mask) == 1 else mask


def trimmed_mask(mask: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """Return a padding mask (n, t) for a tensor with one of the sizes as its number of positions.

    Networks may cut off positions that are padding in all samples.

    Examples
    --------
    >>> trimmed_mask(torch.tensor([[True, True, False], [True, False, False]]), [2]).tolist()
    [[True, True], [True, False]]
    """
    if mask.shape[1] in sizes:
        return mask
    used = mask.any(0).nonzero()[:, 0]
    mask = mask[:, int(used[0]) : int(used[-1]) + 1]
    return mask if mask.shape[1] in sizes else None


def _is_causal(allowed: Tensor) -> bool:
    """Return True for a mask of all pairs of positions, not of samples and positions."""
    square = allowed.shape[0] == allowed.shape[1] > 1
    return square and torch.equal(allowed, torch.ones_like(allowed).tril())


def _attended_positions(allowed: Tensor) -> Tensor:
    """Return True for the positions (n, t) to which some position attends, given pairs (n, q, t).

    Queries that may attend to every position are ignored if others may not: some libraries write
    such rows for padding, whose softmax would otherwise have no entries. The last query of a causal
    mask is one of the others.

    Examples
    --------
    >>> _attended_positions(torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 1, 1]]]).bool()).tolist()
    [[False, True, True]]
    >>> _attended_positions(torch.ones(1, 3, 3).tril().bool()).tolist()
    [[True, True, True]]
    """
    is_full = allowed.all(2)
    partial = allowed & ~is_full[..., None]
    is_causal = ~partial.triu(1).flatten(1).any(1)
    partial[:, -1] |= allowed[:, -1] & is_causal[:, None]
    return partial.any(1) | is_full.all(1)[:, None]


def _mask_names(module: nn.Module) -> Mapping[str, int | None]:
    """Return the names of a module's padding masks and their positions among its arguments."""
    if not any(True for _ in module.children()):
        return {}
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return {}
    names = [parameter.name for parameter in parameters]
    if any(pair <= set(names) for pair in _TWO_SEQUENCES):
        return {}
    takes_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {
        name: names.index(name) if name in names else None
        for name in (*_MASKS, *_LENGTHS)
        if name in names or takes_keywords
    }


def draw_rows(rows: int, limit: int, batch: int) -> Tensor:
    """Draw the indices of `limit` rows without replacement, in ascending order.

    Examples
    --------
    >>> len(draw_rows(100, 8, 0)), draw_rows(5, 8, 0)
    (8, tensor([0, 1, 2, 3, 4]))
    """
    if rows <= limit:
        return torch.arange(rows)
    chosen = np.random.default_rng([SEED, batch]).choice(rows, limit, replace=False)
    return torch.from_numpy(np.sort(chosen))
