"""Replicates of pooled site measures: accumulators without one group of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from nlbench.errors import NotFinite, Undefined, first_line

from .replicates import GROUPS, group_index

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.probes.sites import SiteBatch

    from .pooled import Accumulator, PooledMeasure

T = TypeVar("T")

GROUP_BYTES = 2**28
"""Memory for the state of all groups at one site, if no limit is given."""


class NoReplicates(Exception):
    """Signal that a site has no replicates. The message is the reason."""


def fits_group_memory(size: int, limit: int | None) -> bool:
    """Return True if the groups' state at one site, in bytes, is within the limit."""
    return size <= (GROUP_BYTES if limit is None else limit)


def check_group_memory(size: int, limit: int | None) -> None:
    """Raise `NoReplicates` if the groups' state at one site takes too many bytes.

    Examples
    --------
    >>> check_group_memory(2**20, limit=None)
    >>> check_group_memory(2**20, limit=2**10)
    Traceback (most recent call last):
    nlbench.measure.left_out.NoReplicates: moments of 8 groups take 1 MiB, --memory is 1 KiB
    """
    if not fits_group_memory(size, limit):
        from nlbench.introspection.memory import format_bytes

        text = "the limit without --memory is" if limit is None else "--memory is"
        raise NoReplicates(
            f"moments of {GROUPS} groups take {format_bytes(size)}, "
            f"{text} {format_bytes(GROUP_BYTES if limit is None else limit)}"
        )


def merge_all_but_one(parts: Sequence[T], merge: Callable[[T, T], T]) -> list[T]:
    """Merge all parts but one, for each part that is left out.

    Examples
    --------
    >>> merge_all_but_one(["a", "b", "c"], str.__add__)
    ['bc', 'ac', 'ab']
    """
    before = list(parts[:1])
    for part in parts[1:-1]:
        before.append(merge(before[-1], part))
    merged = [before[-1]]
    after = parts[-1]
    for index in range(len(parts) - 2, 0, -1):
        merged.append(merge(before[index - 1], after))
        after = merge(parts[index], after)
    return [after, *reversed(merged)]


class LeftOut(ABC):
    """State of one site from which replicates are computed."""

    @abstractmethod
    def add(self, observation: SiteBatch, groups: Tensor) -> None:
        """Add one batch, given the group (n,) of each row."""

    @abstractmethod
    def replicates(self) -> tuple[float, ...]:
        """Return the value without each group, in the order of the groups that occurred."""


class LeftOutAccumulators(LeftOut):
    """Accumulators of a site: one for each group if they can be merged, or all others' if not."""

    def __init__(self, measure: PooledMeasure) -> None:
        self._measure = measure
        self._accumulators: Sequence[Accumulator] = [measure.accumulator() for _ in range(GROUPS)]
        self._present: set[int] = set()

    def add(self, observation: SiteBatch, groups: Tensor) -> None:
        """Add the rows of a batch to the accumulators."""
        self._present.update(set(groups.tolist()))
        merges = self._accumulators[0].merges
        for group, accumulator in enumerate(self._accumulators):
            rows = ((groups == group) if merges else (groups != group)).nonzero()[:, 0]
            if len(rows):
                self._measure.take(accumulator, observation.with_rows(rows))
        size = sum(accumulator.moment_bytes for accumulator in self._accumulators)
        check_group_memory(size, self._measure.memory)

    def replicates(self) -> tuple[float, ...]:
        """Compute the replicates.

        There are none if a batch has a score without some groups only.
        """
        if len(self._present) < 2:
            return ()
        accumulators = [self._accumulators[group] for group in sorted(self._present)]
        if accumulators[0].merges:
            accumulators = merge_all_but_one(accumulators, lambda a, b: a.merged(b))
        statistics = [accumulator.statistics() for accumulator in accumulators]
        is_comparable = len({numbers.get("batches") for numbers in statistics}) == 1
        return tuple(numbers["value"] for numbers in statistics) if is_comparable else ()


class SiteReplicates:
    """Replicates of all sites of a measure. Errors leave a site without them.

    Parameters
    ----------
    measure : PooledMeasure
    create : callable
        Returns the state of one site.
    """

    def __init__(self, measure: PooledMeasure, create: Callable[[], LeftOut]) -> None:
        self._create = create
        # Threads share the random generators, so that only measures that draw no random numbers
        # run in several of them.
        self._draws = not measure.independent_sites
        self._sites: dict[str, LeftOut] = {}
        self._reasons: dict[str, str] = {}

    def add(self, observation: SiteBatch, first: int) -> None:
        """Add one batch, given the number of samples before it."""
        place = observation.place
        numbered = _with_sources(observation, first)
        if numbered is None or numbered.sources is None or place in self._reasons:
            self._reasons.setdefault(place, "")
            return
        try:
            with self._unchanged_random_state():
                if place not in self._sites:
                    self._sites[place] = self._create()
                self._sites[place].add(numbered, group_index(numbered.sources.index))
        except NoReplicates as error:
            self._reasons[place] = str(error)
        except Exception as error:  # Plugins may raise any exception for fewer samples.
            self._reasons[place] = _reason(error)

    def of_place(self, place: str) -> tuple[float, ...]:
        """Return the replicates of a site, or none if they are undefined."""
        if place in self._reasons or place not in self._sites:
            return ()
        try:
            with self._unchanged_random_state():
                return self._sites[place].replicates()
        except NoReplicates as error:
            self._reasons[place] = str(error)
        except Exception as error:  # Plugins may raise any exception for fewer samples.
            self._reasons[place] = _reason(error)
        return ()

    def remark(self, place: str) -> str:
        """Return the reason why a site has no standard error, if it is worth a remark."""
        reason = self._reasons.get(place, "")
        return f"no standard error: {reason}" if reason else ""

    def _unchanged_random_state(self) -> AbstractContextManager[None]:
        if not self._draws:
            return nullcontext()
        import torch

        from nlbench.introspection.random_state import preserve_rng_state

        return preserve_rng_state(torch.device("cpu"))


def _reason(error: Exception) -> str:
    """Return the reason for a remark, which is empty if fewer samples only have no value."""
    if isinstance(error, Undefined | NotFinite):
        return ""
    return f"{type(error).__name__} without a group of samples: {first_line(error)}"


def _with_sources(observation: SiteBatch, first: int) -> SiteBatch | None:
    """Return a batch with its samples numbered, in order by default, or None if unknown."""
    if observation.sources is not None:
        return observation
    import torch

    from nlbench.introspection.distinct_rows import RowNumbers

    rows = len(observation.x)
    if observation.owners is not None:
        index = observation.owners.cpu() + first
    elif observation.samples in (0, rows):
        index = torch.arange(first, first + rows)
    else:
        return None
    return replace(observation, sources=RowNumbers(index, torch.zeros(rows, dtype=torch.bool)))
