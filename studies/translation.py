"""Making a small translation model linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .drawing import page_figure
from .linearised_networks import (
    FEWEST_LINEAR,
    MOST_LOST,
    SOURCE,
    as_trained,
    by_omega,
    effort,
    linearised,
    measured,
    networks,
    shrinks,
    stays_accurate,
)
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Translation"]


MODEL, DATA = "transformer-tiny", "number-words"
# Above the largest of them no unit is left to be made linear.
OMEGAS, QUICK_OMEGAS = (0.00001, 0.00003, 0.0001), (0.001, 0.01)
# Enough sentences to translate others by; quick ones are fewer and shorter, since translating them
# in the end takes longest.
FULL_DATA = {"train": 2000, "test": 256}
QUICK_DATA = {"train": 1500, "test": 64, "largest": 9999}


class Translation(Study):
    """A small Transformer that translates number words, made linear step by step."""

    question = "How much of a translation model can be made linear?"
    source = SOURCE
    needs = "trains 2 small Transformers, linearises 6; the extra nlbench[translation]"
    minutes, quick_minutes = 3.5, 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """A Transformer as trained, and under several penalties."""
        weights = []
        options = QUICK_DATA if context.quick else FULL_DATA
        for seed in context.seeds_or(2):
            short: dict[str, Any] = (
                {"name": "quick", "epochs": 3, "warmup_steps": 20} if context.quick else {}
            )
            start = context.trained(MODEL, DATA, "auto", seed, options=options, **short)
            weights.append(start)
            weights += [
                linearised(
                    context,
                    MODEL,
                    "post-training",
                    omega,
                    seed,
                    data=DATA,
                    weights=str(start),
                    options=options,
                )
                for omega in (QUICK_OMEGAS if context.quick else OMEGAS)
            ]
        settings = {f"{DATA}.{name}": value for name, value in options.items()}
        return {"run": measured(context, {MODEL: weights}, DATA, settings)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """See what becomes of the accuracy as units become linear."""
        table = networks(runs["run"]).sort_values(["omega", "seed"], ignore_index=True)
        whole, means = as_trained(table), by_omega(table)
        verdicts = [
            Verdict(
                "Many units of a translation model can be made linear while it stays accurate",
                "as in image classification",
                "; ".join(
                    f"ω = {omega:g}: {one['linear-units']:.0%} linear, {one.accuracy:.1%}"
                    for omega, one in means.iterrows()
                ),
                stays_accurate(table),
                f"accuracy of single tokens, {whole.accuracy:.1%} as trained; agrees if "
                f"{FEWEST_LINEAR:.0%} linear cost no more than {100 * MOST_LOST:g} points",
            ),
            shrinks(
                table,
                [whole.pathlength, *means.pathlength],
                "mean over seeds, the trained network first",
            ),
        ]
        return Findings(
            verdicts,
            {"Networks": table},
            {"Accuracy against the share of linear units": _figure(table)},
            [
                f"Small data: {MODEL} on {DATA}, seeds: {table.seed.nunique()}. The paper takes a "
                "Transformer of base size on WMT14, and BLEU.",
                "Only the ReLUs of the feed-forward parts can be made linear; attention stays.",
                effort(table),
            ],
        )


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.9)
    for seed, one in table.groupby("seed"):
        ordered = one.sort_values("linear-units")
        axes.plot(100 * ordered["linear-units"], 100 * ordered.accuracy, "o-", label=f"seed {seed}")
    axes.set_xlabel("linear units, %")
    axes.set_ylabel("accuracy of tokens, %")
    axes.legend(loc="lower left")
    return figure
