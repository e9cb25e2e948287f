"""What the studies of "Nonlinear Advantage" have in common: networks made linear in part.

Each is trained once under a penalty ω, whichever study asks for it first, and says in its
checkpoint how; all are measured by accuracy, path length and the share of linear units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nlbench.citation import Source
from nlbench.request import Request

from .study import Verdict

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run
    from nlbench.subjects.facts import SubjectFacts

    from .study import Context

__all__ = [
    "FEWEST_LINEAR",
    "MEASURES",
    "MOST_LOST",
    "OMEGAS",
    "QUICK_OMEGAS",
    "SOURCE",
    "as_trained",
    "by_omega",
    "effort",
    "is_short",
    "layers",
    "linearised",
    "measured",
    "networks",
    "omegas",
    "or_short",
    "shrinks",
    "stays_accurate",
]


SOURCE = Source(
    citation="C. H. X. A. Mehmeti-Göpel, J. Disselhoff. Nonlinear Advantage: Trained Networks "
    "Might Not Be As Complex as You Think. ICML, 2023; in words, since a summary of it was used.",
)
MEASURES = ("accuracy", "linear-units", "pathlength")
OMEGAS = {"post-training": (0.001, 0.003, 0.01), "from-start": (0.0003, 0.001)}
# In a few epochs it takes a larger penalty to make units linear.
QUICK_OMEGAS = {"post-training": (0.01, 0.03, 0.1), "from-start": (0.003, 0.01)}
FEW_EPOCHS = 10
MOST_LOST, FEWEST_LINEAR = 0.02, 0.3
"""What accuracy may be lost, and what share of units at least is many of them."""
QUICK_EPOCHS = {"post-training": 3, "from-start": 6}


def omegas(context: Context, mode: str) -> tuple[float, ...]:
    """Penalties of a mode, ``post-training`` or ``from-start``."""
    return (QUICK_OMEGAS if context.quick else OMEGAS)[mode]


def linearised(
    context: Context,
    model: str,
    mode: str,
    omega: float,
    seed: int,
    *,
    data: str = "digits",
    weights: str = "trained",
    name: str = "",
    **changes: Any,
) -> Path:
    """Linearise a network, once for all studies.

    Parameters
    ----------
    context : Context
    model, data : str
    mode : {"post-training", "from-start"}
        The recipe.
    omega : float
    seed : int
    weights : str
        Where ``post-training`` starts.
    name : str
        What tells it from the plain one.
    **changes
        Fields of the recipe that are to be otherwise.
    """
    if context.quick:
        changes = {"epochs": QUICK_EPOCHS[mode], **changes}
    parts = ("quick" if context.quick else "", name, "start" if mode == "from-start" else "")
    called = "-".join([*(part for part in parts if part), f"omega{omega:g}"])
    start = "init" if mode == "from-start" else weights
    return context.trained(
        model, data, mode, seed, weights=start, name=called, omega=omega, **changes
    )


def measured(
    context: Context,
    weights: Mapping[str, Sequence[str | Path]],
    data: str,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Measure networks in one run.

    Parameters
    ----------
    context : Context
    weights : mapping of str to sequence
        Of each model.
    data : str
    settings : mapping, optional
        Options of the dataset.
    """
    for model, files in weights.items():
        request = Request(
            MEASURES, (model,), (data,), tuple(map(str, files)), samples=0, settings=settings or {}
        )
        run = context.run(request)
    return run


def networks(run: Run) -> pd.DataFrame:
    """Give the networks of a run, one a row.

    Columns ``model, mode, omega, seed, noise, epochs`` and the measures. ``mode`` is
    ``reference`` for one that was only trained, of which ``omega`` is NaN.
    """
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in run.records:
        if record.result.status == "ok":
            key = _training(record.subject)
            found.setdefault(key, {})[record.measure.name] = record.result.summary["value"]
    columns = ["model", "mode", "omega", "seed", "noise", "epochs"]
    rows = [(*key, *(numbers.get(name, np.nan) for name in MEASURES)) for key, numbers in
            found.items()]  # fmt: skip
    return pd.DataFrame(rows, columns=[*columns, *MEASURES])


def effort(table: pd.DataFrame) -> str:
    """Say how long networks were made linear: a short study's are hardly."""
    made = table[table["mode"] != "reference"].groupby("mode").epochs.max()
    said = " and ".join(f"{epochs} epochs ({mode})" for mode, epochs in made.items())
    return f"Made linear in {said}." + is_short(table) * " So few can't refute anything."


def is_short(table: pd.DataFrame) -> bool:
    """Whether networks were made linear in so few epochs that what is missing proves nothing."""
    return int(table[table["mode"] != "reference"].epochs.max()) < FEW_EPOCHS


def or_short(table: pd.DataFrame, agrees: bool) -> bool | None:
    """Leave open what networks that were made linear in few epochs don't show."""
    return agrees or (None if is_short(table) else False)


def as_trained(table: pd.DataFrame) -> pd.Series:
    """Means of the measures over networks that were only trained."""
    means: pd.Series = table[table["mode"] == "reference"][list(MEASURES)].mean()
    return means


def by_omega(table: pd.DataFrame) -> pd.DataFrame:
    """Means of the measures over networks that were made linear after training, by ω."""
    return table[table["mode"] == "post-training"].groupby("omega")[list(MEASURES)].mean()


def stays_accurate(table: pd.DataFrame) -> bool | None:
    """Whether some ω makes `FEWEST_LINEAR` of the units linear and costs at most `MOST_LOST`."""
    means, least = by_omega(table), as_trained(table).accuracy - MOST_LOST
    far = means[means["linear-units"] >= FEWEST_LINEAR]
    return or_short(table, bool((far.accuracy >= least).any()))


def shrinks(table: pd.DataFrame, lengths: Sequence[float], remark: str) -> Verdict:
    """Whether path lengths fall from ω to ω."""
    return Verdict(
        "The larger ω, the shorter the paths that are left",
        "path length falls under the pressure to be linear",
        " > ".join(f"{length:.2f}" for length in lengths),
        or_short(table, bool((np.diff(lengths) < 0).all())) if len(lengths) > 1 else None,
        remark,
    )


def layers(run: Run) -> pd.DataFrame:
    """Nonlinear units of each activation call: the columns of `networks`, ``place`` and two."""
    rows = [
        (*_training(record.subject), value.place, value.statistics["nonlinear"],
         value.statistics["units"])
        for record in run.records
        if record.measure.name == "linear-units" and record.result.status == "ok"
        for value in record.result.values
    ]  # fmt: skip
    columns = ["model", "mode", "omega", "seed", "noise", "epochs", "place", "nonlinear", "units"]
    return pd.DataFrame(rows, columns=columns)


def _training(subject: SubjectFacts) -> tuple[str, str, float, int, float, int]:
    made = subject.weights_metadata or {}
    mode = str(made["recipe"]) if "omega" in made else "reference"
    return (
        subject.model,
        mode,
        float(made.get("omega", np.nan)),
        int(made.get("seed", subject.seed)),
        float(made.get("label_noise", 0)),
        int(made.get("epochs", 0)),
    )
