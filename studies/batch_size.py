"""Signatures of trained networks at several batch sizes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import mean_above, mean_below, range_text
from .shared.site_scores import AFFINITY, site_scores
from .shared.small_networks import DATA, trained_network

MIN_CORRELATION = 0.99


class BatchSize(Study):
    """Signatures of trained VGG8s at several batch sizes."""

    question = "Does a network's signature depend on the batch size?"
    source = AFFINITY
    needs = "digits; trains 3 networks, shared with other studies of signatures"
    minutes = 2.0
    quick_minutes = 0.1
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of the same samples, cut into batches of several sizes."""
        data = context.data or DATA
        weights: tuple[str, ...] = ("trained",)
        if not context.quick or data != DATA or context.seeds:
            seeds = context.seeds_or(3)
            weights = tuple(str(trained_network(context, "vgg8", seed, data)) for seed in seeds)
        sizes = (128, 512) if context.quick else (128, 256, 512, 1024)
        runs = {}
        for size in sizes:
            request = Request(
                ("affinity",),
                ("vgg8",),
                (data,),
                weights,
                samples=sizes[-1],
                split="train",
                settings={"sites.batch": size},
            )
            runs[str(size)] = context.run(request, f"batch-{size}")
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Compare the shape and the level of each signature between batch sizes."""
        scores = _join_batch_sizes(runs)
        sites = scores.place.unique()
        sizes = sorted(scores.batch.unique())
        by_network = scores.pivot_table("value", ["weights", "place"], "batch")
        deviations = _join_batch_sizes(runs, "std")
        noises = deviations[deviations.batch == sizes[0]].set_index(["weights", "place"]).value
        shifts = (by_network[sizes[-1]] - by_network[sizes[0]]).abs()
        correlations = by_network.groupby("weights").apply(
            lambda table: np.corrcoef(table.T.to_numpy()).min()
        )
        excess = (shifts - noises).groupby("weights").max()
        table = by_network.groupby("place").mean().loc[sites]
        noise = noises.groupby("place").mean().loc[sites]
        spread = table[sizes[0]].max() - table[sizes[0]].min()
        verdicts = [
            Verdict(
                "The signature has the same shape at all batch sizes",
                "stable",
                f"minimum correlation {range_text(correlations, '.4f')}",
                mean_above(correlations, MIN_CORRELATION),
                f"over {len(sites)} sites, between any two of {len(sizes)} batch sizes; agrees if "
                f"above {MIN_CORRELATION}, by a 95% t interval over networks",
            ),
            Verdict(
                "The score of each site is the same at all batch sizes",
                "stable",
                f"{sizes[0]} to {sizes[-1]}: largest change "
                f"{range_text(shifts.groupby('weights').max(), '.3f')}; batches differ there by "
                f"{range_text(noises[shifts.groupby('weights').idxmax()], '.3f')}",
                mean_below(excess),
                "agrees if no site changes by more than the standard deviation over batches of "
                f"{sizes[0]}, the paper's own measure of noise: the largest excess, with its 95% t "
                f"interval over networks; sites differ by {spread:.2f}",
            ),
        ]
        shown = table.rename(columns=lambda size: f"batch {size}").reset_index()
        shown[f"std over batches of {sizes[0]}"] = noise.to_numpy()
        return Findings(
            verdicts,
            {"Affinity by site and batch size": shown},
            {"Signature by batch size": _figure(table, noise)},
            [
                "The paper: VGG16 on CIFAR-10, batches of 128 to 1,024. Here: vgg8, the same "
                f"{sizes[-1]:,} training samples cut into batches; networks: {len(excess)}."
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
