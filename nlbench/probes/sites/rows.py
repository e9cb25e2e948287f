"""Selection of an activation's rows: one per sample or one per token, excluding padding."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.batch_independence import row_order
from nlbench.introspection.function_calls import tensors_in, unobserved_calls
from nlbench.introspection.pytree import object_parts, tree_map

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
_LENGTHS = (
    "lengths", "length", "lens", "ilens", "seq_len", "seq_lens", "seq_lengths", "sequence_lengths",
    "valid_len", "valid_lens", "input_lens", "input_lengths", "src_lens", "src_lengths", "x_lens",
    "x_lengths", "text_lengths",
)  # fmt: skip
_FORMS = (
    "expected attention_mask with 1 or True for tokens and 0 or False for padding, "
    "src_key_padding_mask with True for padding, or a mask that is added, with 0 for tokens and "
    "at most -1e3 for padding"
)
# Arguments with two values per position that are no masks.
_NO_MASKS = ("token_type_ids", "labels")
# A module of two sequences passes each mask to one of its parts.
_TWO_SEQUENCES = (
    {"src_key_padding_mask", "tgt"},
    {"src", "tgt_key_padding_mask"},
    {"src_key_padding_mask", "memory_key_padding_mask"},
    {"decoder_attention_mask"},
    {"src_key_padding_mask", "tgt_key_padding_mask"},
    {"key", "key_padding_mask"},
    {"src_lengths", "tgt"},
    {"src_lengths", "tgt_lengths"},
    {"src_lens", "tgt_lens"},
    {"x_lengths", "y_lengths"},
    {"x_lens", "y_lens"},
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


class Padding(NamedTuple):
    """The tokens of padded sequences.

    Where only the lengths of n sequences are known, `sizes` are the numbers that their positions
    may have, and t is the largest.
    """

    tokens: Tensor  # bool (n, t): True for tokens
    sizes: frozenset[int] = frozenset()

    def fit(self, sizes: Sequence[int]) -> Tensor | None:
        """Return the tokens in a tensor with one of the sizes as its number of positions.

        Networks may cut off positions that are padding in all samples.

        Examples
        --------
        >>> padding = Padding(torch.tensor([[True, True, False], [True, False, False]]))
        >>> padding.fit([2]).tolist()
        [[True, True], [True, False]]
        """
        fitting = sorted({*self.sizes, self.tokens.shape[1]}.intersection(sizes))
        if len(fitting) > 1:
            raise Undefined(
                f"which of its axes the lengths count is unknown, that of {fitting[0]} or of "
                f"{fitting[1]} entries; expected attention_mask with 1 for tokens"
            )
        if fitting:
            return self.tokens[:, : fitting[0]]
        used = self.tokens.any(0).nonzero()[:, 0]
        if not len(used):
            return None
        tokens = self.tokens[:, int(used[0]) : int(used[-1]) + 1]
        return tokens if tokens.shape[1] in sizes else None

    @property
    def is_certain(self) -> bool:
        """False if all samples may have as many tokens as there are positions."""
        lengths = self.tokens.sum(1)
        is_one_length = bool((lengths == lengths[0]).all())
        return not (is_one_length and int(lengths[0]) in self.sizes)

    def intersect(self, other: Padding) -> Padding:
        """Return the tokens that are tokens by another mask of the same positions, too."""
        if self.sizes and not other.sizes:
            return other.intersect(self)
        tokens = other.fit(self.tokens.shape[1:]) if other.sizes else other.tokens
        if tokens is None or tokens.shape != self.tokens.shape:
            return self
        return self._replace(tokens=self.tokens & tokens.to(self.tokens.device))


class PositionSelector:
    """Selects positions in the tensors of a forward pass.

    With `changes_padding`, other numbers stand in the padding of the first of the model's arguments
    that has any, or else of the first embedding: positions that are tokens don't change.
    """

    def __init__(self, policy: RowPolicy, *, changes_padding: bool = False) -> None:
        self.policy = policy
        self._changes_padding = changes_padding
        self._is_changed = False
        self.first = self.samples = 0
        # Padding of the outermost module that gets a mask; None for encoder–decoders, whose outputs
        # may be of the other sequence.
        self.outermost: Padding | None = None
        self._translates = False
        # That of the running modules that get a mask; None where it masks nothing.
        self._paddings: list[Padding | None] = []
        self._priorities: dict[tuple[int, int, int], Tensor] = {}
        # Possible numbers of positions of arguments that look like masks and are not read, by name.
        self._possible: dict[str, frozenset[int]] = {}
        # Padding of the model's arguments.
        self.of_model: Padding | None = None
        # Names of those that have as many positions as a tensor without a mask.
        self.unread: dict[str, None] = {}

    def begin(self, first: int, samples: int) -> None:
        """Begin a forward pass."""
        self.first = first
        self.samples = samples
        self.outermost = self.of_model = None
        self._is_changed = False
        self._paddings.clear()
        self._possible.clear()
        self._priorities.clear()

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Register hooks that read padding masks, and remove them on exit."""
        with ExitStack() as stack:
            for module in model.modules():
                parameters = _parameters(module)
                self._translates |= _is_translator({each.name for each in parameters})
                names = _mask_names(module, parameters)
                # The model's arguments may be mappings with masks, or masks by other names.
                if names or module is model or any("mask" in each.name for each in parameters):
                    self._hook(module, parameters, names, stack, module is model)
                if self._changes_padding and isinstance(module, nn.Embedding):
                    stack.callback(module.register_forward_hook(self._change_embedding).remove)
            yield

    def _change_embedding(self, module: nn.Module, args: object, output: Tensor) -> Any:
        return self._change(output)

    def _change(self, value: Any) -> Any:
        """Change the padding of a tensor, unless another one was changed in this pass."""
        if self.of_model is None or self._is_changed:
            return value
        changed = _with_other_padding(value, self.of_model)
        self._is_changed = changed is not value
        return changed

    def _hook(
        self,
        module: nn.Module,
        parameters: Sequence[inspect.Parameter],
        names: Mapping[str, int | None],
        stack: ExitStack,
        is_model: bool,
    ) -> None:
        pushed: list[bool] = []
        thread = threading.get_ident()

        def enter(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
        ) -> tuple[Any, Any] | None:
            # Another thread may run the model at the same time, even while hooks are removed.
            if threading.get_ident() != thread or kwargs is None:
                return None
            with unobserved_calls():
                is_known, padding = (
                    self._model_padding(parameters, names, args, kwargs)
                    if is_model
                    else self._module_padding(parameters, names, args, kwargs)
                )
                pushed.append(is_known)
                if is_known:
                    self._paddings.append(padding)
                if padding is not None and self.outermost is None and not self._translates:
                    self.outermost = padding
                if not is_model:
                    return None
                self.of_model = padding
                if not self._changes_padding:
                    return None
                return tree_map(self._change, args), tree_map(self._change, kwargs)

        def leave(module: nn.Module, args: object, returned: object) -> None:
            if threading.get_ident() == thread and pushed and pushed.pop() and self._paddings:
                self._paddings.pop()

        stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _model_padding(
        self,
        parameters: Sequence[inspect.Parameter],
        names: Mapping[str, int | None],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[bool, Padding | None]:
        """Return the padding of the model's arguments, and remember those that may be masks."""
        entries, repeated = _nested_entries([*args, *kwargs.values()])
        if not _has_two_sequences({*entries, *(parameter.name for parameter in parameters)}):
            keys = (name for name in (*_MASKS, *_LENGTHS) if name in entries.keys() - repeated)
            names = dict.fromkeys(keys) | dict(names)
        kwargs = entries | dict(kwargs)
        is_known, padding = self._padding(names, args, kwargs, is_model=True)
        if padding is None:
            named = _named_arguments(parameters, args) | kwargs
            self._possible |= _possible_masks(named, names, self.samples)
        return is_known, padding

    def _module_padding(
        self,
        parameters: Sequence[inspect.Parameter],
        names: Mapping[str, int | None],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[bool, Padding | None]:
        """Return the padding of a module's arguments, and remember those that may be masks."""
        is_known, padding = self._padding(names, args, kwargs)
        if not any(self._paddings):
            # What the network computes outside the module may have the same positions.
            named = _named_arguments(parameters, args) | dict(kwargs)
            found = _possible_masks(named, {}, self.samples)
            self._possible |= {name: found[name] for name in found if "mask" in name}
        return is_known, padding

    def _padding(
        self,
        names: Mapping[str, int | None],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_model: bool = False,
    ) -> tuple[bool, Padding | None]:
        """Return True if there is a mask of positions, and what all masks leave.

        The latter is None without padding. A mask of pairs without padding may be of another kind.
        """
        arguments = [*args, *kwargs.values()]
        found: Padding | None = None
        is_known = is_of_positions = False
        for name, position in names.items():
            value = kwargs.get(name)
            if value is None and position is not None and position < len(args):
                value = args[position]
            sizes: frozenset[int] = frozenset()
            if name in _LENGTHS:
                sizes = _possible_sizes(value, arguments, self.samples)
                value = _mask_of_lengths(value, sizes)
            if not isinstance(value, Tensor) or value.ndim not in (1, 2, 3, 4) or not value.numel():
                continue
            # Next to a clear mask, an unclear one of pairs is hardly one of padding.
            is_redundant = found is not None or (is_known and value.ndim > 2)
            if name in _UNCLEAR and (any(self._paddings) or is_redundant):
                continue
            is_token = self._tokens(name, value, arguments, is_model)
            if is_token is None:
                continue
            is_known = True
            is_of_positions |= value.numel() <= is_token.numel()
            if bool(is_token.all()):
                continue
            padding = Padding(is_token, sizes)
            found = padding if found is None else found.intersect(padding)
        return is_of_positions or found is not None, found

    def _tokens(
        self, name: str, value: Tensor, arguments: Sequence[Any], is_model: bool
    ) -> Tensor | None:
        """Return True for the tokens that one mask marks, or None if it is no mask of padding."""
        value = _with_samples(value, self.samples)
        # Inside a network, a mask may be of windows, or of samples and heads.
        if not is_model and (value.ndim == 1 or len(value) != self.samples):
            return None
        is_token = _token_mask(name, value)
        if is_token is None or bool(is_token.all()):
            return is_token
        if not bool(is_token.any()):
            # Numbers that are added mask nothing if all are 0.
            is_added = value.dtype != torch.bool and not bool(value.any())
            if is_added or not is_model or name in _UNCLEAR:
                return None
        if name in _UNCLEAR:
            raise Undefined(f"'{name}' may mark tokens or padding; {_FORMS}")
        if is_token.ndim == 2 and len(is_token) == self.samples:
            return is_token
        others = [t for t in tensors_in(tuple(arguments)) if t.ndim > 1]
        if sum(len(t) == len(value) for t in others) > 1:
            return None  # The network runs on some of the samples.
        raise Undefined(f"'{name}' has shape {tuple(value.shape)}, expected one row per sample")

    def is_unmasked(self, tensor: Tensor, axis: int) -> bool:
        """Return True if there is a padding mask, but not for as many positions as a tensor has."""
        sizes = [size for index, size in enumerate(tensor.shape) if index not in (0, axis)]
        padding = self._paddings[-1] if self._paddings else None
        if padding is None or math.prod(sizes) <= 1:
            return False
        return padding.is_certain and padding.fit(sizes) is None

    def select(self, tensor: Tensor, axis: int) -> SelectedPositions | None:
        """Select positions of a tensor. Return None if rows are means over all positions."""
        sizes = [size for index, size in enumerate(tensor.shape) if index not in (0, axis)]
        n, positions = (len(tensor), math.prod(sizes)) if tensor.ndim else (1, 1)
        valid = self._valid(n, sizes, tensor.device)
        if not any(self._paddings) and n == self.samples:
            possible = self._possible.items()
            self.unread |= {name: None for name, fitting in possible if fitting.intersection(sizes)}
        if not self.policy.tokens:
            self._refuse_empty(valid)
            return None if valid is None else SelectedPositions(valid)
        index = self._index(n, positions, valid, tensor.device)
        rows = torch.arange(n * positions, device=tensor.device) if index is None else index
        return SelectedPositions(valid, rows // positions, index)

    def _refuse_empty(self, valid: Tensor | None) -> None:
        """Raise Undefined if a sample has no positions, and thus no mean."""
        if valid is None or bool((has_some := valid.any(1)).all()):
            return
        # Samples come in random order, so their numbers here would mislead.
        count = len(valid) - int(has_some.sum())
        after = f" after the first {self.policy.skip}" if self.policy.skip else ""
        raise Undefined(
            f"a sample without tokens{after} has no mean ({count} of {len(valid)} in a batch); "
            "leave it out"
        )

    def _valid(self, n: int, sizes: Sequence[int], device: torch.device) -> Tensor | None:
        valid = None
        padding = self._paddings[-1] if self._paddings else None
        is_of_samples = padding is not None and n == len(padding.tokens)
        mask = padding.fit(sizes) if padding is not None and is_of_samples else None
        if mask is not None:
            length = mask.shape[1]
            # Pairs of positions have two axes, and padding may be on either.
            for place in (i for i, size in enumerate(sizes) if size == length):
                shape = [n] + [length if i == place else 1 for i in range(len(sizes))]
                along = mask.to(device).reshape(shape).expand(n, *sizes).reshape(n, -1)
                valid = along if valid is None else valid & along
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


def _with_other_padding(value: Any, padding: Padding) -> Any:
    """Replace what stands in a tensor's padding by the sample's first token.

    Everything else is returned as it is: integers, among which a network may look for padding, and
    masks.

    Examples
    --------
    >>> padding = Padding(torch.tensor([[True, True, False], [True, False, False]]))
    >>> x = torch.arange(6.0).reshape(2, 3, 1)
    >>> _with_other_padding(x, padding)[..., 0].tolist()
    [[0.0, 1.0, 0.0], [3.0, 3.0, 3.0]]
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if value.ndim < 2 or len(value) != len(padding.tokens) or _looks_like_mask(value, len(value)):
        return value
    try:
        tokens = padding.fit(value.shape[1:])
    except Undefined:
        return value
    length = None if tokens is None else tokens.shape[1]
    axes = [axis for axis, size in enumerate(value.shape) if axis and size == length]
    if tokens is None or len(axes) != 1:
        return value
    moved = value.movedim(axes[0], 1)
    tokens = tokens.to(value.device)
    first = moved[torch.arange(len(moved)), tokens.int().argmax(1)]
    shape = [*tokens.shape, *[1] * (moved.ndim - 2)]
    return torch.where(tokens.reshape(shape), moved, first[:, None]).movedim(1, axes[0])


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


def _possible_sizes(lengths: object, arguments: Sequence[object], samples: int) -> frozenset[int]:
    """Return the numbers that the positions of sequences of given lengths may have.

    Empty if the values are no lengths.

    Examples
    --------
    >>> sorted(_possible_sizes(torch.tensor([2, 1]), [torch.zeros(2, 3, 5)], 2))
    [3, 5]
    """
    lengths = _as_lengths(lengths)
    if lengths is None or lengths.shape not in ((samples,), (samples, 1)):
        return frozenset()
    if lengths.is_complex() or lengths.dtype == torch.bool or not samples:
        return frozenset()
    # Fractions of the longest sample are no numbers of tokens, not even if all are 1.
    is_fraction = lengths.is_floating_point() and not 1 < float(lengths.max()) < math.inf
    if is_fraction or bool(((lengths < 0) | (lengths != lengths.floor())).any()):
        return frozenset()
    others = [value for value in arguments if value is not lengths]
    tensors = [value for value in others if isinstance(value, Tensor) and value.ndim > 1]
    sizes = [size for value in tensors if len(value) == samples for size in value.shape[1:]]
    return frozenset(size for size in sizes if size >= int(lengths.max()))


def _as_lengths(value: object) -> Tensor | None:
    """Return a tensor, or a list of integers as one, and None for everything else."""
    if isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return torch.tensor(value)
    return value if isinstance(value, Tensor) else None


def _mask_of_lengths(value: object, sizes: frozenset[int]) -> Tensor | None:
    """Return True for the tokens (n, t) of sequences of given lengths, or None without sizes."""
    lengths = _as_lengths(value)
    if lengths is None or not sizes:
        return None
    return torch.arange(max(sizes), device=lengths.device) < lengths.reshape(-1, 1)


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


def _is_causal(allowed: Tensor) -> bool:
    """Return True for a mask of all pairs of positions, not of samples and positions."""
    square = allowed.shape[0] == allowed.shape[1] > 1
    return square and torch.equal(allowed, torch.ones_like(allowed).tril())


def tokens_of_outputs(padding: Padding | None, outputs: Tensor) -> Tensor | None:
    """Return True for the tokens (n, t) of outputs, given the network's padding, or None."""
    if padding is None:
        return None
    tokens = padding.fit(outputs.shape[1:2]) if outputs.ndim > 2 else None
    if tokens is None:
        tokens = padding.tokens
    if outputs.shape[:-1] == tokens.shape:
        return tokens.to(outputs.device)
    if outputs.ndim > 2 and {tokens.shape[1], *padding.sizes}.intersection(outputs.shape[1:]):
        raise Undefined(
            f"the outputs of one sample have shape {tuple(outputs.shape[1:])} and its padding "
            f"mask ({tokens.shape[1]},), expected outputs (tokens, channels)"
        )
    return None


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


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of a module's forward method, if they are known."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
        # A method that was replaced on the object passes its arguments on.
        is_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        if is_any and "forward" in vars(module):
            own = inspect.signature(type(module).forward).parameters
            parameters = list(own.values())[1:]
    except (TypeError, ValueError):
        return []
    return parameters


def _mask_names(
    module: nn.Module, parameters: Sequence[inspect.Parameter]
) -> Mapping[str, int | None]:
    """Return the names of a module's padding masks and their positions among its arguments."""
    if next(module.children(), None) is None and next(module.parameters(), None) is None:
        return {}
    names = [parameter.name for parameter in parameters]
    if _has_two_sequences(set(names)):
        return {}
    takes_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {
        name: names.index(name) if name in names else None
        for name in (*_MASKS, *_LENGTHS)
        if name in names or takes_keywords
    }


def _has_two_sequences(names: set[str]) -> bool:
    return any(pair <= names for pair in _TWO_SEQUENCES)


def _is_translator(names: set[str]) -> bool:
    """Return True for a module that computes one sequence from another. Attention may not."""
    is_decoder = "memory_key_padding_mask" in names
    return is_decoder or (_has_two_sequences(names) and "key_padding_mask" not in names)


def _nested_entries(arguments: Iterable[Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the entries of mappings and of objects by name, also of nested ones.

    Returns the names that several of them use, too.

    Examples
    --------
    >>> entries, repeated = _nested_entries([{"text": {"ids": 1, "mask": 2}}, {"mask": 3}])
    >>> sorted(entries), repeated
    (['ids', 'mask', 'text'], {'mask'})
    """
    entries: dict[str, Any] = {}
    repeated: set[str] = set()
    waiting = list(arguments)
    # Objects may refer to each other.
    seen: dict[int, object] = {}
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            parts = dict(value)
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            parts = value._asdict()
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
            waiting += value
            continue
        else:
            parts = object_parts(value)
        parts = {name: part for name, part in parts.items() if isinstance(name, str)}
        repeated |= entries.keys() & parts.keys()
        entries = parts | entries
        waiting += parts.values()
    return entries, repeated


def _named_arguments(
    parameters: Sequence[inspect.Parameter], args: Sequence[Any]
) -> dict[str, Any]:
    """Return positional arguments by name, or by number where the name is unknown."""
    limit = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [parameter.name for parameter in parameters if parameter.kind <= limit]
    names += [f"argument {index}" for index in range(len(names), len(args))]
    return dict(zip(names, args, strict=False))


def _possible_masks(
    arguments: Mapping[str, Any], read: Mapping[str, object], samples: int
) -> dict[str, frozenset[int]]:
    """Return the numbers of positions of arguments that look like masks or lengths, by name.

    Examples
    --------
    >>> mask = torch.tensor([[True, True, False], [True, False, False]])
    >>> _possible_masks({"x": torch.zeros(2, 3, 5), "token_mask": mask}, {}, 2)
    {'token_mask': frozenset({3})}
    """
    found = {}
    for name, value in arguments.items():
        if name in read or name in _NO_MASKS:
            continue
        others = [other for key, other in arguments.items() if key != name]
        if "len" in name:
            found[name] = _possible_sizes(value, others, samples)
        elif _looks_like_mask(value, samples):
            tensors = [other for other in others if isinstance(other, Tensor)]
            sampled = [t for t in tensors if t.ndim > 1 and len(t) == samples]
            if any(max(value.shape[1:]) in t.shape[1:] for t in sampled):
                found[name] = frozenset({max(value.shape[1:])})
    return {name: sizes for name, sizes in found.items() if sizes}


def _looks_like_mask(value: object, samples: int) -> bool:
    """Return True for a tensor of one axis besides that of samples, which marks some positions.

    Marks are 0 and 1, or numbers that are added: 0, and large negative ones.
    """
    if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != samples or value.is_meta:
        return False
    longest = max(value.shape[1:])
    if value.is_complex() or value.is_nested or longest < 2 or value[0].numel() != longest:
        return False
    zeros = value == 0
    marks = value == 1 if bool((value == 1).any()) else value <= -1e3
    return bool((zeros | marks).all()) and bool(zeros.any()) and bool(marks.any())


def unread_remark(name: str) -> str:
    """Return a remark on an argument of the model that may be a mask and was not read."""
    if name in _MASKS or name.endswith(("attention_mask", "key_padding_mask")):
        return f"'{name}' is only applied in the modules that it is passed to"
    if "len" in name:
        return (
            f"'{name}' may be the lengths of padded samples: positions are measured as they are; "
            "name it lengths"
        )
    return (
        f"'{name}' may be a padding mask: positions are measured as they are; "
        "name it attention_mask (1 for tokens)"
    )


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
