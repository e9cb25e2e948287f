"""The networks, paths and tables of "Are All Linear Regions Created Equal?".

Each architecture is trained on clean, augmented and wrongly labelled data with several seeds. The
studies measure the density and absolute deviation of all networks along the same closed paths, and
share their networks and cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nlbench.citation import Source
from nlbench.parsers import unique
from nlbench.request import Request
from nlbench.store.run import Run
from nlbench.studies.framework import Context, Runs, Study
from nlbench.studies.framework.figures import page_figure
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.load import build_model, load_dataset
from nlbench.subjects.weights import save_weights

SOURCE = Source(
    citation="M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman. Are All "
    "Linear Regions Created Equal? AISTATS, 2022. VGG8 on CIFAR-10, unless stated otherwise."
)
MODEL = "vgg8"
DATA = "digits"
RESNET = "resnet18-w4"
RESNET_NOISE = 0.4
SEEDS = 6
"""Networks for each setting; fewer can't decide what holds for most of them."""
UNTRAINED = "none"
"""Recipe in the header of an untrained network's checkpoint."""
NETWORKS = {"paths": "VGG8", "resnet18": "ResNet18"}
"""Networks of the published tables, keyed by part."""
MEASURES = ("absdev", "density")
LEVELS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Fractions of wrong labels."""
# Recipes for plain training, augmented training and training on wrong labels. For photographs they
# are the paper's own.
RECIPES = ("vanilla", "augmented", "noisy-labels")
# A tolerance of 1% gives errors of about 0.4% at a tenth of the cost of a tolerance of 0.1%.
# Paths have eight anchors, as in the paper.
LINES = {"lines.number": 20, "lines.anchors": 8, "lines.tolerance": 0.01}
QUICK_PATHS = 4
MIN_TRAIN_ACCURACY = 0.95
"""Minimum training accuracy for a network to count as fully trained."""
AXIS_LABELS = {"absdev": "absolute deviation", "density": "crossings"}


class ClosedPaths(Study):
    """Base class for studies of networks trained on clean, augmented and wrongly labelled data.

    These studies share their networks and cells, so the first one takes most of the time.
    """

    source = SOURCE
    needs = "trains 42 networks, shared with five other studies"
    minutes = 20.0
    quick_minutes = 0.2
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure trained networks and an untrained one along closed paths."""
        return {"paths": measure_paths(context)}


class ColumnPaths(ClosedPaths):
    """Base class for studies of both columns of the published tables, VGG8 and ResNet18."""

    needs = "trains 60 networks, of which 42 are shared with five other studies"
    minutes = 38.0
    quick_minutes = 0.2

    def measure(self, context: Context) -> Runs:
        """Measure VGG8s and, in full studies on digits, ResNet18s along closed paths."""
        runs = dict(super().measure(context))
        if not context.quick and (context.data or DATA) == DATA:
            networks = [
                file for seed in context.seeds_or(SEEDS) for file in _resnets(context, seed)
            ]
            runs["resnet18"] = measure_paths(context, "resnet18", networks, RESNET)
        return runs


def _resnets(context: Context, seed: int) -> Iterator[Path]:
    """Request ResNet18s trained on clean, shifted and wrongly labelled digits."""
    yield context.request_training(RESNET, DATA, "adam", seed)
    adam: dict[str, Any] = {
        "optimizer": "adam",
        "schedule": "cosine",
        "learning_rate": 3e-3,
        "batch_size": 64,
    }
    yield context.request_training(
        RESNET, DATA, "augmented", seed, name="shifted", flip=False, epochs=60, **adam
    )
    yield context.request_training(
        RESNET, DATA, "adam", seed, name=f"fitted-noise{RESNET_NOISE:g}", epochs=160,
        label_noise=RESNET_NOISE, until_train_accuracy=1.0,
    )  # fmt: skip


