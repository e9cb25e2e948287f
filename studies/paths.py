"""Closed, open and random paths: whether the kind of path decides the answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.reports.agreement import Correlation

from .drawing import COLOURS, draw_shares, page_figure
from .linear_regions import (
    AXES,
    MEASURES,
    SOURCE,
    measured,
    path_values,
    settings_in,
    share_of_paths,
    size_of,
    trained_networks,
    unfitted,
)
from .study import Context, Findings, Study, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Paths"]


KINDS = {
    "closed": "closed paths of translated images",
    "open": "open paths through augmented images",
    "random": "closed paths through noise",
}
LEVEL = 0.4
NEARLY = 0.9


class Paths(Study):
    """Clean against wrong labels along closed, open and random paths."""

    question = "Does it matter along which paths networks are compared?"
    source = SOURCE
    needs = "trains 6 networks, shared with other studies"
    minutes, quick_minutes = 3.5, 0.5
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Networks of clean and of wrong labels along three kinds of path."""
        networks = trained_networks(context, (LEVEL,), augmented=False)
        return {kind: measured(context, kind, networks) for kind in KINDS}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare path by path, for each kind, networks of one seed."""
        values = {
            (kind, name): path_values(run, name) for kind, run in runs.items() for name in MEASURES
        }
        rows, verdicts = [], []
        for (kind, name), table in values.items():
            found = share_of_paths(table, f"noise {LEVEL:g}", "clean")
            spread = _spread(table)
            rows.append((KINDS[kind], name, found.value, found.low, found.high, found.n, spread))
            if name == "absdev":
                verdicts.append(_verdict("Deviation tells", "yes", kind, found))
            elif kind != "random":
                verdicts.append(
                    _verdict("Density tells", "hardly, near training data", kind, found)
                )
        far = {name: _spread(values["random", name]) for name in MEASURES}
        near = {name: _spread(values["closed", name]) for name in MEASURES}
        verdicts.append(
            Verdict(
                "Far from the data both measures are almost the same on all paths",
                "almost uniform",
                "; ".join(f"{n}: {far[n]:.0%} against {near[n]:.0%} on closed" for n in MEASURES),
                all(far[name] < near[name] / 2 for name in MEASURES),
                "read so: nearly the same number on every path. Standard deviation over paths as a "
                "share of the mean, mean over networks; agrees where it is less than half of that "
                "on closed paths",
            )
        )
        columns = ["paths", "measure", f"share with noise {LEVEL:g} above clean", "low", "high"]
        table = pd.DataFrame(rows, columns=[*columns, "comparisons", "spread over paths"])
        return Findings(
            verdicts,
            {"Networks of one seed, path by path": table},
            {
                f"Share of paths with at most so much: {KINDS[kind]}": _figure(
                    {name: values[kind, name] for name in MEASURES}
                )
                for kind in KINDS
            },
            [size_of(values["closed", "absdev"]), *unfitted(runs["closed"])],
        )


def _spread(values: pd.DataFrame) -> float:
    """Standard deviation over paths by the mean, of each trained network, and their mean."""
    trained = values[values.setting != "initialised"]
    each = trained.groupby(["setting", "seed"]).value.agg(lambda one: one.std(ddof=0) / one.mean())
    return float(each.mean())


def _verdict(says: str, published: str, kind: str, found: Correlation) -> Verdict:
    told = above(found.low, found.high, NEARLY)
    expected = published == "yes"
    return Verdict(
        f"{says} clean from wrong labels on {KINDS[kind]}",
        published,
        f"{found.text}, {found.n} comparisons",
        None if told is None else told == expected,
        f"share of paths on which {LEVEL:.0%} wrong labels give the larger value, Wilson's 95 % "
        f"interval; told apart where that is {NEARLY} or more",
    )


def _figure(values: Mapping[str, pd.DataFrame]) -> Figure:
    figure, panels = page_figure(2.9, columns=2)
    for axes, (measure, table) in zip(panels, values.items(), strict=True):
        names = [name for name in settings_in(table.setting) if name != "initialised"]
        for number, name in enumerate(names):
            for seed, dashes in zip(
                table[table.setting == name].seed.unique(),
                itertools.cycle(["-", "--", ":"]),
                strict=False,
            ):
                draw_shares(
                    axes,
                    table[(table.setting == name) & (table.seed == seed)].value,
                    color=COLOURS[number],
                    linestyle=dashes,
                    label=f"{name}, seed {seed}",
                )
        axes.set_xlabel(AXES[measure])
    panels[0].set_ylabel("share of paths")
    panels[0].legend(loc="lower right", fontsize=7.5)
    return figure
