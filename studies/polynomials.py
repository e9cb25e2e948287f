"""Powers of a number, of rising order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.request import Request

from .drawing import page_figure
from .single_functions import correlation_score, one_batch, values
from .site_scores import AFFINITY
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Polynomials"]


PUBLISHED = {1: 1.00, 3: 0.71, 5: 0.58, 7: 0.50, 11: 0.40, 41: 0.20}
POINTS = 1000


def in_theory(order: int) -> float:
    """Affinity of x^k on the uniform distribution of [-1, 1], k odd.

    There var(x) = 1/3, var(x^k) = 1/(2k + 1) and cov(x, x^k) = 1/(k + 2).

    Examples
    --------
    >>> round(in_theory(3), 4)
    0.7111
    """
    return correlation_score(math.sqrt(3 * (2 * order + 1)) / (order + 2))


class Polynomials(Study):
    """Affinity of x, x³, x⁵, … on even points of [-1, 1]."""

    question = "Does the affinity score fall as the order of a power rises?"
    source = AFFINITY
    needs = "nothing"
    minutes = quick_minutes = 0.1

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of the powers of odd order up to 41; the published ones if quick."""
        orders = PUBLISHED if context.quick else range(1, 42, 2)
        request = Request(
            ("affinity",),
            tuple(f"functions/power-{order}" for order in orders),
            ("interval/-1:1",),
            ("init",),
            samples=0,
            settings=one_batch(POINTS) | {"interval.count": POINTS},
            precision="float64",
        )
        return {"run": context.run(request)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Each order's score beside the slides' and the closed form."""
        found = values(runs["run"])
        found["order"] = found.function.str.removeprefix("power-").astype(int)
        found = found.sort_values("order")
        scores = dict(zip(found.order, found.value, strict=True))
        verdicts = [
            Verdict(
                f"x^{order} on {POINTS:,} even points of [-1, 1]",
                f"{published:.2f}",
                f"{scores[order]:.4f}",
                bool(abs(scores[order] - published) <= 0.005 + 1e-9),
                f"closed form {in_theory(order):.4f}; agrees if it rounds to what was published",
            )
            for order, published in PUBLISHED.items()
        ]
        steps = found.value.diff().dropna()
        verdicts.append(
            Verdict(
                "The score falls from each order to the next",
                "falls",
                f"{(steps < 0).sum()} of {len(steps)} steps down",
                bool((steps < 0).all()),
                "the points are fixed: nothing is drawn",
            )
        )
        table = pd.DataFrame(
            {
                "order": found.order,
                "published": [PUBLISHED.get(order, "") for order in found.order],
                "here": found.value,
                "closed form": [in_theory(order) for order in found.order],
            }
        )
        figure = _figure(table)
        return Findings(verdicts, {"Affinity of powers": table}, {"Affinity of x^k": figure})


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.7)
    orders = range(1, 42, 2)
    axes.plot(orders, [in_theory(k) for k in orders], color="0.6", label="closed form")
    axes.plot(table.order, table.here, "o", color="C0", label="here")
    axes.plot([*PUBLISHED], [*PUBLISHED.values()], "x", color="C1", ms=9, label="published")
    axes.set_xlabel("order k")
    axes.set_ylabel("affinity")
    axes.set_ylim(0, 1.05)
    axes.legend()
    return figure
