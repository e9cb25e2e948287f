"""Linearising a small translation model."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .shared.linearised_networks import (
    MAX_ACCURACY_LOSS,
    MIN_LINEAR_FRACTION,
    SOURCE,
    as_trained,
    average_by_omega,
    curves_by_seed,
    epochs_remark,
    floor_text,
    linear_floor,
    linearise,
    measure_networks,
    network_table,
    paths_shrink,
    stays_accurate,
)

MODEL = "transformer-tiny"
DATA = "number-words"
# Above the largest penalty all units are linear.
OMEGAS = (0.00001, 0.00003, 0.0001)
QUICK_OMEGAS = (0.01,)


class TranslationStudy(Study):
    """Accuracy of a small Transformer that translates number words, as units are linearised."""

    question = "How much of a translation model can be linearised?"
    source = SOURCE
    needs = "trains 5 small Transformers, linearises 20; the extra nlbench[translation]"
    minutes = 10.0
    quick_minutes = 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure a Transformer as trained and linearised under several penalties."""
        weights = []
        # Enough sentences to learn to translate. Quick studies use fewer and shorter ones, since
        # they spend most of their time on the final translation.
        options = {"train": 2000, "test": 256}
        if context.quick:
            options = {"train": 1500, "test": 64, "largest": 9999}
        for seed in context.seeds_or(5):
            short: dict[str, Any] = (
                {"name": "quick", "epochs": 3, "warmup_steps": 20} if context.quick else {}
            )
            start = context.request_training(MODEL, DATA, "auto", seed, options=options, **short)
            weights.append(start)
            fields: dict[str, Any] = {"data": DATA, "weights": str(start), "options": options}
            weights += [
                linearise(context, MODEL, "post-training", omega, seed, **fields)
                for omega in (QUICK_OMEGAS if context.quick else OMEGAS)
            ]
            weights.append(linear_floor(context, MODEL, seed, **fields))
        settings = {f"{DATA}.{name}": value for name, value in options.items()}
        return {"run": measure_networks(context, {MODEL: weights}, DATA, settings)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare accuracy and path length between penalties."""
        table = network_table(runs["run"]).sort_values(["omega", "seed"], ignore_index=True)
        whole = as_trained(table)
        means = average_by_omega(table)
        verdicts = [
            Verdict(
                "Many units of a translation model can be made linear while it stays accurate",
                "as in image classification",
                "; ".join(
                    f"ω = {omega:g}: {row['linear-units']:.0%} linear, {row.accuracy:.1%}"
                    for omega, row in means.iterrows()
                )
                + f"; {floor_text(table)}",
                stays_accurate(table),
                f"accuracy per token, {whole.accuracy:.1%} as trained; agrees if "
                f"{MIN_LINEAR_FRACTION:.0%} linear cost no more than {100 * MAX_ACCURACY_LOSS:g} "
                "points and linear units alone cost more, by 95% t intervals over networks",
            ),
            paths_shrink(table, "mean over seeds"),
        ]
        return Findings(
            verdicts,
            {"Networks": table},
            {"Accuracy vs. the fraction of linear units": _figure(table)},
            [
                f"Small-scale: {MODEL} on {DATA}, seeds: {table.seed.nunique()}. The paper uses a "
                "Transformer of base size on WMT14, and BLEU.",
                "Only the ReLUs in the feed-forward layers are linearised; attention is unchanged.",
                epochs_remark(table),
            ],
        )


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.9)
    for seed, curve in curves_by_seed(table).items():
        rows = curve.sort_values("linear-units")
        axes.plot(100 * rows["linear-units"], 100 * rows.accuracy, "o-", label=f"seed {seed}")
    floors = table[table["mode"] == "floor"]
    axes.plot(100 * floors["linear-units"], 100 * floors.accuracy, "kx", label="all linear")
    axes.set(xlabel="linear units, %", ylabel="accuracy per token, %")
    axes.legend(loc="lower left")
    return figure
