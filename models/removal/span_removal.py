"""Remove spans of blocks: choose them by a criterion, judge them by cost, and compare networks."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nlbench.errors import RequestError, nearest
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_output import validated_outputs
from nlbench.options import OptionValue
from nlbench.probes.replacement import find_calls
from nlbench.subjects.subject import Subject

from .criteria import removal_order
from .spans import (
    BATCH,
    ROWS_PER_COEFFICIENT,
    Span,
    SpanEvaluation,
    SpanResult,
    has_tied_head,
    sample_losses,
)

TIMED_PASSES = 3


@dataclass(frozen=True)
class RemovedSpan:
    """A span that was removed.

    Parameters
    ----------
    name : str
        Name in the original network.
    map : str
        What takes its place: ``skip``, ``fold`` or ``affine``.
    """

    name: str
    map: str
    result: SpanResult


@dataclass(frozen=True)
class SpanRemoval:
    """A network without some spans.

    Parameters
    ----------
    candidates : sequence of mapping
        One row per span that was judged.
    totals : sequence of mapping
        Rows for parameters, operations, time and loss, before and after.
    remarks : sequence of str
    """

    network: nn.Module
    removed: Sequence[RemovedSpan]
    candidates: Sequence[Mapping[str, Any]]
    totals: Sequence[Mapping[str, Any]]
    remarks: Sequence[str]


def parse_span(text: str) -> tuple[str, int, int]:
    """Parse the first and last block of a span, which may follow the path of its list.

    Examples
    --------
    >>> parse_span("12-15"), parse_span("model.layers.12..15")
    (('', 12, 15), ('model.layers', 12, 15))
    """
    match = re.fullmatch(r"(?:(.+?)\.)?(\d+)(?:(?:-|\.\.)(\d+))?", text)
    if match is None or int(match[3] or match[2]) < int(match[2]):
        raise RequestError(
            f"--span: '{text}', expected the first and last block, as in 12-15 or layers.12..15"
        )
    return match[1] or "", int(match[2]), int(match[3] or match[2])


def find_span(model: nn.Module, example: Tensor, text: str) -> Span:
    """Return the span of blocks that a text names, as in `parse_span`.

    Raises
    ------
    nlbench.RequestError
        If there is none, or several lists of blocks have it.
    """
    blocks, first, last = parse_span(text)
    singles = [Span.at(place, model) for place in find_calls(model, example, of="spans:1")]
    ends: dict[str, int] = {}
    for single in singles:
        ends[single.blocks] = max(single.last, ends.get(single.blocks, 0))
    known = ", ".join(f"{name}.0..{end}" for name, end in ends.items())
    if blocks and blocks not in ends:
        raise RequestError(f"--span: no blocks '{blocks}'{nearest(blocks, ends)}; there is {known}")
    lists = [name for name, end in ends.items() if name == (blocks or name) and last <= end]
    if len(lists) != 1:
        problem = "several lists have it" if lists else "no such blocks"
        raise RequestError(f"--span: '{text}': {problem}; the network has {known}")
    places = find_calls(model, example, of=f"spans:{last - first + 1}")
    spans = (Span.at(place, model) for place in places)
    return next(s for s in spans if (s.blocks, s.first) == (lists[0], first))


class _Shrinking:
    """A network from which spans are removed one at a time."""

    def __init__(self, train: Subject, test: Subject, map_name: str) -> None:
        self.network = train.model
        self._device = next(train.model.parameters(), train.inputs).device
        self.fitting, self.inputs = train.inputs.to(self._device), test.inputs.to(self._device)
        labels = test.labels
        is_class = labels is not None and not labels.is_floating_point()
        self.labels = labels.to(self._device) if labels is not None and is_class else None
        self._map = map_name
        self.removed: list[tuple[Span, RemovedSpan]] = []
        self.rows: list[dict[str, Any]] = []

    def remove_cheapest(self, candidates: Sequence[Span]) -> None:
        """Judge spans of the original network, and remove the one that costs least."""
        evaluation = SpanEvaluation(self.network, self.fitting, self.inputs, self.labels)
        results = evaluation.evaluate([self._current(span) for span in candidates])
        maps = [result.choose(self._map) for result in results]
        costs = [result.costs[name].mean for result, name in zip(results, maps, strict=True)]
        best = costs.index(min(costs))
        for index, result in enumerate(results):
            name = candidates[index].place.name
            self.rows.append(_row(name, result, maps[index] if index == best else ""))
        self.network = evaluation.network(results[best], maps[best])
        chosen = RemovedSpan(candidates[best].place.name, maps[best], results[best])
        self.removed.append((candidates[best], chosen))

    def _current(self, span: Span) -> Span:
        """Return a span of the original network as it is now."""
        missing = 0
        for other, removed in self.removed:
            if other.blocks == span.blocks and other.last < span.first:
                missing += other.length - (removed.map == "affine")
        return span.shifted(missing)


def remove_spans(
    train: Subject,
    test: Subject,
    criterion: str,
    *,
    of: str,
    span: str | None,
    count: int,
    map_name: str,
    judged: int,
    reverse: bool,
    seed: int,
    settings: Mapping[str, OptionValue | str],
) -> SpanRemoval:
    """Remove spans of blocks from a subject's network.

    Parameters
    ----------
    train, test : Subject
        The same network with samples for ranking and fitting, and with samples for evaluation.
    criterion : str
        See `nlbench.models.removal.criteria.removal_order`. It shortlists spans.
    of : str
        ``spans:L`` or ``spans:A..B``.
    span : str or None
        The only span to remove, in place of `criterion` and `count`; see `parse_span`.
    count : int
        Number of spans to remove. They don't overlap.
    map_name : {"skip", "fold", "affine"}
        What takes the place of a span, unless skipping it costs less.
    judged : int
        Number of spans whose cost is measured before each removal.

    Raises
    ------
    nlbench.RequestError
    """
    example = train.inputs[:2].to(next(train.model.parameters(), train.inputs).device)
    shrinking = _Shrinking(train, test, map_name)
    if span is not None:
        shrinking.remove_cheapest([find_span(train.model, example, span)])
    else:
        spans = _ranked_spans(train, example, criterion, of, map_name, seed, settings)
        spans = spans[::-1] if reverse else spans
        for _ in range(count):
            removed = [original for original, _ in shrinking.removed]
            left = [s for s in spans if not any(s.overlaps(other) for other in removed)]
            if not left:
                raise RequestError(
                    f"--count: {len(removed)} spans leave no other that doesn't overlap them"
                )
            shrinking.remove_cheapest(left[:judged])
    removed_spans = [removed for _, removed in shrinking.removed]
    totals = _compare(train.model, shrinking.network, shrinking.inputs, shrinking.labels)
    remarks = _remarks(removed_spans, map_name, len(shrinking.inputs))
    return SpanRemoval(shrinking.network, removed_spans, shrinking.rows, totals, remarks)


def _ranked_spans(
    train: Subject,
    example: Tensor,
    criterion: str,
    of: str,
    map_name: str,
    seed: int,
    settings: Mapping[str, OptionValue | str],
) -> list[Span]:
    calls = find_calls(train.model, example, of=of)
    order = removal_order(
        criterion,
        train.model,
        calls,
        train.inputs,
        train.labels,
        seed=seed,
        settings={"sites.of": of, **settings},
        statistic="without_first",
    )
    by_name = {call.name: call for call in calls}
    spans = [Span.at(by_name[name], train.model) for name in order]
    if map_name == "fold":
        # No layer precedes block 0; a map in the embedding unties the head, which adds weights.
        spans = [s for s in spans if s.first or not has_tied_head(train.model)]
    if not spans:
        raise RequestError(f"--of: {of}: a span from block 0 can't be folded")
    return spans


def _row(name: str, result: SpanResult, chosen: str) -> dict[str, Any]:
    """Return the row of a span that was judged."""
    row: dict[str, Any] = {"span": name, "blocks": result.span.length, "chosen": chosen}
    for map_name in ("skip", "fold", "affine"):
        cost = result.costs.get(map_name)
        row[map_name] = cost.mean if cost else math.nan
        row[f"{map_name}_se"] = cost.error if cost else math.nan
    affine = result.maps["affine"]
    row["r2"], row["r2_with_first"] = affine.r2, affine.r2_with_first
    row["rows"], row["rows_per_coefficient"] = affine.rows, affine.rows_per_coefficient
    return row


def _remarks(removed: Sequence[RemovedSpan], map_name: str, samples: int) -> list[str]:
    remarks = []
    for span in removed:
        per_coefficient = span.result.maps["affine"].rows_per_coefficient
        if map_name != "skip" and per_coefficient < ROWS_PER_COEFFICIENT:
            remarks.append(
                f"{per_coefficient:.1f} rows per coefficient, below {ROWS_PER_COEFFICIENT}: more "
                "samples may make the maps cheaper (--fit-samples; for text also text.windows)"
            )
        if span.map != map_name:
            reason = (
                "costs more than skipping" if map_name in span.result.maps else "isn't possible"
            )
            remarks.append(f"{span.name} is skipped, since {map_name} {reason} there")
    if samples < 2:
        remarks.append("one sample for evaluation: costs have no standard error")
    return list(dict.fromkeys(remarks))


@torch.no_grad()
def _compare(
    before: nn.Module, after: nn.Module, inputs: Tensor, labels: Tensor | None
) -> list[dict[str, Any]]:
    """Return rows of parameters, operations, time and loss of two networks."""
    networks = {"before": before.eval(), "after": after.eval()}
    example = inputs[:1]
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    flops = {}
    with without_fast_path():
        for name, network in networks.items():
            with FlopCounterMode(display=False) as counter:
                network(example.clone())
            flops[name] = counter.get_total_flops()
        # Alternating passes, so that other load on the machine affects both.
        for _ in range(TIMED_PASSES):
            for name, network in networks.items():
                start = time.perf_counter()
                validated_outputs(network(example.clone()), 1).sum().item()
                seconds[name].append(time.perf_counter() - start)
        parameters = {n: sum(p.numel() for p in m.parameters()) for n, m in networks.items()}
        times = {name: statistics.median(values) for name, values in seconds.items()}
        rows = [
            {"quantity": "parameters", **parameters},
            {"quantity": "floating-point operations a sample", **flops},
            {"quantity": "seconds a sample", **times},
        ]
        if labels is not None:
            losses = {n: _mean_loss(m, inputs, labels) for n, m in networks.items()}
            rows.append({"quantity": "loss, nats", **losses})
            perplexities = {name: math.exp(loss) for name, loss in losses.items()}
            rows.append({"quantity": "perplexity", **perplexities})
    for row in rows:
        row["ratio"] = row["after"] / row["before"] if row["before"] else math.nan
    return rows


def _mean_loss(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    losses = []
    for batch, targets in zip(torch.split(inputs, BATCH), torch.split(labels, BATCH), strict=True):
        logits = validated_outputs(network(batch.clone()), len(batch))
        losses.append(sample_losses(logits, targets, logits))
    return torch.cat(losses).mean().item()
