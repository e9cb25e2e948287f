"""Comparisons of networks along closed, open and random paths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS
from .framework.verdicts import in_most_networks, mean_below
from .shared.linear_regions import (
    MEASURES,
    SOURCE,
    PathComparison,
    compare_paths,
    distribution_figure,
    measure_paths,
    path_remarks,
    path_values,
    sorted_settings,
    trained_networks,
)

KINDS = {
    "closed": "closed paths of translated images",
    "open": "open paths through augmented images",
    "random": "closed paths through noise",
}
NOISE_LEVEL = 0.4
SEPARATING_FRACTION = 0.9


class Paths(Study):
    """Comparison of networks trained on clean and on wrong labels along several kinds of paths."""

    question = "Does it matter which paths networks are compared on?"
    source = SOURCE
    needs = "trains 12 networks, shared with other studies"
    minutes = 7.0
    quick_minutes = 0.2
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure networks trained on clean and on wrong labels along each kind of path."""
        networks = trained_networks(context, (NOISE_LEVEL,), augmented=False)
        return {kind: measure_paths(context, kind, networks) for kind in KINDS}

    def analyse(self, runs: Runs) -> Findings:
        """Compare networks with the same seed, path by path, for each kind of path."""
        values = {
            (kind, name): path_values(run, name) for kind, run in runs.items() for name in MEASURES
        }
        spreads = {key: _relative_spreads(table) for key, table in values.items()}
        rows = []
        verdicts = []
        for (kind, name), table in values.items():
            comparison = compare_paths(table, f"noise {NOISE_LEVEL:g}", "clean")
            spread = spreads[kind, name].mean()
            rows.append(
                (KINDS[kind], name, comparison.fractions.mean(), comparison.networks, spread)
            )
            if name == "absdev" or kind != "random":
                verdicts.append(_separates(kind, name, comparison))
        higher = f"share with noise {NOISE_LEVEL:g} above clean"
        columns = ["paths", "measure", higher, "pairs of networks", "spread over paths"]
        table = pd.DataFrame(rows, columns=columns)
        figures = {}
        for kind, title in KINDS.items():
            by_measure = {name: values[kind, name] for name in MEASURES}
            figures[f"Distribution over paths: {title}"] = distribution_figure(by_measure, _curves)
        return Findings(
            [*verdicts, _is_uniform(spreads)],
            {"Networks with the same seed, path by path": table},
            figures,
            path_remarks(runs["closed"]),
        )


def _relative_spreads(values: pd.DataFrame) -> pd.Series[float]:
    """Return the standard deviation over paths divided by the mean, for each trained network."""
    trained = values[values.setting != "initialised"]
    by_network = trained.groupby(["setting", "seed"]).value
    return by_network.agg(lambda paths: paths.std(ddof=0) / paths.mean())


def _is_uniform(spreads: Mapping[tuple[str, str], pd.Series[float]]) -> Verdict:
    ratios = pd.concat(
        [spreads["random", name] / spreads["closed", name] for name in MEASURES], axis=1
    )
    ours = (
        f"{name}: {spreads['random', name].mean():.0%} vs. "
        f"{spreads['closed', name].mean():.0%} on closed paths"
        for name in MEASURES
    )
    return Verdict(
        "Far from the data both measures are almost equal on all paths",
        "almost uniform",
        "; ".join(ours),
        mean_below(ratios.max(axis=1), 0.5),
        "taken to mean that each measure is nearly constant across paths: agrees if the standard "
        "deviation over paths divided by the mean is less than half of that on closed paths for "
        "the less constant measure, by the 95% t interval over networks",
    )


def _separates(kind: str, measure: str, comparison: PathComparison) -> Verdict:
    is_deviation = measure == "absdev"
    separates = comparison.fractions >= SEPARATING_FRACTION
    holds = separates if is_deviation else ~separates
    return Verdict(
        f"{'Deviation' if is_deviation else 'Density hardly'} separates clean from wrong labels "
        f"on {KINDS[kind]}",
        "yes" if is_deviation else "near training data",
        f"{comparison.text}, separated in {int(separates.sum())} of {comparison.networks} pairs",
        in_most_networks(holds, comparison.networks),
        f"fraction of paths on which {NOISE_LEVEL:.0%} wrong labels give the larger value; a pair "
        f"of networks is separated if it is at least {SEPARATING_FRACTION}; agrees if so in most "
        "pairs, by a sign test",
    )


def _curves(table: pd.DataFrame) -> Iterator[tuple[pd.Series, dict[str, Any]]]:
    names = [name for name in sorted_settings(table.setting) if name != "initialised"]
    for number, name in enumerate(names):
        networks = table[table.setting == name].groupby("seed", sort=False).value
        for (seed, values), dashes in zip(
            networks, itertools.cycle(["-", "--", ":"]), strict=False
        ):
            style = {"color": COLOURS[number], "linestyle": dashes}
            yield values, {**style, "label": f"{name}, seed {seed}"}
