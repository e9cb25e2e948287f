"""Ladders for the benchmark of measures: networks whose order is known in advance.

docs/benchmark.md explains how it is known. Every rung is an ordinary subject; recorded cells are
assigned to ladders, rungs and seeds by model, weights and seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nlbench.studies.framework import Context
from nlbench.studies.networks.held_out import NAMES, draw
from nlbench.studies.networks.planted import ACTIVATIONS, DEPTHS, GAINS, MAPS, SLOPES, TWINS
from nlbench.subjects.facts import SubjectFacts

Kind = Literal["planted", "regime", "published"]

TRAINED_SEEDS = tuple(range(5))
QUICK_SEEDS = (0, 1, 2)
PUBLISHED_SEEDS = tuple(range(8))
TENT_SEEDS = tuple(range(12))
"""Ladders with two rungs need this many seeds to be significant after Holm's correction."""
POINTS = 100_000
"""Number of points from which each seed draws its samples; two seeds share half a percent."""
CNN = "ladders/cnn"
FITTED = "ladders/mlp-relu-gain2-depth3"
MIN_EXPLAINED = 0.99
"""Minimum fraction of a target's variance that a fitted network must explain."""

# Memorising wrong labels takes about 100 epochs; the networks compared with these are trained for
# equally long.
EPOCHS = {"plain": 100, "noise": 100, "shifted": 100, "sine": 600, "omega": 20, "random": 5}

QUICK = ("relu", "cubic", "sine", "zigzag", "residual", "attention", "sums", "tent")
"""Ladders in a quick study."""

QUESTIONS: Mapping[str, str] = {
    "activations": "How nonlinear are a network's activations?",
    "function": "How nonlinear is the function that a network computes?",
    "network": "How much of a network is nonlinear: its branches, attention, units?",
    "pairs": "Does the measure follow the function where the activations alone are misleading?",
}
"""Questions that a measure may answer, by group of ladders."""
QUESTION_BY_FORM = {"units": "activations", "function": "function", "branches": "network"}
"""Questions of held-out ladders, by form."""


@dataclass(frozen=True)
class Rung:
    """Networks with one amount of planted nonlinearity, one per seed.

    Parameters
    ----------
    label : str
        Amount of nonlinearity, as in docs/benchmark.md.
    model : str
        Registered name.
    weights : str
        ``init`` or the name of a training run; see `request_weights`.
    """

    label: str
    model: str
    weights: str = "init"

    def contains(self, subject: SubjectFacts) -> bool:
        """Return True if a recorded subject is on this rung, regardless of its seed."""
        if subject.model != self.model:
            return False
        if self.weights == "init":
            return subject.weights == self.weights
        model = re.escape(self.model.replace("/", "-"))
        weights = re.escape(self.weights)
        return bool(re.fullmatch(rf"{model}-\w+-{weights}-seed\d+\.safetensors", subject.weights))


@dataclass(frozen=True)
class Ladder:
    """Rungs in order, from the least to the most nonlinear.

    Parameters
    ----------
    data : str
        Registered dataset.
    question : str
        Key of `QUESTIONS`; empty unless the ladder is planted.
    kind : {"planted", "regime", "published"}
        Planted: the order is known by construction. Regime: a parameter of the network varies, but
        the order is not known. Published: a paper claims the order.
    is_affine : bool
        True if the networks of the first rung, and each of their units, are affine.
    settings : mapping of str to value
        Settings of the run.
    """

    name: str
    data: str
    rungs: tuple[Rung, ...]
    question: str = ""
    kind: Kind = "planted"
    is_affine: bool = False
    seeds: tuple[int, ...] = tuple(range(8))
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """True if a rung's networks are trained."""
        return any(rung.weights != "init" for rung in self.rungs)

    def find_rung(self, subject: SubjectFacts) -> int:
        """Return the index of a recorded subject's rung. Rung 0 is the least nonlinear."""
        for index, rung in enumerate(self.rungs):
            if rung.contains(subject):
                return index
        raise ValueError(f"{subject.model} with {subject.weights} is on no rung")


def request_weights(context: Context, rung: Rung, seed: int) -> str:
    """Return the weights for a network on a rung, requesting their training if needed.

    Trained weights are ``plain`` (on digits), ``noise0.4`` (on wrong labels), ``shifted`` (on
    translated images), ``omega0.01`` or ``random0.5`` (linearised, starting from plain ones) and
    ``sine3`` (fitted).
    """
    if rung.weights == "init":
        return rung.weights
    kind, amount = re.fullmatch(r"([a-z]+)([\d.]*)", rung.weights).groups()  # type: ignore[union-attr]
    model = rung.model
    data = "digits"
    recipe = "adam"
    changes: dict[str, Any] = {"epochs": EPOCHS[kind]}
    if kind == "sine":
        model = FITTED
        data = "curves"
        changes |= {"options": {"k": int(amount)}, "learning_rate": 0.01}
    elif kind in ("omega", "random"):
        recipe = "post-training"
        changes["weights"] = request_weights(context, Rung("", CNN, "plain"), seed)
        changes["omega" if kind == "omega" else "random_share"] = float(amount)
    elif kind == "noise":
        changes["label_noise"] = float(amount)
    elif kind == "shifted":
        changes |= {"shift": 4, "weight_decay": 5e-4}
    return str(context.request_training(model, data, recipe, seed, name=rung.weights, **changes))


def drawn_points(shape: int) -> dict[str, Any]:
    """Return options for a distribution from which each seed draws its own points."""
    return {"shape": str(shape), "spacing": "random", "count": POINTS}


