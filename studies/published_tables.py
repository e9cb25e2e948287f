"""Tables 1 and 2 by the deviation as defined and by the integral in the published code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.reports.agreement import Correlation, spearman
from nlbench.store.run import Run

from .density_vs_deviation import (
    PUBLISHED,
    correlate_measures,
    correlation_verdicts,
    merge_measures,
)
from .framework import Context, Findings, Runs, Verdict
from .framework.figures import legend_below, page_figure
from .framework.trends import network_interval
from .framework.verdicts import mean_above
from .noise import is_lower
from .paired import compare_pairs, comparison_verdicts
from .published_integral import AbsdevAsPublished
from .shared.linear_regions import (
    NETWORKS,
    ColumnPaths,
    path_remarks,
    path_values,
    shipped_networks,
    sorted_settings,
)
from .shared.subjects import load_on_cpu

AS_PUBLISHED = "-as-published"
"""Suffix for the parts measured with the integral in the published code."""
INTEGRALS = ("as defined", "by published code")
KEYS = ["setting", "seed", "place"]
MIN_CLAIMS = 2
"""Minimum number of claims decided alike for a table's verdicts to count as unchanged."""


class PublishedTables(ColumnPaths):
    """Verdicts on tables 1 and 2 by the deviation as defined and by the published code."""

    question = "Does the integral in the published code change what tables 1 and 2 show?"
    minutes = 44.0
    quick_minutes = 0.3

    def measure(self, context: Context) -> Runs:
        """Measure all networks of the tables by both integrals along the same paths."""
        runs = super().measure(context)
        published = {
            part + AS_PUBLISHED: _measure(context, part, run) for part, run in runs.items()
        }
        return {**runs, **published}

    def analyse(self, runs: Runs) -> Findings:
        """Evaluate each claim about deviation by both integrals."""
        claims = []
        tables = []
        verdicts = []
        remarks = []
        for part, network in NETWORKS.items():
            if part not in runs:
                continue
            density = path_values(runs[part], "density")
            deviations = _deviations(runs[part], runs[part + AS_PUBLISHED])
            claims.append(_evaluate_claims(network, density, deviations))
            tables.append(_networks(network, density, deviations))
            for name, rows in claims[-1].groupby("table"):
                verdicts.append(_is_unchanged(f"{network}, {name}", rows))
            verdicts += [_is_nearer(network, tables[-1]), _enlarges_effect(network, tables[-1])]
            remarks += [
                *path_remarks(runs[part], network),
                _error_remark(network, runs[part + AS_PUBLISHED]),
            ]
        evaluated = pd.concat(claims, ignore_index=True)
        overall = _is_unchanged("", evaluated)
        return Findings(
            verdicts,
            {
                "Claims of tables 1 and 2 by both integrals": evaluated,
                "Medians over paths and rank correlations with density": pd.concat(
                    tables, ignore_index=True
                ),
            },
            {"Rank correlation of density and deviation, mean over networks": _figure(tables)},
            [
                *remarks,
                "Only the paper's own networks can show whether its figures were made with the "
                "published code's integral; with --data cifar10 the study trains VGG8s like them.",
            ],
            [f"By the definition and by the published code's integral, {overall.ours}."],
        )


