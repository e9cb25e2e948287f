"""The integral of deviation as it is defined, and as published code takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import Measure, Result, Value
from nlbench.reports.agreement import kendall

from .drawing import COLOURS, page_figure
from .linear_regions import DATA, MODEL, SOURCE
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from nlbench.store.run_folder import Run

__all__ = ["AbsdevAsPublished", "PublishedIntegral", "integral_as_published"]


MANY = 20
"""Segments that show another order, if there is one."""


def integral_as_published(t: Tensor, values: Tensor, length: float) -> Tensor:
    r"""Integrate the distance to the chord as published code does: it is no deviation.

    On each region the distance is :math:`a + b t` with t along the whole segment; integrated is
    :math:`|a| + |b| t` in place of :math:`|a + b t|`, so that terms which cancel add up.

    Parameters
    ----------
    t : tensor of shape (n,)
        Breakpoints in [0, 1], both ends included.
    values : tensor of shape (n, k)
        The network's outputs there.
    length : float
        Of the segment.

    Returns
    -------
    tensor of shape (k,)

    Examples
    --------
    The distance of |x| to its chord on [-1, 1] is 1 at both ends' height above 0 in the middle:
    2t up to there, 2 - 2t behind.

    >>> import torch
    >>> t, y = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[1.0], [0.0], [1.0]])
    >>> integral_as_published(t, y, length=2.0)  # as defined it is 1
    tensor([4.])
    """
    return length * _shares(t, values).sum(0)


def _shares(t: Tensor, values: Tensor) -> Tensor:
    """What each region adds (n - 1, k)."""
    chord = values[0] + t[:, None] * (values[-1] - values[0])
    distance = values - chord
    width = t.diff()[:, None]
    slope = distance.diff(dim=0) / width
    offset = distance[:-1] - slope * t[:-1, None]
    middle = (t[1:, None] + t[:-1, None]) / 2
    return width * (offset.abs() + slope.abs() * middle)


class AbsdevAsPublished(Measure):
    """What published code gives as absolute deviation; it is another number.

    Of each path: ``value``, the Euclidean norm over logits of the sums over its segments;
    ``segment0``, ``segment1``, …, the norm of each; ``shortened``, the value with the last
    region of each segment left out, as that code does.
    """

    name = "absdev-as-published"
    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "neither"
    source = Source("the published code of " + SOURCE.citation)

    def reset(self) -> None:
        """Forget all paths."""
        self._segments: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def update(self, observation: Any) -> None:
        """Add one segment to its path."""
        trace = observation.trace
        if not hasattr(trace, "values"):
            raise Undefined("it is of regions, and the segment was estimated without them")
        shares = trace.length * _shares(trace.t, trace.values).cpu()
        self._segments.setdefault(observation.place, []).append((shares.sum(0), shares[:-1].sum(0)))

    def compute(self) -> Result:
        """Give both sums of each path."""
        values = []
        for place, segments in self._segments.items():
            whole, short = (sum(parts) for parts in zip(*segments, strict=True))
            numbers = {"value": float(whole.norm()), "shortened": float(short.norm())}
            parts = {"segment": tuple(float(one.norm()) for one, _ in segments)}
            values.append(Value(place, numbers, len(segments), parts=parts))
        return Result.of(values, n=sum(value.n for value in values))


class PublishedIntegral(Study):
    """Absolute deviation as defined against the integral that published code takes."""

    question = "How far is the deviation of published code from its definition?"
    source = SOURCE
    needs = f"{DATA}, the {MODEL} that ships"
    minutes, quick_minutes = 1.3, 0.3

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Both integrals along the same segments, on exact traces."""
        from nlbench.subjects.load import SubjectSpec, model_source

        source = model_source(SubjectSpec(MODEL, "trained", DATA, 0, split="train"))
        number = 2 if context.quick else 4
        sample = source.dataset.sample(number, split="train", seed=0)
        inputs = source.dataset.normalize(sample.images)
        run = context.evaluated(
            source.build()[0],
            inputs,
            ["absdev", AbsdevAsPublished],
            "quick" if context.quick else "run",
            settings={
                "lines.paths": "closed",
                "lines.number": number,
                # Shorter segments cross fewer regions, of which each has to be found.
                "lines.anchors": 4 if context.quick else 8,
                "lines.radius": 1.0 if context.quick else 4.0,
                "lines.method": "exact",
            },
            name=MODEL,
        )
        return {"run": run}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare both, segment by segment."""
        exact, wrong = (runs["run"][name] for name in ("absdev", AbsdevAsPublished.name))
        rows = [
            (value.place, number, right, other, other / right if right else math.nan)
            for value, twin in zip(exact.values, wrong.values, strict=True)
            for number, (right, other) in enumerate(
                zip(_segments(value), _segments(twin), strict=True)
            )
        ]
        table = pd.DataFrame(
            rows, columns=["path", "segment", "as defined", "as published", "ratio"]
        )
        ratio, order = table.ratio, kendall(table["as defined"], table["as published"])
        lost = [
            1 - value.statistics["shortened"] / value.statistics["value"] for value in wrong.values
        ]
        size = f"{len(table)} segments"
        verdicts = [
            Verdict(
                "Published code gives several times the deviation that is defined",
                "4.5 to 9 times, on VGG8",
                f"{ratio.min():.1f} to {ratio.max():.1f} times, {ratio.mean():.1f} on average, "
                f"{size}",
                bool(ratio.mean() > 2),
                "both integrals on the same exact traces, in closed form; the definition's is "
                "checked against quadrature in the suite; agrees where the mean ratio is above 2",
            ),
            Verdict(
                "It ranks segments in another order",
                "another ranking",
                f"Kendall's τ = {order.text}, {size}",
                True if order.value < 1 else None if len(table) < MANY else False,
                "1 would be the same order; a few segments can't tell",
            ),
            Verdict(
                "Leaving out the last region of a segment, as it also does, hardly matters",
                "",
                f"{100 * float(np.mean(lost)):.3f} % less",
                bool(np.mean(lost) < 0.01),
                "agrees below 1 %",
            ),
        ]
        return Findings(
            verdicts,
            {"Segment by segment": table},
            {"Deviation of each segment, as defined and as published": _figure(table)},
            [
                "The published integral is computed here for this comparison alone; the measure "
                "absdev is the one that is defined.",
                f"{len(exact.values)} closed paths through digits.",
            ],
        )


def _segments(path: Value) -> Sequence[float]:
    """What each segment of a path comes to."""
    segments = path.parts["segment"]
    assert not isinstance(segments, Mapping)
    return segments


def _figure(table: pd.DataFrame) -> Figure:
    import matplotlib.style

    from nlbench.reports.svg import STYLE

    with matplotlib.style.context(["default", STYLE]):
        figure, axes = page_figure(3.0)
        most = float(table["as defined"].max()) * 1.05
        axes.plot(table["as defined"], table["as published"], "o", color=COLOURS[0], markersize=4)
        for factor, dashes in ((1, "-"), (4, "--"), (9, ":")):
            axes.plot(
                [0, most], [0, factor * most], dashes, color="#777777", label=f"{factor} times"
            )
        axes.set_xlabel("absolute deviation as defined")
        axes.set_ylabel("as published")
        axes.set_xlim(0, most)
        axes.set_ylim(0)
        axes.legend()
        figure.draw_without_rendering()  # lays out, once, while the style is in force
        figure.set_layout_engine("none")
    return figure
