"""Reduction of an activation's input or output to samples by channels, (n, d)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.introspection.function_calls import SPARSE_LAYOUTS

from .rows import PositionSelector, SelectedPositions


def _reduced_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32


def _reduced_axes(tensor: Tensor, axis: int, reduction: str) -> tuple[int, ...]:
    """Return the axes that a reduction averages over."""
    if reduction == "spatial":
        return tuple(d for d in range(1, tensor.ndim) if d != axis)
    return {4: (2, 3), 3: (2,)}.get(tensor.ndim, ()) if reduction == "published" else ()


def reduce_site(tensor: Tensor, axis: int, reduction: str = "spatial") -> Tensor:
    """Reduce an activation's input or output to (n, d) in at least single precision.

    ``spatial``: mean over all positions or tokens, all axes but the channel axis. ``flatten``:
    flatten all axes except the batch axis. ``published``: mean over the last two axes of a 4-D
    tensor or the last axis of a 3-D tensor, regardless of their meaning, as in the affinity paper's
    code. The result is never a view, which an in-place activation would modify.

    Examples
    --------
    >>> reduce_site(torch.ones(5, 7, 4, 4), axis=1).shape
    torch.Size([5, 7])
    """
    if tensor.ndim == 0:
        raise Undefined("the activation is a single number, without a batch")
    if tensor.ndim == 1:
        return tensor[:, None].to(_reduced_type(tensor), copy=True)
    axes = _reduced_axes(tensor, axis, reduction)
    # Means are computed in the wider type without copying the whole tensor.
    reduced = tensor.mean(axes, dtype=_reduced_type(tensor)) if axes else tensor.flatten(1)
    reduced = reduced.to(_reduced_type(tensor))
    if reduced.is_meta:
        return reduced
    same_memory = reduced.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return reduced.clone() if same_memory else reduced


UnreducedFunction = Callable[[Tensor], Tensor]

# Maximum size in bytes of the part of an activation that a function is applied to at once. It keeps
# intermediate results small, and in the cache of a CPU.
_CPU_CHUNK_BYTES = 2**22
_GPU_CHUNK_BYTES = 2**28


@dataclass(frozen=True)
class Side:
    """The input or the output of one activation call, reduced."""

    reduced: Tensor  # (n, d)
    # (n,) by name: result of each function on the unreduced tensor, or its error.
    function_results: Mapping[str, Tensor | Exception]
    sample_index: Tensor | None = None  # (rows,): sample index for each row, if rows are tokens
    # Relative error of the entries if the activation's type is narrower than float32, else 0.
    rounding: float = 0.0
    problem: str = ""  # reason why the rows can't be measured; empty if they can


def capture(
    tensor: Tensor,
    axis: int,
    reduction: str,
    functions: Mapping[str, UnreducedFunction],
    positions: PositionSelector | None = None,
) -> Side:
    """Reduce an activation's tensor, and apply functions to the unreduced tensor.

    Each function maps the tensor, or some of its samples, to one number per sample.

    Examples
    --------
    >>> side = capture(torch.ones(5, 3, 2, 2), 1, "spatial", {"sum": lambda x: x.sum((1, 2, 3))})
    >>> side.reduced.shape, side.function_results["sum"]
    (torch.Size([5, 3]), tensor([12., 12., 12., 12., 12.]))
    """
    problem = _unmeasurable(tensor)
    if problem:
        return Side(torch.zeros(len(tensor) if tensor.ndim else 1, 0), {}, problem=problem)
    selected = None if positions is None else positions.select(tensor, axis)
    if selected is not None and tensor.ndim > 0:
        return _capture_positions(tensor, axis, reduction, functions, selected)
    sides = []
    for chunk in _chunks(tensor) if functions and tensor.ndim else (tensor,):
        reduced = reduce_site(chunk, axis, reduction)
        applied = functions if tensor.ndim else {}
        numbers = {name: _apply(function, chunk) for name, function in applied.items()}
        sides.append(Side(reduced, numbers, rounding=_rounding(chunk, reduced.numel())))
    return join(sides)


def _unmeasurable(tensor: Tensor) -> str:
    """Return the reason why a tensor has no rows of real numbers.

    Return an empty text if it has.
    """
    if tensor.is_complex():
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"its values are complex numbers ({kind}), expected real numbers"
    if tensor.layout in SPARSE_LAYOUTS:
        return "its values are a sparse tensor, expected a dense one"
    return ""


def _rounding(tensor: Tensor, n_means: int) -> float:
    """Return the relative error of means computed from a type narrower than float32, else 0."""
    if not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.float64):
        return 0.0
    # Rounding errors of different positions are independent.
    return torch.finfo(tensor.dtype).eps * math.sqrt(n_means / max(1, tensor.numel()))


def _capture_positions(
    tensor: Tensor,
    axis: int,
    reduction: str,
    functions: Mapping[str, UnreducedFunction],
    selected: SelectedPositions,
) -> Side:
    """Reduce the selected positions of a tensor, and apply functions to them."""
    channels_last = tensor.movedim(axis, -1) if tensor.ndim > 1 else tensor[:, None]
    rows = channels_last.reshape(len(tensor), -1, channels_last.shape[-1])
    valid = selected.valid
    if selected.sample_index is not None:
        flat = rows.flatten(0, 1)
        flat = flat if selected.index is None else flat[selected.index]
        reduced = flat.to(_reduced_type(tensor), copy=selected.index is None)
    elif reduction == "spatial" and valid is not None:
        unpadded = rows.masked_fill(~valid[..., None], 0)
        reduced = unpadded.sum(1, dtype=_reduced_type(tensor)) / valid.sum(1, keepdim=True)
    else:
        reduced = reduce_site(tensor, axis, reduction)
    if valid is None:
        numbers = {name: _apply(function, tensor) for name, function in functions.items()}
    else:
        numbers = {name: _apply_at(function, rows, valid) for name, function in functions.items()}
    means = reduced.numel() if selected.sample_index is None else tensor.numel()
    return Side(reduced, numbers, selected.sample_index, _rounding(tensor, means))


def _apply_at(function: UnreducedFunction, rows: Tensor, valid: Tensor) -> Tensor | Exception:
    """Apply a measure's function to rows (n, p, d) at the valid positions (n, p) of each sample."""
    patterns, pattern_of = torch.unique(valid, dim=0, return_inverse=True)
    results: list[tuple[Tensor, Tensor]] = []
    for index, pattern in enumerate(patterns):
        samples = (pattern_of == index).nonzero()[:, 0]
        result = _apply(function, rows[samples][:, pattern].movedim(-1, 1))
        if isinstance(result, Exception):
            return result
        results.append((samples, result))
    order = torch.cat([samples for samples, _ in results]).argsort()
    return torch.cat([result for _, result in results])[order]


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    limit = _CPU_CHUNK_BYTES if tensor.device.type == "cpu" else _GPU_CHUNK_BYTES
    sample = max(1, tensor.numel() // max(1, len(tensor)) * tensor.element_size())
    size = max(1, limit // sample)
    return (tensor,) if size >= len(tensor) else torch.split(tensor, size)


def _apply(function: UnreducedFunction, tensor: Tensor) -> Tensor | Exception:
    """Apply a measure's function. Return any error, so that only this measure is affected."""
    try:
        numbers = function(tensor)
        if numbers.shape != (len(tensor),):
            shape = tuple(numbers.shape)
            raise ValueError(f"the function returned shape {shape}, expected one number per sample")
        # A view would keep the activation in memory, or change with it.
        return numbers.detach().clone()
    except Exception as error:
        return error.with_traceback(None)


def join(sides: Sequence[Side]) -> Side:
    """Concatenate the samples of several sides."""
    if len(sides) == 1:
        return sides[0]
    function_results = {}
    for name in sides[0].function_results:
        parts = [side.function_results[name] for side in sides]
        errors = [part for part in parts if isinstance(part, Exception)]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        function_results[name] = errors[0] if errors else torch.cat(tensors)
    indices = [side.sample_index for side in sides if side.sample_index is not None]
    return Side(
        torch.cat([side.reduced for side in sides]),
        function_results,
        torch.cat(indices) if indices else None,
        max(side.rounding for side in sides),
        next((side.problem for side in sides if side.problem), ""),
    )