def _deviations(run: Run, published: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the `path_values` of both integrals."""
    # Evaluations record no checkpoints, so take the settings from the run.
    facts = {record.subject.weights: record.subject for record in run.records}
    records = [replace(r, subject=facts[r.subject.weights]) for r in published.records]
    integral = path_values(replace(published, records=records), AbsdevAsPublished.name)
    return path_values(run, "absdev"), integral


def _error_remark(network: str, published: Run) -> str:
    errors = [
        value.statistics.get("numerical_error", 0.0) / value.statistics["value"]
        for record in published.records
        for value in record.result.values
    ]
    return (
        f"{network}: the published code's integral is extrapolated from values at uniform steps; "
        f"the median correction is {np.median(errors):.1%} of a path's value."
    )


def _evaluate_claims(
    network: str, density: pd.DataFrame, deviations: Sequence[pd.DataFrame]
) -> pd.DataFrame:
    """Return the claims of both tables with the verdict by each integral."""
    first = []
    second = []
    for values in deviations:
        correlations = correlate_measures(network, merge_measures(values, density))
        first.append(correlation_verdicts(correlations))
        second.append(comparison_verdicts(network, compare_pairs({"absdev": values})))
    rows = [
        (name, network, a.claim, a.published, a.ours, a.word, b.ours, b.word)
        for name, verdicts in (("table 1", first), ("table 2", second))
        for a, b in zip(*verdicts, strict=True)
    ]
    results = [f"{name}{kind}" for name in INTEGRALS for kind in ("", ": agrees")]
    return pd.DataFrame(rows, columns=["table", "network", "claim", "published", *results])


def _is_unchanged(name: str, claims: pd.DataFrame) -> Verdict:
    """Test whether both integrals lead to the same verdict on all decidable claims."""
    first, second = (claims[f"{name}: agrees"] for name in INTEGRALS)
    differ = first != second
    decided = first.isin(("yes", "no")).astype(int) + second.isin(("yes", "no"))
    alike = (decided > 1) & ~differ
    opposite = (decided > 1) & differ
    one = (decided == 1).sum()
    none = (decided == 0).sum()
    return Verdict(
        f"{name}: published code's integral changes no verdict",
        "",
        f"{alike.sum()} of {len(claims)} claims are decided alike, {opposite.sum()} oppositely, "
        f"{one} by only one integral, {none} by neither",
        False if opposite.any() else True if alike.sum() >= MIN_CLAIMS and not one else None,
        "the criteria of density-vs-deviation and paired on the same networks and paths; agrees if "
        f"at least {MIN_CLAIMS} claims are decided alike and none by only one integral",
    )


def _networks(
    network: str, density: pd.DataFrame, deviations: Sequence[pd.DataFrame]
) -> pd.DataFrame:
    """Return the medians over paths and the rank correlations of each network."""
    both = deviations[0].merge(deviations[1], on=KEYS).merge(density, on=KEYS)
    both["ratio"] = both.value_y / both.value_x
    columns = dict(zip(INTEGRALS, ("value_x", "value_y"), strict=True))
    rows = []
    for (setting, seed), paths in both.groupby(KEYS[:2]):
        row = {"network": network, "setting": setting, "seed": seed}
        for name, column in columns.items():
            row[name] = paths[column].median()
        row["ratio"] = paths.ratio.median()
        row["published ρ"] = PUBLISHED[network].get(str(setting), (math.nan, 0.0))[0]
        for name, column in columns.items():
            row[f"ρ {name}"] = spearman(paths.value, paths[column]).value
        rows.append(row)
    return pd.DataFrame(rows)


def _is_nearer(network: str, table: pd.DataFrame) -> Verdict:
    distances = [
        (table[f"ρ {name}"] - table["published ρ"]).abs().groupby(table.seed).mean()
        for name in INTEGRALS
    ]
    of_zero = table["published ρ"].abs().mean()
    gain = distances[0] - distances[1]
    nearer = Correlation(gain.mean(), *network_interval(gain), len(gain))
    return Verdict(
        f"{network}, table 1: by published code's integral ρ is nearer to the published figures",
        "",
        f"mean distance {distances[1].mean():.2f}, {distances[0].mean():.2f} as defined; nearer by "
        f"{nearer.text}, seeds: {nearer.n}; ρ = 0 would be at a distance of {of_zero:.2f}",
        mean_above(gain),
        "mean over the settings for each seed; 95% t interval over seeds; weak correlations are "
        "near whatever they come from, as long as the published ones are weak",
    )


def _enlarges_effect(network: str, table: pd.DataFrame) -> Verdict:
    ratio = table.set_index(["setting", "seed"]).ratio
    noisy = [name for name in sorted_settings(table.setting) if "noise" in name]
    claim = f"{network}: published code's integral enlarges the effect of wrong labels"
    return is_lower(claim, "", ratio, ["clean"], noisy)


def _measure(context: Context, part: str, run: Run) -> Run:
    """Measure a run's networks along its paths with the published code's integral."""
    checkpoints = (context.folder / "checkpoints").glob("*.safetensors")
    files = {file.name: str(file) for file in (*shipped_networks(), *checkpoints)}
    options = run.records[0].probe.options
    by_weights = {record.subject.weights: record.subject for record in run.records}
    subjects = []
    for weights, facts in by_weights.items():
        subject = load_on_cpu(
            facts.model,
            files.get(weights, weights),
            facts.data,
            seed=facts.seed,
            samples=int(options["number"]),
            split=str(facts.split),
        )
        subjects.append(subject)
    return context.evaluate(
        {subject.facts.weights: subject.model for subject in subjects},
        subjects[0].inputs,
        [AbsdevAsPublished],
        part + AS_PUBLISHED,
        settings={f"lines.{name}": value for name, value in options.items()},
        name=subjects[0].facts.model,
    )


def _figure(tables: Sequence[pd.DataFrame]) -> Figure:
    figure, panels = page_figure(2.9, columns=len(tables), squeeze=False)
    series = [f"ρ {INTEGRALS[0]}", f"ρ {INTEGRALS[1]}", "published ρ"]
    for axes, table in zip(panels[0], tables, strict=True):
        means = table.dropna().groupby("setting")[series].mean()
        means = means.loc[sorted_settings(means.index)]
        for name, marker in zip(series, "ovD", strict=True):
            axes.plot(means[name], means.index, marker, label=name)
        axes.axvline(0, color="#777777", linewidth=0.8)
        axes.set(xlim=(-1, 1), title=table.network.iloc[0], xlabel="Spearman's ρ over paths")
        axes.invert_yaxis()
    legend_below(figure, panels[0, 0], 3)
    return figure
