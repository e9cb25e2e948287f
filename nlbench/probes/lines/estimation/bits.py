"""Bit-packed flags: 64 booleans per int64 word.

On a CPU, NumPy compares and packs three to ten times as fast as PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_GATHER = 0x0102040810204080
"""Multiplier that gathers the lowest bits of eight bytes into the highest byte."""
_M1 = 0x5555555555555555
_M2 = 0x3333333333333333
_M4 = 0x0F0F0F0F0F0F0F0F
_H1 = 0x0101010101010101


def pack(flags: Tensor) -> Tensor:
    """Pack bool flags (P, U) into int64 words (P, ceil(U / 64)).

    Examples
    --------
    >>> pack(torch.tensor([[True, False, True]])).tolist()
    [[5]]
    """
    rows, units = flags.shape
    if not flags.numel():
        return torch.zeros(rows, 0, dtype=torch.int64, device=flags.device)
    if not flags.is_cuda:
        packed = np.packbits(flags.numpy(), axis=1, bitorder="little")
        words = np.zeros((rows, -(-units // 64)), dtype=np.int64)
        words.view(np.uint8)[:, : packed.shape[1]] = packed
        return torch.from_numpy(words)
    filled = functional.pad(flags, (0, -units % 64)) if units % 64 else flags.contiguous()
    octets = filled.view(torch.int64) * _GATHER
    return octets.bitwise_right_shift_(56).to(torch.uint8).view(torch.int64)


def greater(first: Tensor, second: Tensor) -> Tensor:
    """Return ``first > second``."""
    if first.is_cuda:
        return first > second
    return torch.from_numpy(np.greater(first.numpy(), second.numpy()))


def equal(first: Tensor, second: float) -> Tensor:
    """Return ``first == second``."""
    return first == second if first.is_cuda else torch.from_numpy(np.equal(first.numpy(), second))


def pack_positions(rows: Tensor, units: Tensor, shape: Sequence[int]) -> Tensor:
    """Return packed flags of shape (n, W), set at the given rows and units.

    Examples
    --------
    >>> pack_positions(torch.tensor([0, 0]), torch.tensor([0, 2]), (1, 1)).tolist()
    [[5]]
    """
    index = torch.unique(rows * (64 * shape[1]) + units)
    flags = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
    return flags.index_add_(0, index // 64, 1 << index % 64).reshape(tuple(shape))


def popcount(words: Tensor) -> Tensor:
    """Count the set flags along the last axis.

    Examples
    --------
    >>> popcount(torch.tensor([[5, -1], [0, 8]])).tolist()
    [66, 1]
    """
    if not words.is_cuda and hasattr(np, "bitwise_count"):  # Since NumPy 2.0.
        counts = np.bitwise_count(words.numpy().view(np.uint64))
        return torch.from_numpy(counts.sum(-1, dtype=np.int64, keepdims=True)).squeeze(-1)
    x = words - ((words >> 1) & _M1)
    x = (x & _M2) + ((x >> 2) & _M2)
    x = (x + (x >> 4)) & _M4
    return ((x * _H1) >> 56).sum(-1)


def union(words: Tensor) -> Tensor:
    """Combine flags with a bitwise or over the second axis, (s, n, W) to (s, W)."""
    result = words[:, 0]
    for i in range(1, words.shape[1]):
        result = result | words[:, i]
    return result


def set_bits(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and unit of each set flag in int64 words (P, W), row by row.

    Examples
    --------
    >>> [index.tolist() for index in set_bits(torch.tensor([[5, 0], [0, -2**63]]))]
    [[0, 0, 1], [0, 2, 127]]
    """
    row, word = words.nonzero().unbind(1)
    # Unpacked byte by byte: shifting whole words would take 64 times the memory.
    octets = words[row, word].view(torch.uint8).reshape(-1, 8)
    hit, byte = octets.nonzero().unbind(1)
    flags = (octets[hit, byte][:, None] >> torch.arange(8, device=words.device).byte()) & 1
    index, bit = flags.nonzero().unbind(1)
    hit = hit[index]
    byte = byte[index]
    return row[hit], word[hit] * 64 + byte * 8 + bit


def first_set_bits(words: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `set_bits` for up to `capacity` flags, without synchronising with a GPU.

    Returns
    -------
    row, unit : int64 tensor of shape (capacity,)
    is_set : bool tensor of shape (capacity,)
        False for unused entries.
    needed : int64 tensor of shape ()
        Capacity needed for all flags; if it exceeds `capacity`, some are missing.

    Examples
    --------
    >>> row, unit, is_set, needed = first_set_bits(torch.tensor([[5, 0], [0, -2**63]]), 4)
    >>> row[is_set].tolist(), unit[is_set].tolist(), int(needed)
    ([0, 0, 1], [0, 2, 127], 3)
    """
    flat = words.flatten()
    at, filled = _first_true(flat != 0, capacity)
    shifts = torch.arange(64, device=words.device)
    index = torch.arange(capacity, device=words.device)
    flags = (flat[at][:, None] >> shifts) & (index < filled)[:, None]
    bit, count = _first_true((flags & 1).flatten() != 0, capacity)
    word = at[bit // 64]
    columns = max(1, words.shape[1])
    unit = word % columns * 64 + bit % 64
    return word // columns, unit, index < count, torch.maximum(filled, count)


def _first_true(flags: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the first positions (capacity,) at which flags (n,) are set, and their number."""
    rank = flags.cumsum(0)
    slot = torch.where(flags, (rank - 1).clamp(max=capacity), capacity)
    places = torch.zeros(capacity + 1, dtype=torch.int64, device=flags.device)
    places.scatter_(0, slot, torch.arange(len(flags), device=flags.device))
    return places[:capacity], flags.sum()
