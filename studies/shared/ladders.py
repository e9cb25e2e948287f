"""Ladders of the benchmark of measures: networks in an order that is known in advance.

docs/benchmark.md explains why it is known. Every rung is an ordinary subject; a recorded cell is
assigned to its ladder, rung and seed by its model, the name of its weights and its seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nlbench.studies.networks.planted import ACTIVATIONS, DEPTHS, GAINS, SLOPES, TWINS

if TYPE_CHECKING:
    from nlbench.studies.framework import Context
    from nlbench.subjects.facts import SubjectFacts

__all__ = ["LADDERS", "RELU_RUNG", "SEEDS", "TWIN_LADDER", "Ladder", "Rung", "weights_of"]


SEEDS = (0, 1, 2)
RELU_RUNG = len(SLOPES) - 1
"""Rung of `slope` with plain ReLUs."""
CNN, FITTED = "ladders/cnn", "ladders/mlp-relu-gain2-depth3"

# Epochs of a full and a quick study. Memorising wrong labels takes about 100; networks that are
# compared with them are trained as long.
EPOCHS = {"digits": (100, 100), "curves": (250, 60), "post-training": (20, 4), "random": (5, 2)}


@dataclass(frozen=True)
class Rung:
    """Networks with one amount of planted nonlinearity, one per seed.

    Parameters
    ----------
    label : str
        The amount, as in docs/benchmark.md.
    model : str
        Registered name.
    weights : str
        ``init``, ``trained`` (shipped) or the name of a training, see `weights_of`.
    """

    label: str
    model: str
    weights: str = "init"

    def has(self, subject: SubjectFacts) -> bool:
        """Return True if a recorded subject is on this rung, with any seed."""
        if subject.model != self.model:
            return False
        if self.weights in ("init", "trained"):
            return subject.weights == self.weights
        pattern = rf"-{re.escape(self.weights)}-seed\d+\.safetensors$"
        return re.search(pattern, subject.weights) is not None


@dataclass(frozen=True)
class Ladder:
    """Rungs from the least to the most nonlinear.

    Parameters
    ----------
    name : str
    data : str
        Registered dataset.
    rungs : tuple of Rung
    is_planted : bool
        True if the order is known by construction, False if a paper claims it.
    is_affine : bool
        True if the networks of the first rung are affine.
    quick : tuple of int
        Rungs of a quick study; empty for all.
    only_full : bool
        True if a quick study leaves the ladder out.
    seeds : tuple of int
    settings : mapping of str to value
        Settings of the run.
    """

    name: str
    data: str
    rungs: tuple[Rung, ...]
    is_planted: bool = True
    is_affine: bool = False
    quick: tuple[int, ...] = ()
    only_full: bool = False
    seeds: tuple[int, ...] = SEEDS
    settings: Mapping[str, Any] = field(default_factory=dict)

    def chosen(self, *, quick: bool) -> tuple[Rung, ...]:
        """Return the rungs of a full or a quick study."""
        return tuple(self.rungs[i] for i in self.quick) if quick and self.quick else self.rungs

    def rung_of(self, subject: SubjectFacts) -> int:
        """Return the number of a recorded subject's rung, from 0 for the least nonlinear."""
        for number, rung in enumerate(self.rungs):
            if rung.has(subject):
                return number
        raise ValueError(f"{subject.model} with {subject.weights} is on no rung")


