"""Linearised networks: accuracy vs. path length, and the nonlinear units in each layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlbench.errors import one_line

from .layout import Identity, NamedRun, Table
from .text import count, number

if TYPE_CHECKING:
    from nlbench.measure import Result

MODES = {
    "post-training": "linearised after training",
    "from-start": "linearised from the start",
    "random": "random units linear",
}
_MEASURES = ("accuracy", "pathlength", "linear-units")
_MAX_PANELS = 6


@dataclass(frozen=True)
class Network:
    """One network in a run of ``nlbench linearize``.

    Parameters
    ----------
    mode : str
        ``reference``, ``post-training``, ``from-start`` or ``random``.
    omega : float
        0 for a reference.
    accuracy, length, linear : float
        Accuracy in [0, 1]; path length; fraction of linear units.
    layers : mapping of str to (float, float)
        Number of nonlinear units and of all units, keyed by layer.
    """

    mode: str
    omega: float
    seed: int
    accuracy: float
    length: float
    linear: float
    layers: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class LinearisedFamily:
    """Networks that differ only in mode, ω and seed."""

    label: str
    networks: tuple[Network, ...]

    def groups(self, mode: str) -> list[tuple[float, list[Network]]]:
        """Return the networks of a mode grouped by ω, in increasing order."""
        groups: dict[float, list[Network]] = {}
        for network in sorted(self.networks, key=lambda n: n.omega):
            if network.mode == mode:
                groups.setdefault(network.omega, []).append(network)
        return list(groups.items())


@dataclass(frozen=True)
class Tradeoff:
    """Table, sentences and figure data for a family, as shown on the page."""

    label: str
    content: Mapping[str, Any]
    table: Table
    sentences: tuple[str, ...]


def tradeoffs(runs: Sequence[NamedRun]) -> list[Tradeoff]:
    """Collect the families in all runs of ``nlbench linearize``."""
    shown = []
    for family in families(runs):
        reference = [100 * n.accuracy for n in family.networks if n.mode == "reference"]
        content = {
            "label": family.label,
            "seeds": len({network.seed for network in family.networks}),
            "reference": statistics.fmean(reference) if reference else None,
            "modes": _curves(family),
            "shape": _shape(family),
        }
        shown.append(
            Tradeoff(family.label, content, _table(family), tuple(comparison_sentences(family)))
        )
    return shown


def families(runs: Sequence[NamedRun]) -> list[LinearisedFamily]:
    """Collect linearised networks by run, model and dataset."""
    members: dict[str, list[Network]] = {}
    for run in runs:
        subjects = run.manifest.get("subjects") or []
        if not any(_parse_header(subject)[0] in MODES for subject in subjects):
            continue
        for identity, subject in run.subjects.items():
            results = [_result(run, identity, name) for name in _MEASURES]
            if None in results:
                continue
            label = f"{subject['model']} on {subject['data']}"
            label += f" ({run.name})" if len(runs) > 1 else ""
            accuracy, length, linear = (r.summary["value"] for r in results if r is not None)
            layers = {
                value.place: (value.statistics["nonlinear"], value.statistics["units"])
                for value in (results[2].values if results[2] else ())
                if value.status == "ok" and "nonlinear" in value.statistics
            }
            network = Network(*_parse_header(subject), accuracy, length, linear, layers)
            members.setdefault(label, []).append(network)
    return [
        LinearisedFamily(one_line(label), tuple(networks))
        for label, networks in members.items()
        if any(network.mode in MODES for network in networks)
    ]


def _parse_header(subject: Mapping[str, Any]) -> tuple[str, float, int]:
    """Parse a network's training mode, ω and seed from its checkpoint's header."""
    header, own_seed = subject.get("weights_metadata") or {}, int(subject.get("seed", 0))
    try:
        seed = int(header.get("seed", own_seed))
        if "omega" not in header:
            return "reference", 0.0, seed
        mode = "random" if "random" in header else str(header.get("recipe", ""))
        return mode, float(header["omega"]), seed
    except (TypeError, ValueError):  # Another program wrote the checkpoint.
        return "reference", 0.0, own_seed


def _result(run: NamedRun, subject: Identity, measure: str) -> Result | None:
    """Return the result of a measure if it has a value."""
    record = run.cells.get((*subject, measure))
    return record.result if record and "value" in record.result.numbers else None


def comparison_sentences(family: LinearisedFamily) -> Iterator[str]:
    """Compare the accuracy of the modes at equal path length, one sentence per mode.

    The means over seeds for post-training networks are interpolated linearly at those path lengths
    of the other mode that lie within their range.
    """
    post_training = _curve(family, "post-training")
    for mode in ("from-start", "random"):
        # Without a penalty, both modes produce the same network.
        other = _curve(family, mode, above=0.0)
        if len(post_training) < 2 or not other:
            continue
        lengths, accuracies = zip(*sorted(post_training), strict=True)
        differences = [
            (accuracy - float(np.interp(length, lengths, accuracies))) / 100
            for length, accuracy in other
            if lengths[0] <= length <= lengths[-1]
        ]
        name = {"random": "with random units linear"}.get(mode, MODES[mode])
        if not differences:
            yield f"Path lengths of networks {name} and linearised after training don't overlap."
            continue
        better = sum(difference < 0 for difference in differences)
        mean = -100 * statistics.fmean(differences)
        yield (
            "At the same path length, networks linearised after training are more accurate than "
            f"those {name} at {better} of {count(len(differences), 'value')} of ω; the mean "
            f"difference is {mean:+.2f} percentage points."
        )


def _points(group: Sequence[Network]) -> NDArray[np.float64]:
    """Return path length, accuracy and fraction of linear units, the latter in percent."""
    return np.array([(n.length, 100 * n.accuracy, 100 * n.linear) for n in group])


def _curve(family: LinearisedFamily, mode: str, above: float = -1.0) -> list[tuple[float, float]]:
    """Return the mean path length and accuracy for each ω."""
    means = [_points(group).mean(0) for omega, group in family.groups(mode) if omega > above]
    return [(float(length), float(accuracy)) for length, accuracy, _ in means]


def _curves(family: LinearisedFamily) -> list[dict[str, Any]]:
    """Return the points of each mode and ω, their means and deviations, and these as text."""
    curves = []
    for mode in MODES:
        groups = []
        for omega, group in family.groups(mode):
            points = _points(group)[:, :2]
            means = points.mean(0).tolist()
            text = f"path length {number(means[0])}, accuracy {number(means[1], 1)} %"
            groups.append([omega, points.tolist(), means, points.std(0).tolist(), text])
        if groups:
            curves.append({"mode": mode, "groups": groups})
    return curves


def _shape(family: LinearisedFamily) -> dict[str, Any]:
    """Return the fraction of nonlinear units in each layer, for a few values of ω."""
    mode = "post-training" if family.groups("post-training") else "from-start"
    groups = [(omega, group) for omega, group in family.groups(mode) if group[0].layers]
    groups = groups or [(o, g) for o, g in family.groups("random") if g[0].layers]
    if len(groups) > _MAX_PANELS:
        shown = np.linspace(0, len(groups) - 1, _MAX_PANELS).round().astype(int)
        groups = [groups[i] for i in shown]
    layers = groups[0][1][0].layers if groups else {}
    panels = []
    for omega, group in groups:
        parts = [[n.layers[layer][0] / n.layers[layer][1] for layer in layers] for n in group]
        shares = np.mean(parts, axis=0).tolist()
        panels.append([omega, shares, [f"{number(100 * share, 1)} %" for share in shares]])
    return {
        "layers": [[name, int(units)] for name, (_, units) in layers.items()],
        "groups": panels,
    }


def _table(family: LinearisedFamily) -> Table:
    head = ("mode", "ω", "seeds", "accuracy, %", "linear units, %", "path length")
    rows = []
    for mode in ("reference", *MODES):
        for omega, group in family.groups(mode):
            points = _points(group)
            texts = [f"{mean:.2f}" for mean in points.mean(0)]
            if len(group) > 1:
                spreads = points.std(0)
                texts = [f"{t} ± {spread:.2f}" for t, spread in zip(texts, spreads, strict=True)]
            length, accuracy, linear = texts
            name = "" if mode == "reference" else f"{omega:g}"
            rows.append((mode, name, str(len(group)), accuracy, linear, length))
    return Table(head, tuple(rows), 2, True)
