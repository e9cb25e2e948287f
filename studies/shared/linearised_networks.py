"""Partly linearised networks as in "Nonlinear Advantage".

Each network is trained only once for all studies, with a penalty ω that its checkpoint records.
The measures are accuracy, path length and the fraction of linear units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nlbench.citation import Source
from nlbench.request import Request
from nlbench.store.run import Run
from nlbench.studies.framework import Context, Verdict
from nlbench.studies.framework.verdicts import Decision, mean_above, rises_in_networks
from nlbench.subjects.facts import SubjectFacts

from .small_networks import trained_network

SOURCE = Source(
    citation="C. H. X. A. Mehmeti-Göpel, J. Disselhoff. Nonlinear Advantage: Trained Networks "
    "Might Not Be As Complex as You Think. ICML, 2023; claims as worded in the abstracts of the "
    "paper and, for early and late linearisation, of its first version, arXiv:2211.17180v1, 2022."
)
MEASURES = ("accuracy", "linear-units", "pathlength")
OMEGAS = {"post-training": (0.001, 0.003, 0.01), "from-start": (0.0003, 0.001)}
# With few epochs, linearising units requires a larger penalty and larger steps.
QUICK_OMEGAS = {"post-training": (0.03, 0.1), "from-start": (0.01,)}
QUICK_EPOCHS = {"post-training": 1, "from-start": 2}
MAX_ACCURACY_LOSS = 0.02
MIN_LINEAR_FRACTION = 0.3
"""Minimum fraction of linear units that counts as many."""
_TRAINING_COLUMNS = ["model", "mode", "omega", "seed", "noise", "epochs"]


def omegas(context: Context, mode: str) -> tuple[float, ...]:
    """Return the penalties for a mode, ``post-training`` or ``from-start``."""
    return (QUICK_OMEGAS if context.quick else OMEGAS)[mode]


def original_network(context: Context, model: str, seed: int) -> str:
    """Return the weights of a seed's network trained on digits, requesting its training.

    Quick studies use the bundled network for all seeds.
    """
    return "trained" if context.quick else str(trained_network(context, model, seed))


def linearise(
    context: Context,
    model: str,
    mode: str,
    omega: float,
    seed: int,
    *,
    data: str = "digits",
    weights: str = "",
    name: str = "",
    **changes: Any,
) -> Path:
    """Request a linearised network, shared by all studies, and return its checkpoint.

    The mode is a recipe, ``post-training`` or ``from-start``; only the former starts from
    ``weights``, by default those of `original_network`. The name distinguishes the checkpoint from
    the plain one. The changes override recipe fields.
    """
    if context.quick:
        quick = {"epochs": QUICK_EPOCHS[mode], "learning_rate": 0.01}
        changes = {**quick, **changes}
    parts = ("quick" if context.quick else "", name, "start" if mode == "from-start" else "")
    full_name = "-".join([*(part for part in parts if part), f"omega{omega:g}"])
    start = "init"
    if mode == "post-training":
        start = weights or original_network(context, model, seed)
    return context.request_training(
        model, data, mode, seed, weights=start, name=full_name, omega=omega, **changes
    )


def linear_floor(
    context: Context, model: str, seed: int, *, data: str = "digits", **fields: Any
) -> Path:
    """Request a network whose units are all linear, trained further for as long as the others.

    It shows how much of the task needs nonlinear units. The fields are those of
    `Context.request_training`.
    """
    if context.quick:
        fields = {"epochs": QUICK_EPOCHS["post-training"], **fields}
    name = "-".join(filter(None, ("quick" * context.quick, fields.pop("name", ""), "linear")))
    if "weights" not in fields:
        fields["weights"] = original_network(context, model, seed)
    return context.request_training(
        model, data, "post-training", seed, name=name, random_share=1.0, **fields
    )


def measure_networks(
    context: Context,
    weights: Mapping[str, Sequence[str | Path]],
    data: str,
    settings: Mapping[str, Any] | None = None,
    part: str = "run",
) -> Run:
    """Measure each model, with each of its weights, in one run."""
    for model, files in weights.items():
        request = Request(
            MEASURES, (model,), (data,), tuple(map(str, files)), samples=0, settings=settings or {}
        )
        run = context.run(request, part)
    return run


def network_table(run: Run) -> pd.DataFrame:
    """Return one row per network, with the names of their weights as the index.

    The columns are ``model, mode, omega, seed, noise, epochs`` and the measures. For networks that
    were not linearised, the mode is ``reference`` and omega is NaN; for networks with randomly
    chosen linear units, the mode is ``control``, or ``floor`` if all units are linear.
    """
    networks: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in run.records:
        if record.result.status == "ok":
            # Controls differ only in their checkpoints.
            key = (record.subject.weights, *_training(record.subject))
            networks.setdefault(key, {})[record.measure.name] = record.result.summary["value"]
    rows = []
    for key, values in networks.items():
        rows.append((*key[1:], *(values.get(name, np.nan) for name in MEASURES)))
    index = [key[0] for key in networks]
    table = pd.DataFrame(rows, index, [*_TRAINING_COLUMNS, *MEASURES])
    table.loc[(table["mode"] == "control") & (table["linear-units"] == 1), "mode"] = "floor"
    return table


def layer_table(run: Run) -> pd.DataFrame:
    """Return the number of nonlinear units, with one row per activation call and network."""
    rows = []
    for record in run.records:
        if record.measure.name == "linear-units" and record.result.status == "ok":
            training = _training(record.subject)
            for value in record.result.values:
                numbers = value.statistics["nonlinear"], value.statistics["units"]
                rows.append((*training, value.place, *numbers))
    return pd.DataFrame(rows, columns=[*_TRAINING_COLUMNS, "place", "nonlinear", "units"])


def _training(subject: SubjectFacts) -> tuple[str, str, float, int, float, int]:
    header = subject.weights_metadata or {}
    mode = str(header["recipe"]) if "omega" in header else "reference"
    mode = "control" if "random" in header else mode
    return (
        subject.model,
        mode,
        float(header.get("omega", np.nan)),
        int(header.get("seed", subject.seed)),
        float(header.get("label_noise", 0)),
        int(header.get("epochs", 0)),
    )


def epochs_remark(table: pd.DataFrame) -> str:
    """Return a remark on the number of linearisation epochs and whether it can refute a claim."""
    epochs = table[table["mode"] != "reference"].groupby("mode").epochs.max()
    listed = " and ".join(f"{count} epochs ({mode})" for mode, count in epochs.items())
    return f"Linearised for {listed}." + is_short(table) * " So few epochs can't refute a claim."


def is_short(table: pd.DataFrame) -> bool:
    """Return True if linearisation took too few epochs to refute a claim."""
    return int(table[table.omega.notna()].epochs.max()) < 10


def conclusive(table: pd.DataFrame, decision: Decision) -> Decision:
    """Return an undecided result if linearisation took too few epochs to refute a claim."""
    return Decision(None) if decision.agrees is False and is_short(table) else decision


def as_trained(table: pd.DataFrame) -> pd.Series:
    """Compute the mean of each measure over networks that were not linearised."""
    return table[table["mode"] == "reference"][list(MEASURES)].mean()


def average_by_omega(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the mean of each measure over networks linearised after training, by ω."""
    return table[table["mode"] == "post-training"].groupby("omega")[list(MEASURES)].mean()