def trained_networks(
    context: Context, levels: Sequence[float] = LEVELS, *, augmented: bool = True
) -> tuple[Path, ...]:
    """Request the trained networks, shared by all studies, and return their checkpoints.

    The levels are fractions of wrong labels. Quick studies on digits use the two bundled
    networks, trained on clean labels and on 40% wrong ones.
    """
    data = context.data or DATA
    if context.quick and data == DATA:
        return shipped_networks()
    setting = "" if data == DATA else "linear-regions-"
    plain, other, noisy = (f"{setting}{name}" for name in RECIPES)
    changes: dict[str, Any] = {"epochs": 2} if context.quick else {}
    prefix = "quick-" if context.quick else ""
    checkpoints: list[Path] = []
    for seed in context.seeds_or(SEEDS):
        trainings: list[tuple[str, str, float | None]] = [
            (plain, "quick" if context.quick else "", None)
        ]
        # Digits are shifted but not mirrored, since a mirrored digit is not a digit.
        trainings += [(other, f"{prefix}shifted", None)] if augmented else []
        trainings += [(noisy, f"{prefix}noise{level:g}", level) for level in levels]
        for recipe, name, level in trainings:
            fields = {**changes, "flip": False} if data == DATA and recipe == other else changes
            checkpoints.append(
                context.request_training(
                    MODEL, data, recipe, seed, label_noise=level, name=name, **fields
                )
            )
    return tuple(checkpoints)


def shipped_networks() -> tuple[Path, Path]:
    """Return the bundled checkpoints, trained on clean labels and on 40% wrong ones."""
    from nlbench import registry
    from nlbench.subjects.model import model_info

    clean = Path(model_info(registry.load("models", MODEL)).trained[DATA])
    return clean, clean.with_name("vgg8-digits-noise40.safetensors")


def measure_paths(
    context: Context,
    part: str = "closed",
    networks: Sequence[Path] | None = None,
    model: str = MODEL,
) -> Run:
    """Measure trained networks, and an untrained one for each seed, along the same paths.

    By default, the networks of all settings are measured. Paths are closed unless the part is
    ``open`` or ``random``.
    """
    data = context.data or DATA
    trained = trained_networks(context) if networks is None else networks
    checkpoints = [*_untrained_networks(context, model, data), *trained]
    request = Request(
        MEASURES,
        (model,),
        (data,),
        tuple(map(str, checkpoints)),
        split="train",
        settings={
            **LINES,
            "lines.number": QUICK_PATHS if context.quick else LINES["lines.number"],
            "lines.paths": part if part in ("open", "random") else "closed",
        },
    )
    return context.run(request, part)


def _untrained_networks(context: Context, model: str, data: str) -> Iterator[Path]:
    """Write the networks of each seed as they are before training, and yield their checkpoints."""
    folder = context.folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    dataset = load_dataset(data)
    for seed in context.seeds_or(SEEDS):
        file = folder / f"{model}-{data.replace('/', '-')}-untrained-seed{seed}.safetensors"
        network = build_model(model, dataset, seed)
        save_weights(file, network, {"recipe": UNTRAINED, "seed": str(seed), "data": data})
        yield file


def path_values(run: Run, measure: str) -> pd.DataFrame:
    """Return a measure's value on each path in the columns ``setting, seed, place, value``.

    ``setting`` is ``initialised``, ``clean``, ``augmented`` or, for example, ``noise 0.2``, as
    recorded in the checkpoints; ``seed`` is the training seed.
    """
    rows = [
        (*_setting(record.subject), value.place, value.statistics["value"])
        for record in run.records
        if record.measure.name == measure and record.result.status == "ok"
        for value in record.result.values
    ]
    return pd.DataFrame(rows, columns=["setting", "seed", "place", "value"])


def network_values(run: Run, measure: str) -> pd.Series:
    """Return a measure's value for each network, by setting and seed."""
    values = {
        _setting(record.subject): record.result.summary["value"]
        for record in run.records
        if record.measure.name == measure and record.result.status == "ok"
    }
    index = pd.MultiIndex.from_tuples(list(values), names=["setting", "seed"])
    return pd.Series(list(values.values()), index, name="value", dtype=float)


def _setting(subject: SubjectFacts) -> tuple[str, int]:
    header = subject.weights_metadata or {"recipe": UNTRAINED}
    seed = int(header.get("seed", subject.seed))
    if level := float(header.get("label_noise", 0)):
        return f"noise {level:g}", seed
    if header["recipe"] == UNTRAINED:
        return "initialised", seed
    return ("augmented" if "augmented" in header["recipe"] else "clean"), seed


def sorted_settings(names: Iterable[str]) -> list[str]:
    """Sort settings by the difficulty of the task.

    Examples
    --------
    >>> sorted_settings(["noise 0.4", "clean", "noise 0.2", "initialised", "clean"])
    ['initialised', 'clean', 'noise 0.2', 'noise 0.4']
    """
    first = {"initialised": 0, "augmented": 1, "clean": 2}
    return sorted(unique(names), key=lambda name: (first.get(name, 3), name))


