"""Linearised networks: accuracy vs. path length, and the nonlinear units in each layer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nlbench.errors import one_line

from .environment import Table
from .tables import NamedRun
from .text import number

if TYPE_CHECKING:
    import pandas as pd

MODES = {
    "post-training": "linearised after training",
    "from-start": "linearised from the start",
    "random": "random units linear",
}
_POINT = ["length", "accuracy", "linear"]
_MAX_PANELS = 6


@dataclass(frozen=True)
class Tradeoff:
    """Table and figure data for networks that differ only in mode, ω and seed."""

    label: str
    content: Mapping[str, Any]
    table: Table


def linearised_networks(runs: Sequence[NamedRun]) -> pd.DataFrame:
    """Collect the networks of all runs of ``nlbench linearize``.

    Returns
    -------
    DataFrame
        One row per network: label of the family, mode (``reference`` or one of `MODES`), ω, seed,
        path length, accuracy and fraction of linear units in percent, and the numbers of nonlinear
        and of all units keyed by layer.
    """
    import pandas as pd

    rows = []
    for run in filter(_has_linearised, runs):
        for key, subject in run.subjects.items():
            header = _parse_header(subject)
            cells = [run.cells.get((*key, n)) for n in ("accuracy", "linear-units", "pathlength")]
            results = [cell.result for cell in cells if cell and "value" in cell.result.numbers]
            if len(results) < 3:
                continue
            label = f"{key[0]} on {key[2]}" + (f" ({run.name})" if len(runs) > 1 else "")
            accuracy, linear, length = (result.summary["value"] for result in results)
            layers = {
                value.place: (value.statistics["nonlinear"], value.statistics["units"])
                for value in results[1].values
                if value.status == "ok" and "nonlinear" in value.statistics
            }
            point = (length, 100 * accuracy, 100 * linear)
            rows.append((one_line(label), *header, *point, layers))
    columns = ["label", "mode", "omega", "seed", *_POINT, "layers"]
    return pd.DataFrame(rows, columns=columns)


def _has_linearised(run: NamedRun) -> bool:
    return any(_parse_header(subject)[0] in MODES for subject in run.subjects.values())


def _parse_header(subject: Mapping[str, Any]) -> tuple[str, float, int]:
    """Parse a network's training mode, ω and seed from its checkpoint's header."""
    header = subject.get("weights_metadata") or {}
    own_seed = int(subject.get("seed", 0))
    try:
        seed = int(header.get("seed", own_seed))
        if "omega" not in header:
            return "reference", 0.0, seed
        mode = "random" if "random" in header else str(header.get("recipe", ""))
        return mode, float(header["omega"]), seed
    except (TypeError, ValueError):  # Another program wrote the checkpoint.
        return "reference", 0.0, own_seed


def tradeoffs(runs: Sequence[NamedRun]) -> list[Tradeoff]:
    """Describe the families in all runs of ``nlbench linearize``."""
    if not any(map(_has_linearised, runs)):
        return []  # without pandas, which takes long to import
    shown = []
    for label, family in linearised_networks(runs).groupby("label", sort=False):
        if not family["mode"].isin(list(MODES)).any():
            continue
        reference = family["accuracy"][family["mode"] == "reference"].tolist()
        content = {
            "label": label,
            "seeds": family["seed"].nunique(),
            "reference": statistics.fmean(reference) if reference else None,
            "modes": _curves(family),
            "shape": _shape(family),
        }
        shown.append(Tradeoff(str(label), content, _table(family)))
    return shown


def _by_omega(family: pd.DataFrame, mode: str) -> list[tuple[float, pd.DataFrame]]:
    """Return the networks of a mode for each ω, in increasing order."""
    networks = family[family["mode"] == mode]
    return [(float(str(omega)), group) for omega, group in networks.groupby("omega")]


def _curves(family: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the points of each mode and ω, their means and deviations, and these as text."""
    curves = []
    for mode in MODES:
        packed = []
        for omega, group in _by_omega(family, mode):
            points = group[_POINT[:2]].to_numpy()
            means = points.mean(0).tolist()
            text = f"path length {number(means[0])}, accuracy {number(means[1], 1)} %"
            packed.append([omega, points.tolist(), means, points.std(0).tolist(), text])
        if packed:
            curves.append({"mode": mode, "groups": packed})
    return curves


def _shape(family: pd.DataFrame) -> dict[str, Any]:
    """Return the fraction of nonlinear units in each layer, for a few values of ω."""
    has_late = (family["mode"] == "post-training").any()
    for name in ("post-training" if has_late else "from-start", "random"):
        known = [(o, list(g["layers"])) for o, g in _by_omega(family, name) if g["layers"].iloc[0]]
        if known:
            break
    if len(known) > _MAX_PANELS:
        shown = np.linspace(0, len(known) - 1, _MAX_PANELS).round().astype(int)
        known = [known[i] for i in shown]
    layers = known[0][1][0] if known else {}
    panels = []
    for omega, group in known:
        parts = []
        for network in group:
            parts.append([network[layer][0] / network[layer][1] for layer in layers])
        fractions = np.mean(parts, axis=0).tolist()
        panels.append(
            [omega, fractions, [f"{number(100 * fraction, 1)} %" for fraction in fractions]]
        )
    return {"layers": [[name, int(units)] for name, (_, units) in layers.items()], "groups": panels}


def _table(family: pd.DataFrame) -> Table:
    head = ("mode", "ω", "seeds", "accuracy, %", "linear units, %", "path length")
    rows = []
    for mode in ("reference", *MODES):
        for omega, group in _by_omega(family, mode):
            points = group[_POINT].to_numpy()
            texts = [f"{mean:.2f}" for mean in points.mean(0)]
            if len(group) > 1:
                spreads = points.std(0)
                texts = [f"{t} ± {spread:.2f}" for t, spread in zip(texts, spreads, strict=True)]
            length, accuracy, linear = texts
            name = "" if mode == "reference" else f"{omega:g}"
            rows.append((mode, name, str(len(group)), accuracy, linear, length))
    return Table(head, tuple(rows), 2, True)
