"""Remove spans of blocks: choose by a criterion, evaluate the costs, and compare networks."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nlbench.errors import RequestError, nearest, shorten
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_output import validated_outputs
from nlbench.options import OptionValue
from nlbench.parsers import parse_index, unique
from nlbench.probes.replacement import find_calls
from nlbench.subjects.subject import Subject

from .curve import class_logits, removal_order, removal_samples, sample_losses
from .spans import (
    BATCH,
    ROWS_PER_COEFFICIENT,
    SPAN_MAPS,
    Cost,
    Span,
    SpanEvaluation,
    SpanResult,
    has_tied_head,
)


def parse_span(text: str) -> tuple[str, int, int]:
    """Parse the first and last block of a span, which may follow the path of its list.

    Examples
    --------
    >>> parse_span("12-15"), parse_span("model.layers.12..15")
    (('', 12, 15), ('model.layers', 12, 15))
    """
    match = re.fullmatch(r"(?:(.+?)\.)?(\d+)(?:(?:-|\.\.)(\d+))?", text)
    path, *ends = match.groups("") if match else ("", "", "")
    first = parse_index(ends[0])
    last = parse_index(ends[1] or ends[0])
    if first is None or last is None or last < first:
        raise RequestError(
            f"--span: '{shorten(text)}', expected the first and last block, as in 12-15 or "
            "layers.12..15"
        )
    return path, first, last


def find_span(model: nn.Module, example: Tensor, text: str) -> Span:
    """Return the span of blocks that a text names, as in `parse_span`."""
    blocks, first, last = parse_span(text)
    ends: dict[str, int] = {}
    for place in find_calls(model, example, of="spans:1"):
        single = Span.at(place, model)
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


class SpanRemoval:
    """A network from which spans are removed one at a time.

    Parameters
    ----------
    train, test : Subject
        The same network with samples for ranking and fitting, and with samples for evaluation.
    map_name : {"skip", "fold", "affine"}
        What takes the place of a span, unless skipping it costs less.

    Attributes
    ----------
    network : torch.nn.Module
        What is left.
    evaluated : list of SpanResult
        Spans whose cost was measured, and that were removed if a map was `chosen`.
    """

    def __init__(self, train: Subject, test: Subject, map_name: str) -> None:
        self.network = train.model
        self.evaluated: list[SpanResult] = []
        self._spans: list[tuple[Span, str]] = []
        self._train = train
        self._fitting, self._inputs, self._labels = removal_samples(train, test)
        self._map = map_name

    def remove_named(self, text: str) -> None:
        """Remove the span that a text names. See `parse_span`."""
        self._remove_cheapest([find_span(self.network, self._fitting[:2], text)])

    def remove_ranked(
        self,
        criterion: str,
        of: str,
        count: int,
        judged: int,
        *,
        reverse: bool,
        seed: int,
        settings: Mapping[str, OptionValue | str],
    ) -> None:
        """Remove spans that don't overlap, each the cheapest of the first `judged` ones.

        Spans are those of `find_calls`, in the order of `removal_order`.
        """
        calls = find_calls(self.network, self._fitting[:2], of=of)
        order = removal_order(
            criterion,
            self.network,
            calls,
            self._train.inputs,
            self._train.labels,
            seed=seed,
            settings={"sites.of": of, **settings},
            statistic="without_first",
            reverse=reverse,
        )
        by_name = {call.name: call for call in calls}
        spans = [Span.at(by_name[name], self.network) for name in order]
        if self._map == "fold":
            # No layer precedes block 0; a map in the embedding unties the head, which adds weights.
            spans = [s for s in spans if s.first or not has_tied_head(self.network)]
        if not spans:
            raise RequestError(f"--of: {of}: a span from block 0 can't be folded")
        for _ in range(count):
            left = [s for s in spans if not any(s.overlaps(other) for other, _ in self._spans)]
            if not left:
                raise RequestError(
                    f"--count: {len(self._spans)} spans leave no other that doesn't overlap them"
                )
            self._remove_cheapest(left[:judged])

    def _remove_cheapest(self, candidates: Sequence[Span]) -> None:
        """Evaluate spans of the original network, and remove the one that costs least."""
        evaluation = SpanEvaluation(self.network, self._fitting, self._inputs, self._labels)
        results = evaluation.evaluate([self._current(span) for span in candidates])
        maps = [result.choose(self._map) for result in results]
        costs = [result.costs[name].mean for result, name in zip(results, maps, strict=True)]
        best = costs.index(min(costs))
        for index, (span, result) in enumerate(zip(candidates, results, strict=True)):
            chosen = maps[index] if index == best else ""
            self.evaluated.append(replace(result, name=span.place.name, chosen=chosen))
        self.network = evaluation.network(results[best], maps[best])
        self._spans.append((candidates[best], maps[best]))

    def _current(self, span: Span) -> Span:
        """Return a span of the original network as it is now."""
        missing = 0
        for other, map_name in self._spans:
            if other.blocks == span.blocks and other.last < span.first:
                missing += other.length - (map_name == "affine")
        return span.shifted(missing)

    @property
    def removed(self) -> list[SpanResult]:
        """Spans that were removed."""
        return [result for result in self.evaluated if result.chosen]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per evaluated span."""
        rows = []
        for result in self.evaluated:
            blocks = result.span.length
            row: dict[str, Any] = {"span": result.name, "blocks": blocks, "chosen": result.chosen}
            for map_name in SPAN_MAPS:
                cost = result.costs.get(map_name, Cost(math.nan, math.nan))
                row[map_name] = cost.mean
                row[f"{map_name}_se"] = cost.error
            for key in ("r2", "r2_with_first", "rows", "rows_per_coefficient"):
                row[key] = getattr(result.maps["affine"], key)
            rows.append(row)
        return rows

    def remarks(self) -> list[str]:
        """Return notes on the maps and their costs."""
        remarks = []
        for removed in self.removed:
            per_coefficient = removed.maps["affine"].rows_per_coefficient
            if self._map != "skip" and per_coefficient < ROWS_PER_COEFFICIENT:
                remarks.append(
                    f"{per_coefficient:.1f} rows per coefficient, below {ROWS_PER_COEFFICIENT}: "
                    "more samples may make the maps cheaper (--fit-samples; for text also "
                    "text.windows)"
                )
            if removed.chosen != self._map:
                is_known = self._map in removed.maps
                reason = (
                    "costs more than skipping there"
                    if is_known
                    else "isn't possible: no layer before it adds its output to the stream as it is"
                )
                remarks.append(f"{removed.name} is skipped, since {self._map} {reason}")
        if len(self._inputs) < 2:
            remarks.append("one sample for evaluation: costs have no standard error")
        return unique(remarks)

    @torch.no_grad()
    def totals(self) -> list[dict[str, Any]]:
        """Return rows for parameters, operations, time and loss, before and after."""
        networks = {"before": self._train.model.eval(), "after": self.network.eval()}
        example = self._inputs[:1]
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        flops = {}
        with without_fast_path():
            for name, network in networks.items():
                with FlopCounterMode(display=False) as counter:
                    network(example.clone())
                flops[name] = counter.get_total_flops()
            # Alternating passes, so that other load on the machine affects both.
            for _ in range(3):
                for name, network in networks.items():
                    start = time.perf_counter()
                    validated_outputs(network(example.clone()), 1).sum().item()
                    seconds[name].append(time.perf_counter() - start)
            parameters = {}
            for name, network in networks.items():
                parameters[name] = sum(p.numel() for p in network.parameters())
            times = {name: statistics.median(values) for name, values in seconds.items()}
            rows = [
                {"quantity": "parameters", **parameters},
                {"quantity": "floating-point operations a sample", **flops},
                {"quantity": "seconds a sample", **times},
            ]
            if self._labels is not None:
                losses = {name: self._mean_loss(network) for name, network in networks.items()}
                rows.append({"quantity": "loss, nats", **losses})
                perplexities = {name: math.exp(loss) for name, loss in losses.items()}
                rows.append({"quantity": "perplexity", **perplexities})
        for row in rows:
            row["ratio"] = row["after"] / row["before"] if row["before"] else math.nan
        return rows

    def _mean_loss(self, network: nn.Module) -> float:
        assert self._labels is not None
        losses = []
        batches = (torch.split(tensor, BATCH) for tensor in (self._inputs, self._labels))
        for batch, targets in zip(*batches, strict=True):
            logits = validated_outputs(network(batch.clone()), len(batch))
            sums, positions = sample_losses(class_logits(logits, logits), targets)
            losses.append(sums / positions.clamp(min=1))
        return torch.cat(losses).mean().item()
