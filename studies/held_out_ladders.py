"""The recommendations of the benchmark of measures, tested on ladders drawn after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from nlbench.citation import Source
from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.verdicts import in_most_networks
from .measures import applicable, build_requests
from .networks.held_out import SECOND, SEEDS, draw
from .shared.ladder_cells import PARAMETERS, read_cells, read_descriptions
from .shared.ladder_tables import order_table
from .shared.ladders import HELD_OUT
from .shared.orders import SEEN, Order, orders_by_measure

MEASURES = (
    "affinity", "r2", "cka", "linearity", "elementwise-residual", "nlc", "affine-residual",
    "geometric-complexity", "absdev", "pieces", "local-linearity", "rugosity",
)  # fmt: skip
PAIRS = 8
QUICK_PAIRS = 2
"""Pairs of samples that paths join."""
RECOMMENDED = {
    "activations": ("r2", "linearity", "cka", "affinity", "elementwise-residual"),
    "function": ("nlc", "rugosity", "absdev", "pieces"),
    "network": ("local-linearity", "pieces", "absdev chord", "absdev range"),
}
"""Measures that docs/benchmark.md recommended for order before the second draw, by question.

`affine-residual` is not among them, since it certifies their order.
"""


class HeldOutLadders(Study):
    """Recommended measures on ladders that seeds drew after the recommendations."""

    question = "Do the recommendations of the benchmark hold on ladders that were drawn after them?"
    source = Source("", "ours; see docs/benchmark.md")
    needs = "nothing"
    minutes = 5.0
    quick_minutes = 0.1
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Runs:
        """Measure every rung of every ladder, one run per ladder."""
        names = context.measures or MEASURES
        runs = {}
        # The quick version has the first ladder of each question.
        for name in SECOND[:3] if context.quick else HELD_OUT:
            ladder = HELD_OUT[name]
            shorter = replace(ladder, rungs=ladder.rungs[:: 2 if context.quick else 1])
            seeds = shorter.seeds[: 3 if context.quick else None]
            for fields in build_requests(context, shorter, seeds):
                lines = {"lines.number": QUICK_PAIRS if context.quick else PAIRS}
                settings = applicable({**fields["settings"], **lines}, names, ladder.data)
                request = Request(names, **{**fields, "settings": settings})
                runs[name] = context.run(request, name)
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Test the order of each measure on each ladder."""
        cells = read_cells(runs, HELD_OUT)
        cells = cells[cells.measure != PARAMETERS]
        orders = orders_by_measure(cells, read_descriptions(runs))
        rules = [(name, HELD_OUT[name].question, draw(name).text) for name in runs]
        rows: dict[str, dict[str, str]] = {}
        for (measure, name), order in orders.items():
            rows.setdefault(measure, {"measure": measure})[name] = order.word
        values = cells.pivot_table("value", ["ladder", "measure"], "rung", sort=False)
        return Findings(
            list(_verdicts(orders)),
            {
                "Ladders": pd.DataFrame(rules, columns=["ladder", "question", "drawn"]),
                "What each measure does on each ladder": pd.DataFrame(rows.values()),
                "Order: Kendall's tau by ladder": order_table(orders),
                "Value by rung: mean over seeds": values.reset_index(),
            },
            remarks=[
                "The rule is studies/networks/held_out.py, the seeds are "
                f"{' and '.join(map(str, SEEDS))}; each was written after recommendations, and no "
                "other one was tried. Verdicts are of the second draw.",
            ],
        )


def _verdicts(orders: Mapping[tuple[str, str], Order]) -> list[Verdict]:
    """Evaluate each recommended measure on the second draw's ladders of its question."""
    verdicts = []
    measured = {measure for measure, _ in orders}
    for question, measures in RECOMMENDED.items():
        for measure in measures:
            found = {
                ladder: order.word
                for (name, ladder), order in orders.items()
                if name == measure and ladder in SECOND and HELD_OUT[ladder].question == question
            }
            if measure not in measured:
                continue
            verdicts.append(
                Verdict(
                    f"{measure} sees most ladders of the question: {question}",
                    "",
                    _count_text(found),
                    in_most_networks([word in SEEN for word in found.values()], unit="ladders"),
                    "exact trend test over networks, adjusted over ladders; agrees if most ladders "
                    "are seen, by a sign test over ladders",
                )
            )
    return verdicts


def _count_text(words: Mapping[str, str]) -> str:
    """Return how many ladders are seen, and what happens on the others."""
    others = [f"{ladder}: {word}" for ladder, word in words.items() if word not in SEEN]
    return "; ".join([f"{len(words) - len(others)} of {len(words)} ladders", *others])
