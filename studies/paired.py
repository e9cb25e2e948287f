"""On how many paths one network is found more nonlinear than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.reports.agreement import Correlation

from .drawing import COLOURS, page_figure
from .linear_regions import (
    MEASURES,
    ClosedPaths,
    path_values,
    settings_in,
    share_of_paths,
    size_of,
    unfitted,
)
from .study import Findings, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Paired"]


# Table 2, VGG8 on CIFAR-10: share of paths on which the first of a pair has the larger value,
# by deviation and by density; mean over three pairs, ± their standard deviation.
PUBLISHED = {
    ("clean", "augmented"): ("0.98 ± 0.01", "0.66 ± 0.40"),
    ("noise 0.2", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
    ("noise 0.4", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
    ("noise 0.6", "clean"): ("1.00 ± 0.00", "0.00 ± 0.01"),
    ("noise 0.8", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
    ("noise 1", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
    ("clean", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
    ("augmented", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
    ("noise 0.2", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
    ("noise 0.4", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
    ("noise 0.6", "initialised"): ("1.00 ± 0.00", "0.99 ± 0.01"),
    ("noise 0.8", "initialised"): ("1.00 ± 0.00", "0.96 ± 0.03"),
    ("noise 1", "initialised"): ("1.00 ± 0.00", "0.96 ± 0.01"),
}
NEARLY = 0.9
"""Share of paths that is nearly all of them; the published ones are 0.98 and more."""


class Paired(ClosedPaths):
    """Share of paths on which wrong labels, no augmentation and training raise a measure."""

    question = "Is the harder task's network found more nonlinear on nearly every path?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare two networks path by path, those of one seed and those of different seeds."""
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        pairs = _pairs(settings_in(values["absdev"].setting))
        shares = {
            (pair, name, same): share_of_paths(table, *pair, same_seed=same)
            for pair in pairs
            for name, table in values.items()
            for same in (True, False)
        }
        verdicts = []
        for pair in pairs:
            for column, name in enumerate(MEASURES):
                found = shares[pair, name, True]
                verdicts.append(_against(pair, name, PUBLISHED.get(pair, ("", ""))[column], found))
        verdicts += [
            _beyond_seeds(pair, shares[pair, "density", False])
            for pair in pairs
            if pair[1] == "clean" and shares[pair, "density", False].n
        ]
        rows = [
            (
                *pair,
                {"absdev": "absolute deviation"}.get(name, name),
                "one seed" if same else "different seeds",
                found.n,
                found.value,
                found.low,
                found.high,
            )
            for (pair, name, same), found in shares.items()
            if found.n
        ]
        columns = ["higher", "lower", "measure", "networks of", "comparisons"]
        table = pd.DataFrame(rows, columns=[*columns, "share", "low", "high"])
        return Findings(
            verdicts,
            {"Share of paths on which the first has the larger value": table},
            {"Share of paths: networks of one seed left, of different ones right": _figure(table)},
            [
                size_of(values["absdev"]),
                *unfitted(runs["paths"]),
                "Paths are the same for all networks. One initialised network (seed 0) stands "
                "beside all trained ones.",
            ],
        )


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of settings, the one to be expected higher first."""
    trained = [name for name in names if name != "initialised"]
    noisy = [name for name in trained if name.startswith("noise")]
    found = [("clean", "augmented")] if "augmented" in names else []
    found += [(name, "clean") for name in noisy]
    return found + [(name, "initialised") for name in trained if "initialised" in names]


def _against(pair: tuple[str, str], name: str, published: str, found: Correlation) -> Verdict:
    what = {"absdev": "Deviation", "density": "Density"}[name]
    if published:
        value = float(published.split()[0])
        side = "nearly all" if value >= NEARLY else "almost no" if value <= 1 - NEARLY else "some"
    else:
        side = "nearly all"
    if side == "nearly all":
        agrees = above(found.low, found.high, NEARLY)
    elif side == "almost no":
        more = above(found.low, found.high, 1 - NEARLY)
        agrees = None if more is None else not more
    else:
        inside = found.low > 1 - NEARLY and found.high < NEARLY
        outside = found.high <= 1 - NEARLY or found.low >= NEARLY
        agrees = True if inside else False if outside else None
    return Verdict(
        f"{what} of {pair[0]} is above that of {pair[1]} on {side} paths",
        published,
        f"{found.text}, {found.n} comparisons",
        agrees,
        "share of paths with Wilson's 95 % interval, over the networks of one seed; nearly all is "
        f"at least {NEARLY}, almost none at most {1 - NEARLY:g}",
    )


def _beyond_seeds(pair: tuple[str, str], found: Correlation) -> Verdict:
    return Verdict(
        f"Density tells {pair[0]} from clean labels where the seeds differ too",
        "",
        f"{found.text}, {found.n} comparisons",
        above(found.low, found.high, NEARLY),
        "each network of wrong labels beside each clean one of another seed, on the same paths",
    )


def _figure(table: pd.DataFrame) -> Figure:
    figure, panels = page_figure(3.4, columns=2)
    names = list(dict.fromkeys(zip(table.higher, table.lower, strict=True)))
    for axes, which in zip(panels, ("one seed", "different seeds"), strict=True):
        part = table[table["networks of"] == which]
        for number, measure in enumerate(dict.fromkeys(table.measure)):
            one = part[part.measure == measure]
            places = [
                names.index(pair) + 0.2 * (number - 0.5)
                for pair in zip(one.higher, one.lower, strict=True)
            ]
            axes.errorbar(
                one.share,
                places,
                # Wilson's bounds meet a share of 0 or 1 but for rounding.
                xerr=[(one.share - one.low).clip(0), (one.high - one.share).clip(0)],
                fmt="os"[number],
                color=COLOURS[number],
                markersize=4,
                label=measure,
            )
        axes.set_xlim(-0.03, 1.03)
        axes.axvline(0.5, color="#777777", linewidth=0.8)
        axes.set_yticks(range(len(names)), [f"{a} > {b}" for a, b in names], fontsize=7.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_title(f"networks of {which}")
        if part.empty:
            axes.text(0.5, 0.5, "one seed only", transform=axes.transAxes, ha="center")
        axes.set_xlabel("share of paths")
    panels[1].set_yticklabels([])
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
