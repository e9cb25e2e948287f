"""What the studies of "Are All Linear Regions Created Equal?" have in common.

One network trained on clean, on augmented and on wrongly labelled data, several times each, and
what density and absolute deviation say of all of them along the same closed paths. The five
studies of it share every network and every cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nlbench.citation import Source
from nlbench.reports.agreement import Correlation, paired_share
from nlbench.request import Request

from .study import Context, Study

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run
    from nlbench.subjects.facts import SubjectFacts

__all__ = [
    "AXES",
    "DATA",
    "LEVELS",
    "MEASURES",
    "MODEL",
    "SOURCE",
    "ClosedPaths",
    "measured",
    "medians",
    "network_values",
    "over_seeds",
    "path_values",
    "settings_in",
    "share_of_paths",
    "shipped",
    "size_of",
    "trained_networks",
    "unfitted",
]


SOURCE = Source(
    citation="M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman. Are All "
    "Linear Regions Created Equal? AISTATS, 2022. VGG8 on CIFAR-10, unless something else is said.",
)
MODEL, DATA = "vgg8", "digits"
MEASURES = ("absdev", "density")
LEVELS = (0.2, 0.4, 0.8)
"""Shares of wrong labels."""
# Recipes of plain training, of augmented training and of wrong labels: for small data, and the
# paper's own for photographs.
RECIPES = {DATA: ("vanilla", "augmented", "noisy-labels")}
PUBLISHED_RECIPES = (
    "linear-regions-vanilla",
    "linear-regions-augmented",
    "linear-regions-noisy-labels",
)
# Estimates are asked for to 1 %; they are known to about 0.4 %, at a tenth of the cost of 0.1 %.
LINES = {"lines.number": 40, "lines.anchors": 4, "lines.tolerance": 0.01}
FITTED = 0.95
"""Share of the training labels that a network has to fit to count as trained."""
AXES = {"absdev": "absolute deviation", "density": "crossings"}
"""What an axis says of each measure."""


class ClosedPaths(Study):
    """A study of networks of clean, augmented and wrongly labelled data along closed paths.

    All of them share their networks and cells, so that the first takes the time of all.
    """

    source = SOURCE
    needs = "trains 15 networks, shared with four other studies"
    minutes, quick_minutes = 7.5, 0.4
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Networks of clean, augmented and wrongly labelled data along closed paths."""
        return {"paths": measured(context)}


def trained_networks(
    context: Context, levels: Sequence[float] = LEVELS, *, augmented: bool = True
) -> tuple[Path, ...]:
    """Ask for the networks of a study, which others share, to be trained.

    In a quick study of digits they are the two that ship: of clean labels, and of 40 % wrong
    ones.

    Parameters
    ----------
    context : Context
    levels : sequence of float
        Shares of wrong labels.
    augmented : bool
        Whether augmented training is among them.
    """
    data = context.data or DATA
    if context.quick and data == DATA:
        return shipped()
    plain, other, noisy = RECIPES.get(data, PUBLISHED_RECIPES)
    changes: dict[str, Any] = {"epochs": 2} if context.quick else {}
    quick = "quick-" if context.quick else ""
    made: list[Path] = []
    for seed in context.seeds_or(3):
        name = "quick" if context.quick else ""
        made.append(context.trained(MODEL, data, plain, seed, name=name, **changes))
        if augmented:
            name = f"{quick}augmented"
            made.append(context.trained(MODEL, data, other, seed, name=name, **changes))
        for level in levels:
            name = f"{quick}noise{level:g}"
            made.append(
                context.trained(MODEL, data, noisy, seed, label_noise=level, name=name, **changes)
            )
    return tuple(made)


def shipped() -> tuple[Path, Path]:
    """Give the networks that ship: of clean labels, and of 40 % wrong ones."""
    from nlbench import registry
    from nlbench.subjects.model import model_info

    clean = Path(model_info(registry.load("models", MODEL)).trained[DATA])
    return clean, clean.with_name("vgg8-digits-noise40.safetensors")


def measured(context: Context, kind: str = "closed", networks: Sequence[Path] | None = None) -> Run:
    """Measure networks, and one as it is initialised, along the same paths.

    Parameters
    ----------
    context : Context
    kind : str
        What ``lines.paths`` calls it.
    networks : sequence of Path, optional
        By default those of all settings.
    """
    made = trained_networks(context) if networks is None else networks
    request = Request(
        MEASURES,
        (MODEL,),
        (context.data or DATA,),
        ("init", *map(str, made)),
        split="train",
        settings={**LINES, "lines.paths": kind},
    )
    return context.run(request, kind)