def medians(values: pd.DataFrame) -> pd.Series:
    """Compute each network's median over paths, by setting and seed."""
    return values.groupby(["setting", "seed"]).value.median()


def over_seeds(numbers: Iterable[float]) -> str:
    """Format a mean over networks with their standard deviation.

    Examples
    --------
    >>> over_seeds([1.0, 2.0, 3.0]), over_seeds([2.0]), over_seeds([41_000, 42_000, 43_000])
    ('2 ± 1', '2', '42,000 ± 1,000')
    """
    array = np.asarray(list(numbers), dtype=np.float64)
    form = ",.0f" if abs(array.mean()) >= 100 else ".2g" if abs(array.mean()) < 1 else ".3g"
    spread = f" ± {array.std(ddof=1):{form}}" if len(array) > 1 else ""
    return f"{array.mean():{form}}{spread}"


def path_remarks(run: Run, network: str = "VGG8") -> list[str]:
    """Return remarks on the size of the experiment and on networks that did not fit their labels.

    Networks without a recorded training accuracy, such as untrained ones, are not judged.
    """
    values = path_values(run, "absdev")
    seeds = values.seed.nunique()
    paths = values.place.nunique()
    size = (
        f"Small-scale: {network} on few images; seeds per setting: {seeds}, paths: {paths}, each "
        f"with {LINES['lines.anchors']} anchors."
    )
    accuracies = {}
    for record in run.records:
        accuracy = (record.subject.weights_metadata or {}).get("train_accuracy")
        if accuracy is not None and float(accuracy) < MIN_TRAIN_ACCURACY:
            accuracies["{}, seed {}".format(*_setting(record.subject))] = float(accuracy)
    if not accuracies:
        return [size]
    listed = "; ".join(f"{name}: {accuracy:.0%}" for name, accuracy in accuracies.items())
    return [
        size,
        "Some networks did not fit their training labels, so the verdicts are inconclusive. "
        f"Training accuracy: {listed}.",
    ]


@dataclass(frozen=True)
class PathComparison:
    """Fractions of paths on which the first network of a pair has the larger value.

    Parameters
    ----------
    fractions : array of shape (pairs,)
    networks : int
        Number of independent pairs.
    """

    fractions: NDArray[np.float64]
    networks: int

    @property
    def text(self) -> str:
        """Mean over pairs."""
        return f"{self.fractions.mean():.2f}" if len(self.fractions) else "none"


def compare_paths(
    values: pd.DataFrame, higher: str, lower: str, *, same_seed: bool = True
) -> PathComparison:
    """Compute the fractions of paths on which values for one setting exceed those for another.

    Compares networks with the same seed or, if `same_seed` is False, with different seeds. The
    values come from `path_values`.
    """
    first, second = (
        values[values.setting == name].pivot_table(index="place", columns="seed", values="value")
        for name in (higher, lower)
    )
    first, second = first.align(second, join="inner", axis=0)
    differences = first.to_numpy()[:, :, None] - second.to_numpy()[:, None, :]
    above = (differences > 0).sum(0) + (differences == 0).sum(0) / 2
    shares = above / np.isfinite(differences).sum(0)
    one_seed = np.equal.outer(first.columns.to_numpy(), second.columns.to_numpy())
    compared = one_seed == same_seed
    # A network that is compared with many others counts as one observation.
    networks = min(int(compared.any(axis).sum()) for axis in (0, 1))
    return PathComparison(shares[compared], networks)


def distribution_figure(
    values: Mapping[str, pd.DataFrame],
    curves: Callable[[pd.DataFrame], Iterator[tuple[pd.Series, dict[str, Any]]]],
) -> Figure:
    """Plot the distributions of `path_values` over paths, one panel per measure.

    `curves` yields the values and the style of each curve in a panel.
    """
    figure, panels = page_figure(2.9, columns=2)
    for axes, (measure, table) in zip(panels, values.items(), strict=True):
        for numbers, style in curves(table):
            axes.ecdf(numbers, **style)
        axes.set(xlabel=AXIS_LABELS[measure], ylim=(0, 1.02))
    panels[0].set_ylabel("fraction of paths")
    panels[0].legend(loc="lower right", fontsize=7.5)
    return figure
