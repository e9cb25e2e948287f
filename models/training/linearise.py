"""Linearise networks by means of a sparsity penalty and measure what remains nonlinear.

The checkpoints are in the subfolder ``checkpoints`` of the run's folder. Their headers record how
they were trained, and any measure can be applied to them. The recipes are in
`linearisation_recipes`; the penalty is `nlbench.models.sparsified.penalty`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import nlbench
from nlbench import registry
from nlbench.errors import NotFinite, RequestError
from nlbench.options import OptionValue
from nlbench.parsers import MAX_WEIGHT, unique
from nlbench.progress import Progress, ProgressMonitor
from nlbench.request import Request
from nlbench.runner import preview
from nlbench.store.run import Run
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights_choice import choose_weights, training_failure

from .parallel import train_networks
from .recipes import WEIGHT_TEXT
from .train import TrainingFolder, check_training, record_failure
from .training_request import TrainingRequest

MEASURES = ("accuracy", "linear-units", "pathlength")


@dataclass(frozen=True)
class LinearisationRequest:
    """A request to linearise a network with several values of ω and seeds.

    Parameters
    ----------
    training : TrainingRequest
        How each network is linearised; ω and the seed replace its own. Its recipe is a
        `nlbench.models.training.linearisation_recipes.Linearisation`. Its weights, for a recipe
        that starts from trained ones, may be ``auto``: bundled trained weights if there are any,
        else a training run per seed.
    base_recipe : str
        Registered recipe for networks that must be trained first.
    omegas : tuple of float
        Weights of the penalty.
    control : bool
        Add a control for each network, with the same number of linear units, drawn at random.
    """

    training: TrainingRequest
    base_recipe: str
    omegas: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    control: bool = False

    def __post_init__(self) -> None:
        weights = self.training.weights
        for omega in self.omegas:
            if not 0 <= omega <= MAX_WEIGHT:
                raise RequestError(f"omega is {omega}, expected {WEIGHT_TEXT}")
        if self.control and self.training.changes.get("layerwise"):
            raise RequestError("the random control requires one slope per channel, not per layer")
        if self.control and not self.starts_trained:
            raise RequestError("the random control requires --post-training")
        if weights in ("init", "calibrated"):
            raise RequestError(
                f"--weights {weights}: use --from-start to linearise initial weights"
            )
        if weights != "auto" and not self.starts_trained:
            raise RequestError(f"--weights {weights}: --from-start starts from initial weights")

    @property
    def starts_trained(self) -> bool:
        """True if the recipe starts from trained weights."""
        recipe = registry.load("recipes", self.training.recipe)
        return bool(getattr(recipe, "starts_trained", False))

    def linearisation(
        self, omega: float, seed: int, weights: str, **changes: Any
    ) -> TrainingRequest:
        """Return the request to linearise one network."""
        changes = {**self.training.changes, "omega": omega, **changes}
        return replace(self.training, seed=seed, weights=weights, changes=changes)


def linearise(
    request: LinearisationRequest,
    out: str | Path,
    *,
    settings: Mapping[str, OptionValue | str] | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Run:
    """Linearise a network for each ω and seed, then measure all of them in one run.

    Finished training runs are skipped and interrupted ones resumed.

    Returns
    -------
    Run
        Run of the measures ``accuracy`` (on the whole test split), ``linear-units`` and
        ``pathlength``. The ``weights_metadata`` of a subject has its recipe, ω and seed. The cells
        of a network whose training failed are ``skipped``, with the reason.

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out, or the folder belongs to a different kind of run.
    nlbench.NotFinite
        If no network could be trained.
    """
    folder = Path(out)
    training = request.training
    options = {f"{training.data}.{name}": value for name, value in training.options}
    options |= {f"{training.model}.{name}": value for name, value in training.arguments}
    measurement = Request(
        MEASURES,
        (training.model,),
        (training.data,),
        ("init",),
        samples=0,
        device=training.device,
        settings={**options, **(settings or {})},
    )
    # Validate the request before training the first network.
    preview(measurement, folder)
    weights = _train_all(request, folder / "checkpoints", progress, command)
    measurement = replace(measurement, weights=tuple(weights))
    return nlbench.run(measurement, folder, progress=progress, command=command)


def _train_all(
    request: LinearisationRequest, folder: Path, progress: Progress | None, command: str
) -> list[str]:
    """Train the networks and return their weights.

    References come first, and networks that failed are included.
    """
    if not folder.is_dir():
        warning = check_training(request.linearisation(request.omegas[0], 0, "init"))
        if warning:
            ProgressMonitor(progress).warn(f"{request.training.model}: {warning}")
    starts, references = _starts(request, folder)
    prefix = "" if request.starts_trained else "start-"
    networks = {
        _file(folder, prefix, omega, seed): (omega, seed, start)
        for omega in request.omegas
        for seed, start in starts.items()
    }
    linearised = {file: request.linearisation(*network) for file, network in networks.items()}
    failures = _train(references | linearised, progress, command)
    weights = unique(starts.values()) if request.starts_trained else []
    controls = {}
    for file, (omega, seed, start) in networks.items():
        weights.append(str(file))
        if not request.control:
            continue
        summary = TrainingFolder(file, linearised[file]).finished()
        control = _file(folder, "random-", omega, seed)
        weights.append(str(control))
        share = summary.scores["linear_share"] if summary else 0.0
        training = request.linearisation(omega, seed, start, random_share=share)
        if summary:
            controls[control] = training
        else:
            reason = f"it needs {file.stem}, whose training failed: {training_failure(file)}"
            record_failure(control, training, reason)
    failures += _train(controls, progress, command)
    if failures and not any(Path(file).is_file() for file in weights):
        raise failures[0]
    return weights


def _starts(
    request: LinearisationRequest, folder: Path
) -> tuple[dict[int, str], dict[Path, TrainingRequest]]:
    """Return the initial weights for each seed, and the training requests that they require."""
    if not request.starts_trained:
        return dict.fromkeys(request.seeds, "init"), {}
    training = request.training
    spec = SubjectSpec(training.model, training.weights, training.data, options=training.options)
    choice = choose_weights(spec)
    if choice.file is not None:
        path = f"{choice.file}#{choice.key}".removesuffix("#")
        weights = "trained" if choice.label == "trained" else path
        return dict.fromkeys(request.seeds, weights), {}
    base = replace(training, recipe=request.base_recipe, weights="init", changes={})
    files = {seed: folder / f"reference-seed{seed}.safetensors" for seed in request.seeds}
    return {seed: str(file) for seed, file in files.items()}, {
        file: replace(base, seed=seed) for seed, file in files.items()
    }


def _file(folder: Path, prefix: str, omega: float, seed: int) -> Path:
    # Include all digits of ω so that different values have different names.
    number = str(omega).removesuffix(".0")
    return folder / f"{prefix}omega{number}-seed{seed}.safetensors"


def _train(
    requests: Mapping[Path, TrainingRequest], progress: Progress | None, command: str
) -> list[NotFinite]:
    """Train networks. If any diverges, warn and return the first error."""
    try:
        train_networks(
            requests, threads=torch.get_num_threads(), progress=progress, command=command
        )
    except NotFinite as error:
        ProgressMonitor(progress).warn(str(error))
        return [error]
    return []