def path_values(run: Run, measure: str) -> pd.DataFrame:
    """Give what a measure says of each path: columns ``setting, seed, place, value``.

    ``setting`` is ``initialised``, ``clean``, ``augmented``, ``noise 0.2`` and so on, as the
    checkpoints say; ``seed`` that of the training.
    """
    rows = [
        (*_setting(record.subject), value.place, value.statistics["value"])
        for record in run.records
        if record.measure.name == measure and record.result.status == "ok"
        for value in record.result.values
    ]
    return pd.DataFrame(rows, columns=["setting", "seed", "place", "value"])


def network_values(run: Run, measure: str) -> pd.Series:
    """Give a measure's value of each network: by setting and seed."""
    found = {
        _setting(record.subject): record.result.summary["value"]
        for record in run.records
        if record.measure.name == measure and record.result.status == "ok"
    }
    index = pd.MultiIndex.from_tuples(list(found), names=["setting", "seed"])
    return pd.Series(list(found.values()), index, name="value", dtype=float)


def _setting(subject: SubjectFacts) -> tuple[str, int]:
    made = subject.weights_metadata or {}
    if not made:
        return "initialised", subject.seed
    level = float(made.get("label_noise", 0))
    if level:
        return f"noise {level:g}", int(made["seed"])
    return ("augmented" if "augmented" in made["recipe"] else "clean"), int(made["seed"])


def settings_in(names: Iterable[str]) -> list[str]:
    """Order settings by how hard the task is.

    Examples
    --------
    >>> settings_in(["noise 0.4", "clean", "noise 0.2", "initialised", "clean"])
    ['initialised', 'clean', 'noise 0.2', 'noise 0.4']
    """
    first = {"initialised": 0, "augmented": 1, "clean": 2}
    return sorted(dict.fromkeys(names), key=lambda name: (first.get(name, 3), name))


def medians(values: pd.DataFrame) -> pd.Series:
    """Median over paths of each network: by setting and seed."""
    found: pd.Series = values.groupby(["setting", "seed"]).value.median()
    return found


def over_seeds(numbers: Iterable[float]) -> str:
    """Write a mean over networks with their standard deviation.

    Examples
    --------
    >>> over_seeds([1.0, 3.0]), over_seeds([2.0]), over_seeds([41_000, 43_000])
    ('2 ± 1', '2', '42,000 ± 1,000')
    """
    found = np.asarray(list(numbers), dtype=np.float64)
    form = ",.0f" if abs(found.mean()) >= 100 else ".2g" if abs(found.mean()) < 1 else ".3g"
    spread = f" ± {found.std():{form}}" if len(found) > 1 else ""
    return f"{found.mean():{form}}{spread}"


def size_of(values: pd.DataFrame) -> str:
    """Say how much there is: networks, seeds, paths."""
    seeds, paths = values.seed.nunique(), values.place.nunique()
    return f"Small data: {MODEL} on few images, seeds of each setting: {seeds}, paths: {paths}."


def unfitted(run: Run) -> list[str]:
    """Say which networks did not learn what they were trained on: they memorise nothing."""
    found = {}
    for record in run.records:
        accuracy = (record.subject.weights_metadata or {}).get("train_accuracy")
        if accuracy is not None and float(accuracy) < FITTED:
            found["{}, seed {}".format(*_setting(record.subject))] = float(accuracy)
    if not found:
        return []
    said = "; ".join(f"{name}: {accuracy:.0%}" for name, accuracy in found.items())
    return [
        "Not trained to the end, so that verdicts tell nothing; of their training labels fit "
        f"{said}."
    ]


def share_of_paths(
    values: pd.DataFrame, higher: str, lower: str, *, same_seed: bool = True
) -> Correlation:
    """Share of paths on which one setting's networks have a larger value than another's.

    Parameters
    ----------
    values : DataFrame
        As `path_values` gives it.
    higher, lower : str
        The settings.
    same_seed : bool
        Whether networks of one seed are compared, or each with those of other seeds. There is
        a single initialised network, which counts as of the same.
    """
    one, other = (
        values[values.setting == name].pivot_table(index="place", columns="seed", values="value")
        for name in (higher, lower)
    )
    differences = [
        one[a] - other[b]
        for a, b in itertools.product(one, other)
        if ((a == b) or lower == "initialised") == same_seed
    ]
    return paired_share(np.concatenate(differences) if differences else [])