def weights_of(context: Context, rung: Rung, seed: int) -> str:
    """Return the weights of a rung's network, requesting their training if needed.

    Trained weights are ``plain`` (on the digits), ``noise0.4`` (on wrong labels), ``shifted`` (with
    augmentation), ``omega0.01`` or ``random0.5`` (linearised from the plain ones), ``sine3`` or
    ``kinks2`` (fitted). Trainings of a quick study are shorter and have different names.
    """
    if rung.weights in ("init", "trained"):
        return rung.weights
    kind, amount = re.fullmatch(r"([a-z]+)([\d.]*)", rung.weights).groups()  # type: ignore[union-attr]
    is_short = context.quick and kind not in ("plain", "noise", "shifted")
    name = f"quick-{rung.weights}" if is_short else rung.weights

    def epochs(kind: str) -> int:
        return EPOCHS[kind][int(context.quick)]

    def train(recipe: str, model: str = CNN, data: str = "digits", **changes: Any) -> str:
        return str(context.request_training(model, data, recipe, seed, name=name, **changes))

    if kind in ("sine", "kinks"):
        options = {"target": kind, "k": int(amount)}
        return train(
            "adam", FITTED, "curves", options=options, epochs=epochs("curves"), learning_rate=0.01
        )
    if kind in ("omega", "random"):
        start = weights_of(context, Rung("", CNN, "plain"), seed)
        if kind == "omega":
            steps = epochs("post-training")
            return train("post-training", weights=start, omega=float(amount), epochs=steps)
        return train(
            "post-training", weights=start, random_share=float(amount), epochs=epochs("random")
        )
    changes: dict[str, Any] = {"epochs": epochs("digits")}
    if kind == "noise":
        changes["label_noise"] = float(amount)
    if kind == "shifted":
        changes |= {"shift": 4, "flip": True, "weight_decay": 5e-4}
    return train("adam", **changes)


def _random_perceptrons(name: str, kind: str) -> Ladder:
    amounts = GAINS if kind == "gain" else DEPTHS
    shape = "gain{}-depth3" if kind == "gain" else "gain3-depth{}"
    rungs = tuple(
        Rung(f"{amount:g}", f"ladders/mlp-{name}-{shape.format(f'{amount:g}')}")
        for amount in amounts
    )
    return Ladder(f"{kind}-{name}", "grid", rungs, quick=(0, 2, 4), seeds=tuple(range(5)))


def _trained(kind: str, amounts: tuple[float, ...]) -> tuple[Rung, ...]:
    model = FITTED if kind in ("sine", "kinks") else CNN
    return tuple(Rung(f"{amount:g}", model, f"{kind}{amount:g}") for amount in amounts)


_NOISE = (Rung("0", CNN, "plain"), *_trained("noise", (0.1, 0.2, 0.3, 0.4)))

LADDERS = {
    ladder.name: ladder
    for ladder in (
        Ladder(
            "slope",
            "digits",
            tuple(Rung(f"{s:g}", f"ladders/cnn-slope{s:g}", "plain") for s in SLOPES),
            is_affine=True,
            quick=(0, 2, 4, 6),
        ),
        Ladder(
            "slope-vgg8",
            "digits",
            tuple(Rung(f"{s:g}", f"ladders/vgg8-slope{s:g}", "trained") for s in SLOPES),
            is_affine=True,
            only_full=True,
        ),
        Ladder(
            "random",
            "digits",
            _trained("random", (1, 0.75, 0.5, 0.25, 0)),
            is_affine=True,
            quick=(0, 2, 4),
        ),
        Ladder(
            "omega", "digits", _trained("omega", (0.01, 0.003, 0.001, 0.0003, 0)), quick=(0, 2, 4)
        ),
        *(_random_perceptrons(name, kind) for kind in ("gain", "depth") for name in ACTIVATIONS),
        Ladder("sine", "curves", _trained("sine", (1, 2, 3, 4)), quick=(0, 1, 3)),
        Ladder("kinks", "curves", _trained("kinks", (0, 1, 2, 3, 5)), quick=(0, 1, 3)),
        Ladder("noise", "digits", _NOISE, is_planted=False, quick=(0, 4)),
        Ladder(
            "trained",
            "digits",
            (Rung("initialised", CNN), Rung("trained", CNN, "plain")),
            is_planted=False,
        ),
        Ladder(
            "augmented",
            "digits",
            (Rung("augmented", CNN, "shifted"), Rung("plain", CNN, "plain")),
            is_planted=False,
            only_full=True,
        ),
    )
}
"""Ladders by name, in the order of docs/benchmark.md."""

TWIN_LADDER = Ladder(
    "twins",
    "random",
    tuple(Rung(twin, f"ladders/twin-{twin}") for twin in TWINS),
    settings={"random.shape": "8"},
)
"""Variants of one function, to test invariances; they have no order."""
