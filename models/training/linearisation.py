"""Linearising networks under a sparsity prior: the recipes, and a run that measures what is left.

The checkpoints lie in the run's folder, under ``checkpoints/``; each says in its header how it
was made, and is a subject of any measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nlbench
from nlbench import registry
from nlbench.errors import NotFinite, RequestError
from nlbench.measure import Source
from nlbench.measures.pathlength import NONLINEAR_ADVANTAGE
from nlbench.models.sparsified.prelu import (
    linear_share,
    parameter_groups,
    penalty,
    randomize,
    snap,
    sparsify,
    transform_metadata,
)
from nlbench.models.sparsified.surgery import in_words, other_activations
from nlbench.options import OptionValue
from nlbench.progress import Monitor, Progress
from nlbench.request import Request
from nlbench.runner import preview
from nlbench.store.run_folder import Run
from nlbench.subjects.load import SubjectSpec, choose_weights
from nlbench.subjects.weights import training_failure

from .recipes import Recipe
from .train import (
    TrainingRequest,
    check_training,
    finished_training,
    give_up,
    run_trainings,
)

__all__ = [
    "MEASURES",
    "Linearisation",
    "LinearisingRequest",
    "from_start",
    "linearise",
    "post_training",
]


@dataclass(frozen=True)
class Linearisation(Recipe):
    """A recipe under which units become linear.

    Every ReLU call becomes a PReLU with one slope α a channel, starting at 0; training
    minimises the loss plus ω Σ |1 − α|^½; a unit within 0.01 of α = 1 is linear for good.

    Parameters
    ----------
    name, epochs, …
        As `Recipe`.
    omega : float
        Weight of the penalty, at least 0.
    slope_rate : float
        Factor of the learning rate for the slopes.
    layerwise : bool
        One slope a layer in place of one a channel.
    starts_trained : bool
        Whether the recipe means to start from trained weights.
    random_share : float
        The control: so large a share of units, drawn at random, is made linear beforehand,
        and no slope moves; below 0: no control.

    Examples
    --------
    >>> recipe = replace(post_training, omega=0.01, epochs=1)
    >>> recipe.omega, recipe.starts_trained
    (0.01, True)
    """

    omega: float = 0.003
    slope_rate: float = 30.0
    layerwise: bool = False
    starts_trained: bool = False
    random_share: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("omega", self.omega >= 0, "at least 0")
        self._check("slope_rate", self.slope_rate > 0, "more than 0")
        self._check("random_share", self.random_share <= 1, "at most 1")

    @property
    def is_control(self) -> bool:
        """Whether random units are linear, whatever the loss says."""
        return self.random_share >= 0

    def check(self, model: nn.Module, example: Tensor) -> str:
        """Refuse a network that can't be linearised; give what is to be known of one that can.

        Raises
        ------
        nlbench.RequestError
            If it calls no ReLU, or can't be sparsified for another reason.
        """
        sparsify(model, layerwise=self.layerwise, example=example)
        others = other_activations(model, example)
        stay = "stay as they are" if sum(others.values()) > 1 else "stays as it is"
        return f"only ReLUs are made linear; {in_words(others)} {stay}" if others else ""

    def prepared(self, model: nn.Module, example: Callable[[], Tensor], seed: int) -> nn.Module:
        """Sparsify a network; for the control, make a random share of its units linear.

        Raises
        ------
        nlbench.RequestError
            If it calls no ReLU, or can't be sparsified for another reason.
        """
        model = sparsify(model, layerwise=self.layerwise, example=example())
        if self.is_control:
            randomize(model, self.random_share, seed)
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Weights, and slopes without decay, with a rate of their own; a control's don't move."""
        weights, slopes = parameter_groups(model, self.weight_decay)
        return (
            [weights] if self.is_control else [weights, slopes | {"rate_factor": self.slope_rate}]
        )

    def penalty(self, model: nn.Module) -> Tensor | None:
        """ω times the distance from linear."""
        return None if self.is_control or not self.omega else self.omega * penalty(model)

    def settle(self, model: nn.Module) -> None:
        """Set to 1 and freeze what has come near 1 or crossed it."""
        if not self.is_control:
            snap(model)

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Share of linear units."""
        return {"linear_share": linear_share(model)}

    def metadata(self) -> dict[str, str]:
        """How the network that the weights fit is made."""
        about = {**transform_metadata(self.layerwise), "omega": str(self.omega)}
        return about | {"random": "true"} if self.is_control else about


post_training = Linearisation(
    name="post-training",
    epochs=20,
    batch_size=64,
    learning_rate=1e-3,
    optimizer="adam",
    schedule="cosine",
    starts_trained=True,
    source=Source(
        citation=NONLINEAR_ADVANTAGE.citation,
        equation=(
            "sparsified PReLU, post-training; optimiser, rates and epochs are ours, chosen on "
            "the digits"
        ),
    ),
)
"""Linearise a trained network under the sparsity prior."""

from_start = replace(
    post_training,
    name="from-start",
    epochs=60,
    starts_trained=False,
    source=Source(
        citation=NONLINEAR_ADVANTAGE.citation,
        equation=(
            "sparsified PReLU, from the start of training; optimiser, rates and epochs are ours"
        ),
    ),
)
"""Train a network under the sparsity prior from its initialisation."""


MEASURES = ("accuracy", "linear-units", "pathlength")


@dataclass(frozen=True)
class LinearisingRequest:
    """What is to be linearised, and how.

    Parameters
    ----------
    model, data : str
        Registered names.
    mode : str
        The registered recipe that is followed, a `Linearisation`.
    base_recipe : str
        The registered recipe of networks that have to be trained first.
    omegas : tuple of float
        Weights of the penalty.
    seeds : tuple of int
    weights : str
        Of a recipe that starts from trained weights: ``trained``, a checkpoint's path, or
        ``auto``: trained where weights ship, else trained first, once a seed.
    control : bool
        Beside each network one of which as many units, drawn at random, are linear.
    layerwise : bool
        One slope a layer in place of one a channel.
    changes : mapping of str to value
        Fields of the recipe that are to be otherwise.
    options : tuple of (str, value)
        Of the dataset.
    device : str

    Raises
    ------
    nlbench.RequestError
        If it can't be carried out.
    """

    model: str
    data: str
    mode: str
    base_recipe: str
    omegas: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    weights: str = "auto"
    control: bool = False
    layerwise: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, OptionValue | str], ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        for omega in self.omegas:
            if not (math.isfinite(omega) and omega >= 0):
                raise RequestError(f"omega is {omega}, expected a number of at least 0")
        if self.control and self.layerwise:
            raise RequestError("the random control needs a slope a channel, not one a layer")
        if self.control and not self.starts_trained:
            raise RequestError("the random control goes with --post-training")
        if self.weights in ("init", "calibrated"):
            raise RequestError(
                f"--weights {self.weights}: initial weights are linearised by --from-start"
            )
        if self.weights != "auto" and not self.starts_trained:
            raise RequestError(
                f"--weights {self.weights}: --from-start begins with initial weights"
            )

    @property
    def starts_trained(self) -> bool:
        """Whether the recipe starts from trained weights."""
        return bool(getattr(registry.load("recipes", self.mode), "starts_trained", False))

    def training(
        self, recipe: str, seed: int, weights: str, changes: Mapping[str, Any]
    ) -> TrainingRequest:
        """How one of the networks is trained."""
        return TrainingRequest(
            self.model,
            self.data,
            recipe,
            seed,
            weights,
            changes=changes,
            options=self.options,
            device=self.device,
        )

    def linearisation(self, omega: float, seed: int, weights: str, **more: Any) -> TrainingRequest:
        """How a network is linearised."""
        changes = {**self.changes, "omega": omega, "layerwise": self.layerwise, **more}
        return self.training(self.mode, seed, weights, changes)


def linearise(
    request: LinearisingRequest,
    out: str | Path,
    *,
    settings: Mapping[str, OptionValue | str] | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Run:
    """Linearise a network for each ω and seed, then measure all of them in one run.

    What the folder already holds is not done again; an interrupted training goes on.

    Parameters
    ----------
    request : LinearisingRequest
    out : path
        The run's folder; it is made, or extended if it is one already.
    settings : mapping of str to value, optional
        Options of the measures.
    progress : Progress, optional
        Told of epochs, then of the run's steps.
    command : str
        The command line, for the manifests.

    Returns
    -------
    Run
        Of the measures ``accuracy`` (on the whole test split), ``linear-units`` and
        ``pathlength``. A subject's ``weights_metadata`` say its recipe, ω and seed. The cells
        of a network whose training failed are ``skipped``, with the reason.

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out, or the folder holds something else.
    nlbench.NotFinite
        If no network could be trained.
    """
    folder = Path(out)
    given = {f"{request.data}.{name}": value for name, value in request.options}

    def asked(weights: tuple[str, ...]) -> Request:
        return Request(
            MEASURES,
            (request.model,),
            (request.data,),
            weights,
            samples=0,
            device=request.device,
            settings={**given, **(settings or {})},
        )

    # What doesn't fit is told before the first training, not after it.
    preview(asked(("init",)), folder)
    made = _trained(request, folder / "checkpoints", progress, command)
    return nlbench.run(asked(tuple(made)), folder, progress=progress, command=command)


def _trained(
    request: LinearisingRequest, folder: Path, progress: Progress | None, command: str
) -> list[str]:
    """Train the networks; give their weights, references first, those of failed trainings too."""
    if not folder.is_dir():
        remark = check_training(request.linearisation(request.omegas[0], 0, "init"))
        if remark:
            Monitor(progress).warn(f"{request.model}: {remark}")
    starts, references = _starts(request, folder)
    networks = {
        _file(folder, "" if request.starts_trained else "start-", omega, seed): (omega, seed, start)
        for omega in request.omegas
        for seed, start in starts.items()
    }
    linearised = {file: request.linearisation(*one) for file, one in networks.items()}
    failures = _train(references | linearised, progress, command)
    weights = list(dict.fromkeys(starts.values())) if request.starts_trained else []
    controls = {}
    for file, (omega, seed, start) in networks.items():
        weights.append(str(file))
        if request.control:
            done = finished_training(linearised[file], file)
            control = _file(folder, "random-", omega, seed)
            weights.append(str(control))
            share = done.scores["linear_share"] if done else 0.0
            training = request.linearisation(omega, seed, start, random_share=share)
            if done:
                controls[control] = training
            else:
                failure = training_failure(file)
                give_up(
                    control, training, f"it needs {file.stem}, whose training failed: {failure}"
                )
    failures += _train(controls, progress, command)
    if failures and not any(Path(file).is_file() for file in weights):
        raise failures[0]
    return weights


def _starts(
    request: LinearisingRequest, folder: Path
) -> tuple[dict[int, str], dict[Path, TrainingRequest]]:
    """Weights that the networks of each seed start from, and what has to be trained for it."""
    start = request.weights if request.starts_trained else "init"
    choice = choose_weights(
        SubjectSpec(request.model, start, request.data, options=request.options)
    )
    if not request.starts_trained:
        return dict.fromkeys(request.seeds, "init"), {}
    if choice.file is not None:
        known = "trained" if choice.label == "trained" else str(choice.file)
        return dict.fromkeys(request.seeds, known), {}
    files = {seed: folder / f"reference-seed{seed}.safetensors" for seed in request.seeds}
    return {seed: str(file) for seed, file in files.items()}, {
        file: request.training(request.base_recipe, seed, "init", {})
        for seed, file in files.items()
    }


def _file(folder: Path, prefix: str, omega: float, seed: int) -> Path:
    # All its digits: two values of ω never share a name.
    number = str(omega).removesuffix(".0")
    return folder / f"{prefix}omega{number}-seed{seed}.safetensors"


def _train(
    requests: Mapping[Path, TrainingRequest], progress: Progress | None, command: str
) -> list[NotFinite]:
    """Train networks; one whose numbers cease to be finite is warned of, and given."""
    try:
        run_trainings(requests, threads=torch.get_num_threads(), progress=progress, command=command)
    except NotFinite as error:
        Monitor(progress).warn(str(error))
        return [error]
    return []
