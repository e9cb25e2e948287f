"""The ladders of the benchmark of measures: networks in an order that is known beforehand.

docs/benchmark.md says why it is known. Every rung is an ordinary subject; which ladder, rung and
seed a recorded cell is of follows from its model, its weights' name and its seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nlbench.studies.networks.ladders import ACTIVATIONS, DEPTHS, GAINS, SLOPES, TWINS

if TYPE_CHECKING:
    from nlbench.subjects.facts import SubjectFacts

    from .study import Context

__all__ = ["LADDERS", "SEEDS", "TWIN_LADDER", "WHOLE", "Ladder", "Rung", "weights_of"]


SEEDS = (0, 1, 2)
WHOLE = len(SLOPES) - 1
"""Rung of `slope` whose ReLUs are whole."""
CNN, FITTED = "ladders/cnn", "ladders/mlp-relu-gain2-depth3"

# Epochs of a full and of a quick study. It takes some 100 to learn wrong labels by heart, and what
# is compared with them is trained as long.
EPOCHS = {"digits": (100, 100), "curves": (250, 60), "post-training": (20, 4), "random": (5, 2)}


@dataclass(frozen=True)
class Rung:
    """Networks of one amount of planted nonlinearity, one a seed.

    Parameters
    ----------
    label : str
        The amount, as docs/benchmark.md has it.
    model : str
        Registered name.
    weights : str
        ``init``, ``trained`` (those that ship), or what is trained, see `weights_of`.
    """

    label: str
    model: str
    weights: str = "init"

    def has(self, subject: SubjectFacts) -> bool:
        """Whether a recorded subject is of this rung, of whatever seed."""
        if subject.model != self.model:
            return False
        label = subject.weights
        if self.weights in ("init", "trained"):
            return label == self.weights
        return re.search(rf"-{re.escape(self.weights)}-seed\d+\.safetensors$", label) is not None


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
        Whether the order is known by construction, not from a paper.
    is_affine : bool
        Whether the networks of the first rung are affine.
    quick : tuple of int
        Which rungs a quick study has; empty: all.
    only_full : bool
        Whether a quick study leaves it out.
    seeds : tuple of int
    settings : mapping of str to value
        Of the run.
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
        """The rungs that are measured."""
        return tuple(self.rungs[i] for i in self.quick) if quick and self.quick else self.rungs

    def rung_of(self, subject: SubjectFacts) -> int:
        """Number of the rung that a recorded subject is of, from 0 for the least nonlinear.

        Raises
        ------
        ValueError
            If it is of none.
        """
        for number, rung in enumerate(self.rungs):
            if rung.has(subject):
                return number
        raise ValueError(f"{subject.model} with {subject.weights} is on no rung")


def weights_of(context: Context, ladder: Ladder, rung: Rung, seed: int) -> str:
    """Ask for the weights of a rung's network, if they are to be trained.

    Parameters
    ----------
    context : Context
        A quick study's trainings are shorter and named so.
    ladder : Ladder
    rung : Rung
        Of whose weights ``plain`` is the training on the digits, ``noise0.4`` the same on
        wrong labels, ``shifted`` with augmentation; ``omega0.01`` and ``random0.5`` are made of
        the plain one; ``sine3`` and ``kinks2`` are fits.
    seed : int

    Returns
    -------
    str
        What a request takes.
    """
    if rung.weights in ("init", "trained"):
        return rung.weights
    kind, amount = re.fullmatch(r"([a-z]+)([\d.]*)", rung.weights).groups()  # type: ignore[union-attr]
    is_short = context.quick and kind not in ("plain", "noise", "shifted")
    name = f"quick-{rung.weights}" if is_short else rung.weights

    def epochs(which: str) -> int:
        return EPOCHS[which][int(context.quick)]

    def train(recipe: str, model: str = CNN, data: str = "digits", **changes: Any) -> str:
        return str(context.trained(model, data, recipe, seed, name=name, **changes))

    if kind in ("sine", "kinks"):
        options = {"target": kind, "k": int(amount)}
        return train(
            "adam", FITTED, "curves", options=options, epochs=epochs("curves"), learning_rate=0.01
        )
    if kind in ("omega", "random"):
        start = weights_of(context, ladder, Rung("", CNN, "plain"), seed)
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
"""By name, in the order of docs/benchmark.md."""

TWIN_LADDER = Ladder(
    "twins",
    "random",
    tuple(Rung(twin, f"ladders/twin-{twin}") for twin in TWINS),
    settings={"random.shape": "8"},
)
"""No ladder: networks that are one function, for what shouldn't matter."""