def _constructed(
    name: str,
    question: str,
    amounts: Sequence[float],
    data: str = "normal/0:1",
    shape: int = 8,
    **fields: Any,
) -> Ladder:
    rungs = tuple(Rung(f"{amount:g}", f"ladders/{name}-{amount:g}") for amount in amounts)
    family = data.partition("/")[0]
    settings = {f"{family}.{option}": value for option, value in drawn_points(shape).items()}
    return Ladder(name, data, rungs, question, **{"is_affine": True, **fields}, settings=settings)


def _regime(kind: str, activation: str) -> Ladder:
    amounts = GAINS if kind == "gain" else DEPTHS
    shape = "gain{:g}-depth3" if kind == "gain" else "gain3-depth{:g}"
    rungs = tuple(Rung(f"{a:g}", f"ladders/mlp-{activation}-{shape.format(a)}") for a in amounts)
    return Ladder(f"{kind}-{activation}", "grid", rungs, kind="regime")


def _trained(
    name: str, rungs: Sequence[Rung], kind: Kind = "planted", data: str = "digits", **fields: Any
) -> Ladder:
    question = "network" if kind == "planted" else ""
    fields = {"question": question, "seeds": TRAINED_SEEDS, **fields}
    return Ladder(name, data, tuple(rungs), **fields, kind=kind)


def _amounts(kind: str, amounts: Sequence[float], model: str = CNN) -> list[Rung]:
    return [Rung(f"{amount:g}", model, f"{kind}{amount:g}") for amount in amounts]


_FRACTIONS = (0, 0.25, 0.5, 0.75, 1)
_PLAIN = Rung("0", CNN, "plain")

LADDERS: Mapping[str, Ladder] = {
    ladder.name: ladder
    for ladder in (
        *(
            _constructed(name, "activations", _FRACTIONS)
            for name in ("relu", "gelu", "silu", "tanh")
        ),
        _constructed("softplus", "activations", (0.125, 0.5, 1, 2, 8), is_affine=False),
        _constructed("swish", "activations", (0, 0.25, 0.5, 1, 4)),
        _constructed("cubic", "function", _FRACTIONS),
        _constructed("degree", "", (1, 2, 3, 4), kind="regime"),
        _constructed("sine", "function", (1, 2, 3, 4), "interval/-1:1", 4, is_affine=False),
        _constructed("product", "", (1, 2, 3, 4), kind="regime"),
        _constructed("spiral", "function", (0, 0.125, 0.25, 0.5)),
        # Affine on the samples, but with a kink at the end of their interval.
        _constructed("zigzag", "function", (0, 1, 2, 4, 8), "interval/-1:1", 4, is_affine=False),
        _constructed("tents", "function", (0, 1, 2, 3, 4), "interval/0:1", 4),
        _trained("fitted", _amounts("sine", (1, 2, 3), FITTED), data="curves", question="function"),
        _constructed("residual", "network", (0, 0.1, 0.25, 0.5, 1), is_affine=False),
        _constructed("attention", "network", (0, 1, 2, 4, 8), shape=48),
        _trained(
            "slope",
            # Slope 0 is a ReLU: the networks of other ladders.
            [Rung(f"{s:g}", f"ladders/cnn-slope{s:g}" if s else CNN, "plain") for s in SLOPES],
            is_affine=True,
        ),
        _trained("random", _amounts("random", (1, 0.75, 0.5, 0.25, 0)), is_affine=True),
        _trained("omega", _amounts("omega", (0.01, 0.003, 0.001, 0.0003, 0))),
        _constructed("sums", "pairs", (0, 0.5, 1), is_affine=False),
        _constructed("wiggle", "pairs", (0, 0.5, 1)),
        _constructed("tent", "pairs", (0, 5), "interval/0:1", 1, seeds=TENT_SEEDS, is_affine=False),
        *(_regime(kind, name) for kind in ("gain", "depth") for name in ACTIVATIONS),
        _trained("noise", [_PLAIN, *_amounts("noise", (0.1, 0.2, 0.3, 0.4))], "published"),
        _trained(
            "trained",
            [Rung("initialised", CNN), Rung("trained", CNN, "plain")],
            "published",
            seeds=PUBLISHED_SEEDS,
        ),
        _trained(
            "augmented",
            [Rung("shifted", CNN, "shifted"), Rung("plain", CNN, "plain")],
            "published",
            seeds=PUBLISHED_SEEDS,
        ),
    )
}
"""Ladders by name, in the order of docs/benchmark.md."""

HELD_OUT: Mapping[str, Ladder] = {
    name: _constructed(name, QUESTION_BY_FORM[draw(name).form], _FRACTIONS, seeds=TRAINED_SEEDS)
    for name in NAMES
}
"""Ladders drawn after the recommendations of docs/benchmark.md.

See `held_out.draw`.
"""

TWIN_LADDER = Ladder(
    "twins",
    "random",
    tuple(Rung(twin, f"ladders/twin-{twin}") for twin in TWINS),
    seeds=QUICK_SEEDS,
    settings={"random.shape": "8"},
)
"""Variants of one function, for the tests of invariance; they have no order."""

AFFINE_MAPS = Ladder(
    "maps",
    "exponential/0:1",
    tuple(Rung(name, f"ladders/map-{index}") for index, name in enumerate(MAPS)),
    seeds=QUICK_SEEDS,
    settings={f"exponential.{name}": value for name, value in drawn_points(16).items()},
)
"""Affine maps as activations on skewed samples; they have no order."""
