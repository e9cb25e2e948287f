"""Local complexity: the number of units whose state changes close to a sample."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined
from nlbench.measure import MoreMeans, Result
from nlbench.options import Option
from nlbench.probes.function import FunctionBatch
from nlbench.probes.lines import SegmentTrace, estimate_segment, trace_segments
from nlbench.probes.sites import SiteBatch, observe_sites, refuse_undefined

from .papers import bibtex
from .statistics.prepared import prepare_samples
from .statistics.sample_measure import SampleMeasure

COST_PROBE_EVALUATIONS = 25
"""Forward passes for estimating a segment's boundaries: a grid of 9 points and 16 checks."""


def stars(x: Tensor, directions: int, radius: float, generator: torch.Generator) -> Tensor:
    """Draw a star around each sample: the vertices x ± r v for the vectors v of a random frame.

    Parameters
    ----------
    x : tensor of shape (n, *input)
    directions : int
        Number of vectors in the orthonormal frame, at most the number of inputs.
    radius : float
        r, in units of the input.
    generator : torch.Generator

    Returns
    -------
    tensor of shape (n, 2, directions, *input)
        The vertices x - r v, then x + r v.
    """
    size = x[0].numel()
    if directions > size:
        raise RequestError(f"{directions} directions, expected at most {size}, one per input")
    normal = torch.randn(len(x), size, directions, generator=generator, dtype=torch.float64)
    frames = torch.linalg.qr(normal).Q.mT.reshape(len(x), directions, *x.shape[1:])
    steps = radius * torch.stack([-frames, frames], 1).to(x.device)
    return (x[:, None, None].double() + steps).to(x.dtype)


def changed_units(
    model: nn.Module,
    vertices: Tensor,
    on_unseen: Callable[[str], None] = lambda description: None,
) -> Tensor:
    """Count the units whose state differs between vertices of a star.

    A unit is an element of an activation's input, and its state is the sign of that element.

    Parameters
    ----------
    model : torch.nn.Module
    vertices : tensor of shape (n, 2, p, *input)
        See `stars`.
    on_unseen : callable, optional
        Called with a description of each activation whose units can't be counted.

    Returns
    -------
    tensor of shape (n,), float64

    References
    ----------
    A. I. Humayun, R. Balestriero and R. Baraniuk, "Deep Networks Always Grok and Here is Why",
    ICML 2024, section 3.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    >>> _ = model[0].weight.data.fill_(1.0), model[0].bias.data.copy_(torch.tensor([0.0, 5.0]))
    >>> changed_units(model, torch.tensor([-0.1, 0.1]).reshape(1, 2, 1, 1))
    tensor([1.], dtype=torch.float64)
    """
    changed: list[list[int]] = [[] for _ in vertices]

    def count(site: SiteBatch) -> None:
        changed[site.batch].append(_changes(prepare_samples(site.x, site.place).values > 0))

    stars_as_batches = (star.flatten(0, 1) for star in vertices)
    observe_sites(
        model,
        stars_as_batches,
        count,
        reduction="flatten",
        on_unseen=on_unseen,
        on_undefined=refuse_undefined,
    )
    if not all(changed):
        raise Undefined("the model calls no known activation function")
    return torch.tensor([sum(counts) for counts in changed], dtype=torch.float64)


def _changes(states: Tensor) -> int:
    """Count the columns of states (vertices, d) that are not constant."""
    return int(states.any(0).logical_and(~states.all(0)).sum())


def star_boundaries(model: nn.Module, vertices: Tensor) -> list[tuple[int, float]]:
    """Trace exactly the segments of each star, from x - r v to x + r v.

    Parameters
    ----------
    model : torch.nn.Module
        Piecewise affine.
    vertices : tensor of shape (n, 2, p, *input)

    Returns
    -------
    list of tuple
        For each star, the number of boundaries of linear regions and the distance from x to the
        nearest one, which is infinite if there is none.

    Raises
    ------
    nlbench.Undefined
        If the network is not piecewise affine.
    """
    traces = trace_segments(model, *vertices.transpose(0, 1).flatten(1, 2))
    return [_boundaries(itertools.islice(traces, vertices.shape[2])) for _ in range(len(vertices))]


def _boundaries(star: Iterable[SegmentTrace]) -> tuple[int, float]:
    count = 0
    nearest = math.inf
    for trace in star:
        count += trace.crossings
        distances = (trace.t[1:-1] - 0.5).abs() * trace.length
        if len(distances):
            nearest = min(nearest, float(distances.min()))
    return count, nearest


