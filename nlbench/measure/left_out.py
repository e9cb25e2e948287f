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
                self._measure.take(accumulator, observation.select_rows(rows))
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
    """Replicates of one site of a measure. An error leaves it without them."""

    def __init__(self, measure: PooledMeasure, accumulator: Accumulator) -> None:
        self._measure = measure
        self._accumulator = accumulator
        self._state: LeftOut | None = None
        self._is_defined = True
        self._reason = ""

    def add(self, observation: SiteBatch, first: int) -> None:
        """Add one batch, given the number of samples before it."""
        numbered = _number_sources(observation, first)
        if numbered is None:
            self._is_defined = False
        elif self._is_defined:
            self._guard(lambda: self._add(numbered))

    def values(self) -> tuple[float, ...]:
        """Return the replicates, or none if they are undefined."""
        state = self._state
        return self._guard(state.replicates) or () if self._is_defined and state else ()

    def remark(self) -> str:
        """Return the reason why there is no standard error, if it is known."""
        return f"no standard error: {self._reason}" if self._reason else ""

    def _add(self, observation: SiteBatch) -> None:
        if self._state is None:
            self._state = self._measure.left_out(self._accumulator)
        assert observation.sources is not None
        self._state.add(observation, group_index(observation.sources.index))

    def _guard(self, compute: Callable[[], T]) -> T | None:
        """Compute something, or record why there are no replicates."""
        try:
            with self._unchanged_random_state():
                return compute()
        except NoReplicates as error:
            self._reason = str(error)
        except (Undefined, NotFinite) as error:
            self._reason = f"without a group of samples: {error}"
        except Exception as error:  # Plugins may raise any exception for fewer samples.
            kind = type(error).__name__
            self._reason = f"{kind} without a group of samples: {first_line(error)}"
        self._is_defined = False
        return None

    def _unchanged_random_state(self) -> AbstractContextManager[None]:
        # Threads share the random generators, so that only measures that draw no random numbers
        # run in several of them.
        if self._measure.independent_sites:
            return nullcontext()
        import torch

        from nlbench.introspection.random_state import preserve_rng_state

        return preserve_rng_state(torch.device("cpu"))


def _number_sources(observation: SiteBatch, first: int) -> SiteBatch | None:
    """Return a batch with its samples numbered, in order by default, or None if unknown."""
    if observation.sources is not None:
        return observation
    import torch

    from nlbench.introspection.distinct_rows import RowNumbers

    rows = len(observation.x)
    if observation.sample_index is not None:
        index = observation.sample_index.cpu() + first
    elif observation.samples in (0, rows):
        index = torch.arange(first, first + rows)
    else:
        return None
    return replace(observation, sources=RowNumbers(index, torch.zeros(rows, dtype=torch.bool)))
