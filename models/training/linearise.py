"""Linearise a network for each ω and seed, and measure what comes of it in an ordinary run.

The checkpoints lie in the run's folder, under ``checkpoints/``; each says in its header how it
was made, and is a subject of any measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nlbench
from nlbench import registry
from nlbench.errors import NotFinite, RequestError
from nlbench.options import OptionValue
from nlbench.progress import Monitor, Progress
from nlbench.request import Request
from nlbench.runner import preview
from nlbench.store.run_folder import Run
from nlbench.subjects.load import SubjectSpec, choose_weights
from nlbench.subjects.weights import training_failure

from .train import (
    Trained,
    TrainingRequest,
    check_training,
    give_up,
    recipe_of,
    run_training,
)

__all__ = ["MEASURES", "LinearisingRequest", "linearise"]


MEASURES = ("accuracy", "linear-units", "pathlength")


@dataclass(frozen=True)
class LinearisingRequest:
    """What is to be linearised, and how.

    Parameters
    ----------
    model, data : str
        Registered names.
    mode : str
        The registered recipe that is followed, a
        `nlbench.models.sparsified.linearisation.Linearisation`.
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
    made = _Trainings(request, folder / "checkpoints", Monitor(progress), command).all()
    return nlbench.run(asked(tuple(map(str, made))), folder, progress=progress, command=command)


class _Trainings:
    """Trains the networks of a request, each after those that it depends on."""

    def __init__(
        self, request: LinearisingRequest, folder: Path, progress: Progress, command: str
    ) -> None:
        self.request, self.folder = request, folder
        self.progress, self.command = progress, command
        self.failures: list[NotFinite] = []
        start = request.weights if request.starts_trained else "init"
        self.choice = choose_weights(
            SubjectSpec(request.model, start, request.data, options=request.options)
        )
        self.trains_first = request.starts_trained and self.choice.file is None

    def all(self) -> list[Path | str]:
        """Give the checkpoints, references first; one whose training failed isn't there."""
        request = self.request
        self._check()
        self.progress.begin(self._epochs())
        made: dict[Path | str, None] = {}
        starts = {seed: self._start(seed) for seed in request.seeds}
        if request.starts_trained:
            made |= dict.fromkeys(starts.values())
        for omega in request.omegas:
            for seed, start in starts.items():
                file = self._file(f"{'' if request.starts_trained else 'start-'}omega", omega, seed)
                made[file] = None
                network = self._train(request.linearisation(omega, seed, str(start)), file)
                if request.control:
                    made[control := self._file("random-omega", omega, seed)] = None
                    share = network.scores["linear_share"] if network is not None else 0.0
                    self._train(
                        request.linearisation(omega, seed, str(start), random_share=share),
                        control,
                        after=file,
                    )
        if self.failures and not any(Path(file).is_file() for file in made):
            raise self.failures[0]
        return list(made)

    def _start(self, seed: int) -> Path | str:
        """Where the networks of a seed start from."""
        if not self.request.starts_trained:
            return "init"
        if self.choice.file is not None:
            return "trained" if self.choice.label == "trained" else self.choice.file
        file = self.folder / f"reference-seed{seed}.safetensors"
        self._train(self.request.training(self.request.base_recipe, seed, "init", {}), file)
        return file

    def _file(self, prefix: str, omega: float, seed: int) -> Path:
        # All its digits: two values of ω never share a name.
        number = str(omega).removesuffix(".0")
        return self.folder / f"{prefix}{number}-seed{seed}.safetensors"

    def _check(self) -> None:
        """Tell before the first training whether the recipe can be followed."""
        if self.folder.is_dir():
            return
        remark = check_training(self.request.linearisation(self.request.omegas[0], 0, "init"))
        if remark:
            self.progress.warn(f"{self.request.model}: {remark}")

    def _epochs(self) -> int:
        """Epochs that all trainings take at most."""
        request = self.request
        each = recipe_of(request.linearisation(request.omegas[0], 0, "init")).epochs
        count = len(request.omegas) * len(request.seeds) * (2 if request.control else 1)
        first = recipe_of(request.training(request.base_recipe, 0, "init", {})).epochs
        return each * count + (first * len(request.seeds) if self.trains_first else 0)

    def _train(
        self, training: TrainingRequest, file: Path, *, after: Path | None = None
    ) -> Trained | None:
        """Train a network; None if it, or what it depends on, couldn't be trained."""

        def step(epoch: Any) -> None:
            self.progress.step(f"{file.stem}: test accuracy {epoch.test_accuracy:.1%}")

        file.parent.mkdir(parents=True, exist_ok=True)
        for needed in (Path(training.weights), after):
            if needed is not None and (failure := training_failure(needed)):
                give_up(file, training, f"it needs {needed.stem}, whose training failed: {failure}")
                return None
        try:
            return run_training(training, file, resume=True, progress=step, command=self.command)
        except NotFinite as error:
            self.failures.append(error)
            self.progress.warn(f"{file.stem}: {error}")
            return None
