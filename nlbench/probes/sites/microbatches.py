"""Run a batch in microbatches that fit into memory, and join each site's results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.introspection.batch_independence import other_samples
from nlbench.introspection.memory import microbatch_sizes
from nlbench.introspection.model_state import preserve_attributes
from nlbench.introspection.random_state import preserve_rng_state

from .intercept import CallInterceptor, CapturePolicy, SiteCall
from .module_calls import ModuleInterceptor
from .reduce import Side, join
from .rows import FoldedRows

Interceptor = CallInterceptor | ModuleInterceptor
"""Runs a model and reports the calls of its sites."""

CallIdentity = tuple[str, str, Hashable]
"""Name and kind of a call, and its position in the network's code."""


class Microbatches:
    """The microbatches of one batch, joined site by site.

    Parameters
    ----------
    on_call : callable
        Called for each call with the call, its index, its input and its output on the whole
        batch: immediately if the batch is not split, otherwise during the last microbatch. If a
        batch is restarted because memory ran out, no call is reported twice.
    """

    def __init__(self, on_call: Callable[[SiteCall, int, Side | None, Side | None], None]) -> None:
        self._on_call = on_call
        self._reported: set[str] = set()
        self.calls: list[CallIdentity] = []

    def split(self, batch: Tensor, limit: int) -> Iterator[Tensor]:
        """Yield microbatches of at most `limit` samples."""
        self._sizes = microbatch_sizes(len(batch), limit)
        # Input and output at each site, for every microbatch so far.
        self._sides: dict[str, list[tuple[Side, Side]]] = {}
        first: list[CallIdentity] | None = None
        for index, microbatch in enumerate(torch.split(batch, self._sizes)):
            self._index, self.calls = index, []
            yield microbatch
            first = self.calls if first is None else first
            if self.calls != first:
                raise Undefined(
                    "the network calls different activations for different samples, so "
                    "the microbatches of a batch that does not fit into memory can't be joined"
                )

    def add(self, call: SiteCall) -> None:
        """Add a call of the current microbatch."""
        index = len(self.calls)
        self.calls.append((call.name, call.kind, call.site.origin))
        sides = self._sides.setdefault(call.name, [])
        if call.x is not None and call.y is not None:
            sides.append((call.x, call.y))
        if self._index == len(self._sizes) - 1:
            del self._sides[call.name]
            if call.name not in self._reported:
                self._reported.add(call.name)
                self._on_call(call, index, *self._join(call, sides))

    def _join(
        self, call: SiteCall, sides: Sequence[tuple[Side, Side]]
    ) -> tuple[Side | None, Side | None]:
        if not sides:
            return None, None
        if call.any_rows:
            return join([x for x, _ in sides]), join([y for _, y in sides])
        if sides[0][0].owners is not None and len(sides) == len(self._sizes):
            starts = list(itertools.accumulate(self._sizes, initial=0))
            shifted = [
                [_shift(side, start) for side in pair]
                for pair, start in zip(sides, starts, strict=False)
            ]
            return join([x for x, _ in shifted]), join([y for _, y in shifted])
        rows = [len(x.reduced) for x, _ in sides]
        if len(self._sizes) == 1 or (not call.sampled and set(rows) == {1}):
            # A positional embedding, for example, is a single row, the same in all microbatches.
            return sides[0]
        rows_per_sample = {n / size for n, size in zip(rows, self._sizes, strict=False)}
        # The rows of a single sample may be tokens, with the samples on another axis.
        is_ambiguous = max(self._sizes) == 1 and rows_per_sample != {1.0}
        if len(rows) != len(self._sizes) or len(rows_per_sample) > 1 or is_ambiguous:
            call.problem = (
                "the batch axis is unknown, and the batch does not fit into memory as a whole"
            )
            return None, None
        return join([x for x, _ in sides]), join([y for _, y in sides])


def _shift(side: Side, start: int) -> Side:
    return side if side.owners is None else replace(side, owners=side.owners + start)


def rows_at_sites(
    make_interceptor: Callable[[CapturePolicy, Callable[[SiteCall], None]], Interceptor],
    samples: Tensor,
    *,
    attention: bool,
    selects: Callable[[str, str | None], bool],
) -> dict[str, Tensor]:
    """Return the reduced activations and their norms at the selected sites."""
    rows: dict[str, Tensor] = {}

    def add(call: SiteCall) -> None:
        for suffix, side in (("", call.x), (" (output)", call.y)):
            if side is not None:
                norm = side.function_results["norm"]
                norms = [norm[:, None]] if isinstance(norm, Tensor) else []
                rows[call.name + suffix] = torch.cat([side.reduced, *norms], 1)

    policy = CapturePolicy("spatial", {"norm": _norm}, attention, selects)
    interceptor = make_interceptor(policy, add)
    with preserve_attributes(interceptor.model), interceptor.hooked():
        interceptor.run(samples.clone())
    return rows


def probe_folded_rows(
    make_interceptor: Callable[[CapturePolicy, Callable[[SiteCall], None]], Interceptor],
    batch: Tensor,
    folded: FoldedRows,
    *,
    attention: bool,
    selects: Callable[[str, str | None], bool],
) -> None:
    """Find which rows of a folded first axis belong to which sample, by changing a sample."""
    sample, other = batch[:1], other_samples(batch)[0]
    policy = CapturePolicy("spatial", {}, attention, selects, folded=folded)
    passes: list[dict[str, list[Tensor]]] = []
    folded.samples = 2
    try:
        for pair in ((sample, other), (other, other), (sample, sample)):
            folded.recorded = {}
            interceptor = make_interceptor(policy, lambda call: None)
            with (
                preserve_attributes(interceptor.model),
                preserve_rng_state(batch.device),
                interceptor.hooked(),
            ):
                interceptor.run(torch.cat(pair))
            passes.append(folded.recorded)
    except Exception:  # A network may accept no pairs; its folded places are then undefined.
        passes = []
    finally:
        folded.recorded = None
    folded.conclude(passes if len(passes) == 3 else [])


def _norm(tensor: Tensor) -> Tensor:
    """Compute the norm of each sample (n,), which changes if samples exchange entries."""
    wide = tensor.flatten(1).to(torch.promote_types(tensor.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(wide, dim=1)
    return norms
