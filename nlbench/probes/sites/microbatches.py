"""Observation at one batch in as many parts as fit, and show each site of the batch as one.

A forward pass in parts gives every sample what it gives in a whole, but for rounding: a
convolution or matrix product may be summed in another order for another number of samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nlbench.errors import Undefined

from .calls import Call
from .reduce import Side, joined

__all__ = ["Collector", "is_out_of_memory", "part_sizes"]


_OUT_OF_MEMORY = re.compile(
    r"out of memory|can'?t allocate memory|not enough memory|failed to allocate", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, of a GPU or of the machine.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def part_sizes(samples: int, most: int) -> list[int]:
    """Split a number of samples into parts of at most `most`, nearly but not all of one size.

    Two sizes tell an axis that holds the samples from one that happens to be as long.

    Examples
    --------
    >>> part_sizes(8, 8), part_sizes(8, 3), part_sizes(8, 4), part_sizes(12, 6)
    ([8], [3, 3, 2], [3, 3, 2], [5, 4, 3])
    """
    parts = -(-samples // most)
    if parts == 1 or most == 1:
        return [samples // parts] * parts
    # Where all would be full, one more leaves them room to differ.
    parts += samples == parts * most
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    if samples % parts == 0:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes


@dataclass
class _Site:
    """What the parts of a batch have shown of one site so far."""

    call: Call
    rows: list[int] = field(default_factory=list)
    x: list[Side] = field(default_factory=list)
    y: list[Side] = field(default_factory=list)


class Collector:
    """Puts the parts of one batch together, site by site.

    Parameters
    ----------
    on_call : callable
        Told of each call of the whole batch, with its place in the order of calls, its input
        and its output. A batch in one part is told as it goes; one in several as its last
        part goes. After memory has run out what was told is not told again.
    """

    def __init__(self, on_call: Callable[[Call, int, Side | None, Side | None], None]) -> None:
        self._on_call = on_call
        self._told: set[str] = set()

    def passes(self, batch: Tensor, most: int) -> Iterator[Tensor]:
        """Give the parts of a batch, one after the other."""
        self._sizes = part_sizes(len(batch), most)
        self._sites: dict[str, _Site] = {}
        for number, part in enumerate(torch.split(batch, self._sizes)):
            self._number, self._calls = number, 0
            yield part
            if self._calls != len(self._sites) and len(self._sizes) > 1:
                raise Undefined(
                    "the network calls other activations for some samples than for others, so a "
                    "batch that does not fit into memory can't be put together"
                )

    def take(self, call: Call) -> None:
        """Take in a call of the part at hand."""
        index = self._calls
        self._calls += 1
        if len(self._sizes) == 1:
            self._tell(call, index, call.begun.side, call.y)
            return
        site = self._sites.setdefault(call.name, _Site(call))
        if call.begun.side is not None and call.y is not None:
            site.rows.append(len(call.begun.side.reduced))
            site.x.append(call.begun.side)
            site.y.append(call.y)
        if self._number == len(self._sizes) - 1:
            self._tell(call, index, *self._whole(site))
            # Its parts are of no more use.
            site.x, site.y = [], []

    def _whole(self, site: _Site) -> tuple[Side | None, Side | None]:
        call = site.call
        if not site.x:
            return None, None
        if not call.begun.sampled and set(site.rows) == {1}:
            # A table that does not come from the input is one row, not one a part.
            return site.x[0], site.y[0]
        a_sample = {rows / size for rows, size in zip(site.rows, self._sizes, strict=False)}
        # A single sample's rows may as well be the tokens of a sample that is elsewhere.
        are_unsure = max(self._sizes) == 1 and a_sample != {1.0}
        if len(site.rows) != len(self._sizes) or len(a_sample) > 1 or are_unsure:
            raise Undefined(
                f"{call.name}: which axis holds the samples is not known, and the batch does not "
                "fit into memory as a whole"
            )
        return joined(site.x), joined(site.y)

    def _tell(self, call: Call, index: int, x: Side | None, y: Side | None) -> None:
        if call.name not in self._told:
            self._told.add(call.name)
            self._on_call(call, index, x, y)
