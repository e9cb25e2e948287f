"""Effective depth: the least number of blocks that a network needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, Undefined
from nlbench.measure import MoreMeans, Result
from nlbench.options import Option
from nlbench.probes.outputs import OutputBatch
from nlbench.probes.replacement import ReplaceableCall

from .accuracy import refuse_unclear_classes
from .influence import block_influence
from .statistics.sample_measure import SampleMeasure
from .substitution import PROBABILITIES, are_probabilities, log_probabilities, loss_change

SAMPLES = 64


def least_depth(costs: Sequence[float], tolerance: float, places: int) -> int:
    """Return the least number of places that have to stay.

    Parameters
    ----------
    costs : sequence of float
        Cost of skipping the first 1, 2, … places of an order.
    tolerance : float
        Largest cost that is acceptable.
    places : int
        Number of places in all.

    Examples
    --------
    >>> least_depth([0.0, 0.2, 0.05, 1.0], 0.1, 6)
    3
    """
    acceptable = [count for count, cost in enumerate(costs, 1) if cost <= tolerance]
    return places - max(acceptable, default=0)


class EffectiveDepth(SampleMeasure):
    r"""Effective depth: least number of blocks that stay if skipping others may cost 0.1 nats.

    Blocks are skipped together, in the order of their influence, the least one first (``value``),
    or from the last one on (``last``). The cost is the change in the mean cross-entropy. Networks
    without blocks are measured by their activations.

    Definition
    ----------
    .. math::

        N - \max \{k : \ell(f_{(k)}) - \ell(f) \le c\}

    f_(k) is the network without the first k blocks of an order of N, c the tolerance, and ℓ the
    mean cross-entropy.

    Units
    -----
    Blocks.

    Undefined
    ---------
    No labels of classes; no block whose output has the shape of its input.

    Cost
    ----
    A forward pass for each number of blocks and each order.

    Limits
    ------
    Orders are greedy, so another set of blocks may cost less. The influence is that of the first
    batch, with its padding, which has no part in the cost.
    """

    name: ClassVar[str] = "effective-depth"
    # 2: padding is left out of the cost, and probabilities aren't taken for logits.
    version: ClassVar[str] = "2"
    probe: ClassVar[str] = "outputs"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    options: ClassVar[Mapping[str, Option]] = {
        "tolerance": Option(
            0.1, "largest acceptable change in the loss, in nats", minimum=0, maximum=1e9
        ),
        "of": Option(
            "auto",
            "places to skip; auto: blocks, or activations if there are none",
            choices=("auto", "blocks", "mlp", "attention", "activations"),
        ),
        "samples": Option(SAMPLES, "maximum number of samples; 0: all", minimum=0, maximum=1e9),
    }
    source: ClassVar[Source] = Source(
        "R. Csordás, C. D. Manning, C. Potts, Do Language Models Use Their Depth Efficiently?, "
        "NeurIPS 2025",
        "the number of blocks that can be skipped; the tolerance and the orders are ours",
    )

    def reset(self) -> None:
        """Discard all batches."""
        super().reset()
        self._orders: dict[str, list[ReplaceableCall]] = {}
        self._places = self._count = 0
        # True if the outputs are probabilities.
        self._probabilities = False

    def update(self, observation: OutputBatch) -> None:
        """Skip blocks on the samples of one batch."""
        from nlbench.introspection.model_output import validated_outputs

        assert observation.inputs is not None
        limit = int(self.settings["samples"])
        size = len(validated_outputs(observation.outputs, len(observation.inputs)))
        refuse_unclear_classes(observation.outputs, observation.labels)
        if limit:
            size = min(size, limit - self._count)
        if size <= 0:
            return
        self._count += size
        super().update(
            replace(
                observation,
                outputs=observation.outputs[:size],
                labels=observation.labels[:size],
                inputs=observation.inputs[:size],
                tokens=None if observation.tokens is None else observation.tokens[:size],
            )
        )

    def terms(self, observation: OutputBatch) -> tuple[Tensor, ...]:
        """Return the number of labels (n,), and the change in loss after each removal."""
        # Imported here, since listing measures doesn't load the probe.
        from nlbench.introspection.attention import without_fast_path
        from nlbench.introspection.model_output import validated_tensor
        from nlbench.introspection.model_state import evaluation_mode
        from nlbench.probes.replacement import CallInterception
        from nlbench.probes.replacement.prefix import run_replaced

        before = observation.outputs
        model = observation.model
        inputs = observation.inputs
        assert model is not None
        assert inputs is not None
        inputs = inputs.to(before.device)
        with evaluation_mode(model), without_fast_path():
            if not self._orders:
                self._find_orders(model, inputs)
            tokens = observation.tokens
            counted_outputs = before if tokens is None else before[tokens]
            self._probabilities = are_probabilities(counted_outputs)
            interception = CallInterception(model, self._orders["last"])
            changes = []
            counted = torch.empty(0)
            for order in self._orders.values():
                for count in range(1, len(order) + 1):
                    skipped = {place.end: torch.clone for place in order[:count]}
                    after = validated_tensor(run_replaced(interception, inputs, skipped))
                    pair = before, after
                    if self._probabilities:
                        pair = log_probabilities(before), log_probabilities(after)
                    change, counted = loss_change(*pair, observation.labels, tokens)
                    changes.append(change)
        return counted, *changes

    def _find_orders(self, model: torch.nn.Module, inputs: Tensor) -> None:
        """Find the places that can be skipped, by influence and from the last one."""
        from nlbench.probes.replacement import CallInterception
        from nlbench.probes.replacement.fits import copy_to_rows
        from nlbench.probes.replacement.interception import get_tensor

        calls = {place.call: place for place in self._find_places(model, inputs[:2])}
        influence: dict[str, float] = {}

        def observe(call: Any, x: Tensor, compute: Callable[[], Any]) -> Any:
            place = calls.get(call)
            before = x.clone()
            output = compute()
            y = None if place is None else get_tensor(output, place.result)
            if place is not None and y is not None and y.shape == before.shape:
                rows = (copy_to_rows(side, place.channel_axis) for side in (before, y))
                influence[place.name] = math.inf
                with suppress(Undefined):  # Zeros have no direction.
                    influence[place.name] = float(block_influence(*rows))
            return output

        CallInterception(model, calls.values()).run(inputs.clone(), observe)
        places = [place for place in calls.values() if place.name in influence]
        if not places:
            raise Undefined("there is no block whose output has the shape of its input")
        self._places = len(calls)
        by_influence = sorted(places, key=lambda place: influence[place.name])
        self._orders = {"influence": by_influence, "last": places[::-1]}

    def _find_places(self, model: torch.nn.Module, example: Tensor) -> list[ReplaceableCall]:
        from nlbench.probes.replacement import find_calls

        undefined: dict[str, str] = {}
        of = str(self.settings["of"])
        try:
            kind = "blocks" if of == "auto" else of
            places = find_calls(model, example, of=kind, on_undefined=undefined.setdefault)
        except Undefined:
            if of != "auto" or undefined:
                raise
            places = find_calls(model, example, on_undefined=undefined.setdefault)
        for place, reason in undefined.items():
            raise Undefined(f"{place} can't be skipped: {reason}")
        return places

    def statistics(self, *terms: Tensor) -> Mapping[str, float]:
        """Return the depth in both orders, and the number of blocks."""
        tolerance = float(self.settings["tolerance"])
        influence, last = (
            least_depth(list(costs.values()), tolerance, self._places)
            for costs in self._costs(terms).values()
        )
        return {"value": influence, "last": last, "places": self._places}

    def _costs(self, terms: Sequence[Tensor]) -> dict[str, dict[str, float]]:
        """Return the cost of skipping each place with those before it, in each order."""
        counted, *changes = terms
        if not counted.sum() > 0:
            raise Undefined("there are no labels to predict")
        costs = [float(change.sum() / counted.sum()) for change in changes]
        if not all(map(math.isfinite, costs)):
            raise NotFinite("the outputs without a block are not finite")
        remaining = iter(costs)
        by_order = {}
        for name, order in self._orders.items():
            by_order[name] = {place.name: next(remaining) for place in order}
        return by_order

    def compute(self) -> Result:
        """Return the depths, with the cost after each removal."""
        result = super().compute()
        terms = [torch.cat(column) for column in zip(*self._batches, strict=True)]
        # A whole number is often the same without any group, but not for other samples.
        remark = PROBABILITIES if self._probabilities else ""
        reason = "; ".join(filter(None, (result.reason, remark)))
        return replace(result, parts=self._costs(terms), replicates=(), reason=reason)
