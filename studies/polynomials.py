"""Affinity of powers of increasing order."""

from __future__ import annotations

import math

import pandas as pd

from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import draw_theory
from .framework.verdicts import falls, within
from .shared.single_functions import correlation_score, one_batch, summary_values
from .shared.site_scores import AFFINITY

PUBLISHED = {1: 1.00, 3: 0.71, 5: 0.58, 7: 0.50, 11: 0.40, 41: 0.20}
POINTS = 1000
ROUNDING = 0.005 + 1e-9


def closed_form(order: int) -> float:
    """Compute the affinity of x^k on the uniform distribution on [-1, 1] for odd k.

    In this case var(x) = 1/3, var(x^k) = 1/(2k + 1) and cov(x, x^k) = 1/(k + 2).

    Examples
    --------
    >>> round(closed_form(3), 4)
    0.7111
    """
    return correlation_score(math.sqrt(3 * (2 * order + 1)) / (order + 2))


class Polynomials(Study):
    """Affinity of x, x³, x⁵, … at evenly spaced points in [-1, 1]."""

    question = "Does the affinity score fall as the order of a power rises?"
    source = AFFINITY
    needs = "nothing"
    minutes = quick_minutes = 0.1

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of odd powers up to 41, or in quick studies of published ones."""
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

    def analyse(self, runs: Runs) -> Findings:
        """Compare the score of each order with the slides and with the closed form."""
        table = summary_values(runs["run"])
        table["order"] = table.function.str.removeprefix("power-").astype(int)
        table = table.sort_values("order")
        scores = dict(zip(table.order, table.value, strict=True))
        verdicts = [
            Verdict(
                f"x^{order} on {POINTS:,} even points of [-1, 1]",
                f"{published:.2f}",
                f"{scores[order]:.4f}",
                within(scores[order], published, ROUNDING),
                f"closed form {closed_form(order):.4f}; agrees if it rounds to the published score",
            )
            for order, published in PUBLISHED.items()
        ]
        steps = table.value.diff().dropna()
        verdicts.append(
            Verdict(
                "The score falls from each order to the next",
                "falls",
                f"{(steps < 0).sum()} of {len(steps)} steps down",
                falls(table.value),
                "the points are fixed, so there is no sampling error",
            )
        )
        shown = pd.DataFrame(
            {
                "order": table.order,
                "published": [PUBLISHED.get(order, "") for order in table.order],
                "here": table.value,
                "closed form": [closed_form(order) for order in table.order],
            }
        )
        orders = range(1, 42, 2)
        theory = (orders, [closed_form(k) for k in orders])
        published_points = (list(PUBLISHED), list(PUBLISHED.values()))
        figure, axes = draw_theory(theory, (table.order, table.value), published_points)
        axes.set_xlabel("order k")
        axes.legend()
        return Findings(verdicts, {"Affinity of powers": shown}, {"Affinity of x^k": figure})
