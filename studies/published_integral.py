"""Absolute deviation as defined vs. the integral that the published code computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import Measure, Result, Value
from nlbench.reports.agreement import kendall

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.verdicts import ordered
from .shared.linear_regions import DATA, MODEL, SOURCE

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.probes.lines import SegmentEstimate


def integral_as_published(t: Tensor, values: Tensor, length: float) -> Tensor:
    r"""Integrate the distance to the chord as in published code, which differs from the deviation.

    On each region the distance is :math:`a + b t`, with t along the whole segment. The code
    integrates :math:`|a| + |b| t` instead of :math:`|a + b t|`, so cancelling terms add up.

    Parameters
    ----------
    t : tensor of shape (n,)
        Breakpoints in [0, 1], including both endpoints.
    values : tensor of shape (n, k)
        Outputs of the network at `t`.
    length : float
        Length of the segment.

    Examples
    --------
    The chord of |x| on [-1, 1] is 1; the distance to it is 2t up to the midpoint, then 2 - 2t.

    >>> import torch
    >>> t, y = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[1.0], [0.0], [1.0]])
    >>> integral_as_published(t, y, length=2.0)  # the definition gives 1
    tensor([4.])
    """
    return length * _region_integrals(t, values).sum(0)


def estimate_as_published(estimate: SegmentEstimate) -> tuple[Tensor, Tensor]:
    """Estimate `integral_as_published` from the values at uniform steps.

    Each step uses the mean slope of its regions, so slopes of opposite sign cancel. The error is
    first-order in the step size and is removed by Richardson extrapolation.

    Returns
    -------
    integral, error : tensors of shape (k,)
        The error is the sum of the changes made by the last two halvings of the steps: a single
        change may be small by chance.
    """
    t = estimate.t
    values = estimate.values
    fine, middle, coarse = (
        integral_as_published(t[::by], values[::by], estimate.length) for by in (1, 2, 4)
    )
    return 2 * fine - middle, (fine - middle).abs() + (middle - coarse).abs()


def _region_integrals(t: Tensor, values: Tensor) -> Tensor:
    """Return the contribution of each region, shape (n - 1, k)."""
    chord = values[0] + t[:, None] * (values[-1] - values[0])
    distance = values - chord
    width = t.diff()[:, None]
    slope = distance.diff(dim=0) / width
    offset = distance[:-1] - slope * t[:-1, None]
    middle = (t[1:, None] + t[:-1, None]) / 2
    return width * (offset.abs() + slope.abs() * middle)


class AbsdevAsPublished(Measure):
    """The integral that published code returns as absolute deviation.

    The statistics of a path are ``value``, the Euclidean norm over logits of the sums over its
    segments; ``segment0``, ``segment1``, …, the norm of each; ``shortened``, the value without
    the last region of each segment, which the code leaves out, if all segments are traced; and
    ``error``, if all are estimated.
    """

    name = "absdev-as-published"
    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "neither"
    source = Source("the published code of " + SOURCE.citation)

    def reset(self) -> None:
        """Discard all paths."""
        self._segments: dict[str, list[dict[str, Tensor]]] = {}

    def update(self, observation: Any) -> None:
        """Add one segment to its path."""
        trace = observation.trace
        if trace.method == "quadrature":
            raise Undefined("the integral needs regions, which a smooth network does not have")
        if trace.method == "refined":
            sums = dict(
                zip(("value", "numerical_error"), estimate_as_published(trace), strict=True)
            )
        else:
            integrals = trace.length * _region_integrals(trace.t, trace.values)
            sums = {"value": integrals.sum(0), "shortened": integrals[:-1].sum(0)}
        self._segments.setdefault(observation.place, []).append(
            {name: logits.cpu() for name, logits in sums.items()}
        )

    def compute(self) -> Result:
        """Compute the sums of each path."""
        import torch

        values = []
        for place, segments in self._segments.items():
            statistics = {}
            for name in segments[0]:
                known = [sums[name] for sums in segments if name in sums]
                if len(known) == len(segments):
                    statistics[name] = float(torch.stack(known).sum(0).norm())
            parts = {"segment": tuple(float(sums["value"].norm()) for sums in segments)}
            values.append(Value(place, statistics, len(segments), parts=parts))
        return Result.of(values, n=sum(value.n for value in values))


class PublishedIntegral(Study):
    """Absolute deviation as defined vs. the integral that the published code computes."""

    question = "How far is the deviation that published code computes from its definition?"
    source = SOURCE
    needs = f"{DATA}, the bundled {MODEL}"
    minutes = 1.3
    quick_minutes = 0.3

    def measure(self, context: Context) -> Runs:
        """Measure both integrals on exact traces of the same segments."""
        from nlbench.subjects.load import model_source
        from nlbench.subjects.spec import SubjectSpec

        source = model_source(SubjectSpec(MODEL, "trained", DATA, 0, split="train"))
        number = 2 if context.quick else 4
        sample = source.dataset.sample(number, split="train", seed=0)
        inputs = source.dataset.normalize(sample.images)
        run = context.evaluate(
            source.build()[0],
            inputs,
            ["absdev", AbsdevAsPublished],
            "quick" if context.quick else "run",
            settings={
                "lines.paths": "closed",
                "lines.number": number,
                # An exact trace finds every region; shorter segments cross fewer of them.
                "lines.anchors": 4 if context.quick else 8,
                "lines.radius": 1.0 if context.quick else 4.0,
                "lines.method": "exact",
            },
            name=MODEL,
        )
        return {"run": run}

    def analyse(self, runs: Runs) -> Findings:
        """Compare both integrals segment by segment."""
        defined, published = (runs["run"][name] for name in ("absdev", AbsdevAsPublished.name))
        rows = []
        for value, other in zip(defined.values, published.values, strict=True):
            pairs = zip(_segments(value), _segments(other), strict=True)
            for number, (right, wrong) in enumerate(pairs):
                quotient = wrong / right if right else math.nan
                rows.append((value.place, number, right, wrong, quotient))
        table = pd.DataFrame(
            rows, columns=["path", "segment", "as defined", "as published", "ratio"]
        )
        ratio = table.ratio
        order = kendall(table["as defined"], table["as published"])
        lost = [
            1 - path.statistics["shortened"] / path.statistics["value"] for path in published.values
        ]
        size = f"{len(table)} segments"
        mean_lost = float(np.mean(lost))
        verdicts = [
            Verdict(
                "Published code returns several times the deviation as defined",
                "",
                f"{ratio.min():.1f} to {ratio.max():.1f} times, {ratio.mean():.1f} on average, "
                f"{size}",
                ordered(2, ratio.mean()),
                "both integrals in closed form on the same exact traces; the test suite checks "
                "the one that follows the definition against quadrature; agrees if the mean ratio "
                "is above 2; no ratio has been published",
            ),
            Verdict(
                "Leaving out the last region of a segment, as it also does, hardly matters",
                "",
                f"{100 * mean_lost:.3f} % less",
                ordered(mean_lost, 0.01),
                "agrees if below 1%",
            ),
        ]
        return Findings(
            verdicts,
            {"Segment by segment": table},
            {"Deviation of each segment, as defined and as published": _figure(table)},
            [
                "The published integral is computed only for this comparison; the measure "
                "absdev follows the definition.",
                f"Kendall's τ of the two integrals over segments: {order.text}.",
                f"{len(defined.values)} closed paths through digits.",
            ],
        )


def _segments(path: Value) -> Sequence[float]:
    """Return the value of each segment of a path."""
    segments = path.parts["segment"]
    assert not isinstance(segments, Mapping)
    return segments


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(3.0)
    limit = float(table["as defined"].max()) * 1.05
    axes.plot(table["as defined"], table["as published"], "o", color=COLOURS[0], markersize=4)
    for factor, dashes in ((1, "-"), (4, "--"), (6, ":")):
        ends = ([0, limit], [0, factor * limit])
        axes.plot(*ends, dashes, color="#777777", label=f"{factor} times")
    axes.set(xlabel="absolute deviation as defined", ylabel="as published", xlim=(0, limit))
    axes.set_ylim(0)
    axes.legend()
    return figure