def curves_by_seed(table: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Return each seed's networks linearised after training, by ω, after the one they start from.

    A bundled network is the start of all seeds.
    """
    starts = table[table["mode"] == "reference"]
    late = table[table["mode"] == "post-training"].sort_values("omega")
    curves = {}
    for seed, rows in late.groupby("seed"):
        own = starts[starts.seed == seed]
        curves[int(str(seed))] = pd.concat([starts if own.empty else own, rows])
    return curves


def floor_losses(table: pd.DataFrame) -> list[float]:
    """Return the accuracy that each seed's network loses if all its units are linear."""
    curves = curves_by_seed(table)
    floors = table[table["mode"] == "floor"].set_index("seed").accuracy
    return [curves[seed].accuracy.iloc[0] - floors[seed] for seed in floors.index if seed in curves]


def floor_text(table: pd.DataFrame) -> str:
    """Return the mean accuracy of networks whose units are all linear."""
    floors = table[table["mode"] == "floor"].accuracy
    return f"all linear: {floors.mean():.1%}" if len(floors) else "all linear: not measured"


def stays_accurate(table: pd.DataFrame) -> Decision:
    """Test whether the best ω linearises many units at a small loss, where the task needs them.

    Many means at least `MIN_LINEAR_FRACTION` of the units, small means at most `MAX_ACCURACY_LOSS`.
    For each seed, the best ω is that of the others. Undecided if a network whose units are all
    linear loses no more.
    """
    changes = {}
    for seed, curve in curves_by_seed(table).items():
        many = curve[(curve["linear-units"] >= MIN_LINEAR_FRACTION) & curve.omega.notna()]
        changes[seed] = many.set_index("omega").accuracy - curve.accuracy.iloc[0]
    gains = pd.DataFrame(changes)
    chosen = []
    for name, gain in gains.items():
        own = gain.dropna()
        # The ω that is best for this seed would be so partly by chance.
        others = gains.drop(columns=[name]).loc[own.index].mean(axis=1).dropna()
        if len(others):
            chosen.append(float(own.loc[others.index].iloc[others.argmax()]) + MAX_ACCURACY_LOSS)
    decision = conclusive(table, mean_above(chosen))
    floor = mean_above(floor_losses(table), MAX_ACCURACY_LOSS)
    return Decision(None, floor.needed) if decision.agrees and not floor.agrees else decision


def paths_shrink(table: pd.DataFrame, remark: str) -> Verdict:
    """Test whether path lengths fall as ω grows, within each seed."""
    lengths = [curve.pathlength.to_numpy() for curve in curves_by_seed(table).values()]
    return Verdict(
        "The larger ω, the shorter the remaining paths",
        "path length falls under the pressure to be linear",
        " > ".join(f"{length:.2f}" for length in np.mean(lengths, axis=0)),
        conclusive(table, rises_in_networks([-curve for curve in lengths])),
        f"{remark}, the original network first; exact trend test within seeds",
    )
