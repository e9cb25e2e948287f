"""Closed, open and random paths: comparisons of networks along each kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pandas as pd

from nlbench.reports.agreement import Correlation

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS
from .framework.verdicts import share_above, share_below
from .shared.linear_regions import (
    MEASURES,
    SOURCE,
    distribution_figure,
    measure_paths,
    path_values,
    share_of_paths,
    size_remark,
    sorted_settings,
    trained_networks,
    unfitted_remarks,
)

KINDS = {
    "closed": "closed paths of translated images",
    "open": "open paths through augmented images",
    "random": "closed paths through noise",
}
NOISE_LEVEL = 0.4
SEPARATING_SHARE = 0.9


class Paths(Study):
    """Clean versus wrong labels along closed, open and random paths."""

    question = "Does it matter along which paths networks are compared?"
    source = SOURCE
    needs = "trains 6 networks, shared with other studies"
    minutes, quick_minutes = 3.5, 0.5
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure networks trained on clean and on wrong labels along three kinds of paths."""
        networks = trained_networks(context, (NOISE_LEVEL,), augmented=False)
        return {kind: measure_paths(context, kind, networks) for kind in KINDS}

    def analyse(self, runs: Runs) -> Findings:
        """Compare networks of one seed path by path, for each kind."""
        values = {
            (kind, name): path_values(run, name) for kind, run in runs.items() for name in MEASURES
        }
        spreads = {key: _relative_spread(table) for key, table in values.items()}
        rows, verdicts = [], []
        for (kind, name), table in values.items():
            share = share_of_paths(table, f"noise {NOISE_LEVEL:g}", "clean")
            interval = (share.value, share.low, share.high)
            rows.append((KINDS[kind], name, *interval, share.groups, spreads[kind, name]))
            if name == "absdev" or kind != "random":
                verdicts.append(_separates(kind, name, share))
        ours = "; ".join(
            f"{n}: {spreads['random', n]:.0%} against {spreads['closed', n]:.0%} on closed"
            for n in MEASURES
        )
        verdicts.append(
            Verdict(
                "Far from the data both measures are almost equal on all paths",
                "almost uniform",
                ours,
                all(spreads["random", name] < spreads["closed", name] / 2 for name in MEASURES),
                "read as: nearly the same value on every path. Standard deviation over paths "
                "divided by the mean, averaged over networks; agrees if it is less than half of "
                "that on closed paths",
            )
        )
        above = f"share with noise {NOISE_LEVEL:g} above clean"
        columns = [
            "paths",
            "measure",
            above,
            "low",
            "high",
            "pairs of networks",
            "spread over paths",
        ]
        table = pd.DataFrame(rows, columns=columns)
        return Findings(
            verdicts,
            {"Networks of one seed, path by path": table},
            {
                f"Distribution over paths: {title}": distribution_figure(
                    {name: values[kind, name] for name in MEASURES}, _curves
                )
                for kind, title in KINDS.items()
            },
            [size_remark(values["closed", "absdev"]), *unfitted_remarks(runs["closed"])],
        )


def _relative_spread(values: pd.DataFrame) -> float:
    """Return std / mean over paths, averaged over trained networks."""
    trained = values[values.setting != "initialised"]
    by_network = trained.groupby(["setting", "seed"]).value
    return float(by_network.agg(lambda paths: paths.std(ddof=0) / paths.mean()).mean())


def _separates(kind: str, measure: str, share: Correlation) -> Verdict:
    is_deviation = measure == "absdev"
    return Verdict(
        f"{'Deviation' if is_deviation else 'Density'} separates clean from wrong labels on "
        f"{KINDS[kind]}",
        "yes" if is_deviation else "hardly, near training data",
        f"{share.text}, {share.groups} pairs of networks",
        (share_above if is_deviation else share_below)(share, SEPARATING_SHARE),
        f"share of paths on which {NOISE_LEVEL:.0%} wrong labels give the larger value, Wilson's "
        f"95 % interval over pairs of networks; separated if it is at least {SEPARATING_SHARE}",
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