class LocalComplexity(SampleMeasure):
    r"""Number of units whose state changes within a small distance of a sample.

    ``error`` is the standard error over samples. For the first ``local-complexity.traced``
    samples the same stars are traced exactly: ``boundaries`` is the mean number of boundaries of
    linear regions on a star's segments, ``near`` the fraction of samples that have any, and
    ``nearest`` the mean distance from these samples to their nearest boundary.

    Definition
    ----------
    .. math::

        E_x \, \#\{u : \text{sign } z_u \text{ is not the same at all } x \pm r v_1, \dots,
        x \pm r v_p\}

    where :math:`z_u` is the input of unit u and :math:`v` a sample's orthonormal frame.

    Units
    -----
    Number of the network's units; ``nearest`` in units of the input.

    Undefined
    ---------
    Networks without activations; inputs that are not floating-point. Exact counts are omitted for
    networks that are not piecewise affine or have too many boundaries.

    Cost
    ----
    2 p forward passes for each sample, plus the exact traces of p short segments for each traced
    sample.

    Limits
    ------
    It depends on the radius, and grows with the number of units. A unit that changes its state and
    changes back between two vertices is missed; the exact count includes it.

    Published code
    --------------
    As in nlbench, its frames have fewer vectors than inputs. It counts units for each layer;
    nlbench sums the counts.
    """

    name: ClassVar[str] = "local-complexity"
    version: ClassVar[str] = "2"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    options: ClassVar[Mapping[str, Option]] = {
        "radius": Option(
            0.1,
            "distance of the vertices, in units of the input",
            minimum=0,
            maximum=1e9,
            above_minimum=True,
        ),
        "directions": Option(8, "vectors in each sample's frame", minimum=1, maximum=10_000),
        "samples": Option(64, "samples around which units are counted", minimum=1, maximum=1e9),
        "traced": Option(8, "samples whose star is traced exactly", minimum=0, maximum=1e9),
        "budget": Option(
            400,
            "estimated boundaries on the first segment above which no star is traced",
            minimum=0,
            maximum=1e12,
        ),
        "seed": Option(0, "seed for the frames", minimum=0, maximum=2**63 - 1),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches",)
    source: ClassVar[Source] = Source(
        'A. I. Humayun, R. Balestriero, R. Baraniuk, "Deep Networks Always Grok and Here is Why", '
        "ICML 2024",
        "section 3, local complexity; exact boundaries as in Patel & Montúfar 2025",
        bibtex("humayun2024deep"),
    )

    def reset(self) -> None:
        """Discard all samples."""
        super().reset()
        self._remaining = int(self.settings["samples"])
        # Number of boundaries of each traced star, and the distance to the nearest one.
        self._stars: list[tuple[int, float]] = []
        self._untraced_reason = ""
        self._unseen: dict[str, None] = {}  # activations whose units are not counted
        self._generator = torch.Generator().manual_seed(int(self.settings["seed"]))

    def update(self, observation: FunctionBatch) -> None:
        """Count the units around the samples of one batch."""
        inputs = observation.inputs[: self._remaining]
        sources = observation.sources
        if len(inputs):
            sources = sources and sources.select_rows(torch.arange(len(inputs)))
            super().update(replace(observation, inputs=inputs, sources=sources))
            self._remaining -= len(inputs)

    def terms(self, observation: FunctionBatch) -> tuple[Tensor, ...]:
        """Count the units around samples, and the boundaries around the first of them."""
        inputs = observation.inputs
        model = observation.model
        directions = min(int(self.settings["directions"]), inputs[0].numel())
        radius = float(self.settings["radius"])
        vertices = stars(inputs, directions, radius, self._generator)
        counts = changed_units(model, vertices, self._unseen.setdefault)
        first = int(self.settings["samples"]) - self._remaining
        traced = vertices[: max(int(self.settings["traced"]) - first, 0)]
        if len(traced) and not self._untraced_reason:
            try:
                if not first:
                    self._check_cost(model, traced[0])
                self._stars += star_boundaries(model, traced)
            except Undefined as error:
                self._untraced_reason = str(error)
        return (counts,)

    def _check_cost(self, model: nn.Module, star: Tensor) -> None:
        """Raise `Undefined` if a star's first segment is estimated to exceed the budget."""
        estimate = estimate_segment(model, *star[:, 0], evaluations=COST_PROBE_EVALUATIONS)
        if (estimate.crossings or 0.0) > float(self.settings["budget"]):
            raise Undefined(
                f"about {estimate.crossings:,.0f} per segment, more than local-complexity.budget"
            )

    def compute(self) -> Result:
        """Return the mean over samples."""
        result = super().compute()
        summary = dict(result.summary)
        if self._stars:
            nearest = [distance for _, distance in self._stars if math.isfinite(distance)]
            summary["boundaries"] = statistics.fmean(count for count, _ in self._stars)
            summary["near"] = len(nearest) / len(self._stars)
            if nearest:
                summary["nearest"] = statistics.fmean(nearest)
        remarks = []
        if self._unseen:
            remarks.append(f"activations not captured: {', '.join(list(self._unseen)[:6])}")
        if self._untraced_reason:
            remarks.append(f"no exact boundaries: {self._untraced_reason}")
        return replace(result, summary=summary, reason="; ".join(remarks))
