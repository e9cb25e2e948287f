"""A trained network's signature at several batch sizes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import ordered, within
from .shared.site_scores import AFFINITY, site_scores
from .shared.small_networks import trained_vgg8

MIN_CORRELATION = 0.99


class BatchSize(Study):
    """Signature of a trained vgg8 at several batch sizes."""

    question = "Does a network's signature depend on the batch size?"
    source = AFFINITY
    needs = "digits"
    minutes = 0.3
    quick_minutes = 0.1
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of the same samples, cut into batches of several sizes."""
        data, weights = trained_vgg8(context)
        sizes = (128, 512) if context.quick else (128, 256, 512, 1024)
        runs = {}
        for size in sizes:
            request = Request(
                ("affinity",),
                ("vgg8",),
                (data,),
                (weights,),
                context.seeds_or(3),
                samples=sizes[-1],
                split="train",
                settings={"sites.batch": size},
            )
            runs[str(size)] = context.run(request, f"batch-{size}")
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Compare the shape and the level of the signature between batch sizes."""
        scores = _join_batch_sizes(runs)
        sites = scores.place.unique()
        table = scores.pivot_table("value", "place", "batch").loc[sites]
        smallest, largest = table.columns.min(), table.columns.max()
        shift = table[largest] - table[smallest]
        deviations = _join_batch_sizes(runs, "std")
        noise = deviations[deviations.batch == smallest].groupby("place").value.mean().loc[sites]
        correlation = np.corrcoef(table.T.to_numpy()).min()
        farthest = str(shift.abs().idxmax())
        spread = table[smallest].max() - table[smallest].min()
        verdicts = [
            Verdict(
                "The signature has the same shape at all batch sizes",
                "stable",
                f"minimum correlation {correlation:.4f}",
                ordered(MIN_CORRELATION, correlation),
                f"over {len(sites)} sites, between any two of {len(table.columns)} batch "
                f"sizes; agrees if above {MIN_CORRELATION}",
            ),
            Verdict(
                "The score of each site is the same at all batch sizes",
                "stable",
                f"{smallest} to {largest}: {shift.min():+.3f} to {shift.max():+.3f}; at "
                f"{farthest} {shift[farthest]:+.3f} ± {noise[farthest]:.3f} over batches",
                within(shift, 0, noise),
                "agrees if no site changes by more than the standard deviation over batches of "
                f"{smallest}, the paper's own measure of noise; sites differ by {spread:.2f}",
            ),
        ]
        shown = table.rename(columns=lambda size: f"batch {size}").reset_index()
        shown[f"std over batches of {smallest}"] = noise.to_numpy()
        return Findings(
            verdicts,
            {"Affinity by site and batch size": shown},
            {"Signature by batch size": _figure(table, noise)},
            [
                "The paper: VGG16 on CIFAR-10, batches of 128 to 1,024. Here: vgg8, the same "
                f"{largest:,} training samples cut into batches; draws: {scores.draw.nunique()}."
            ],
        )


def _join_batch_sizes(runs: Runs, statistic: str = "value") -> pd.DataFrame:
    tables = [
        site_scores(run, statistic=statistic).assign(batch=int(size)) for size, run in runs.items()
    ]
    return pd.concat(tables)


def _figure(table: pd.DataFrame, noise: pd.Series) -> Figure:
    figure, axes = page_figure(2.7)
    places = np.arange(len(table))
    low, high = table.iloc[:, 0] - noise, table.iloc[:, 0] + noise
    label = f"± std over batches of {table.columns[0]}"
    axes.fill_between(places, low, high, color="0.9", label=label)
    for size in table.columns:
        axes.plot(places, table[size], "o-", ms=4, lw=1, label=f"batch {size}")
    axes.set_xticks(places, table.index, fontsize=7)
    axes.set(ylabel="affinity", ylim=(0, 1.05))
    axes.legend(ncols=3)
    return figure
