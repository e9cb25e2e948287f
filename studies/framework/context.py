"""The context of a study: its folder, its settings and the networks it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError
from nlbench.measure import Measure
from nlbench.options import OptionValue
from nlbench.progress import Progress
from nlbench.request import ExecutionOptions, Request
from nlbench.store.run import Run

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nlbench.models.training.training_request import TrainingRequest


@dataclass(frozen=True)
class Context:
    """Folder, settings and execution options of a study.

    Parameters
    ----------
    folder : Path
        Output folder. Each study has its own subfolder and reuses cells recorded by other studies.
    study : str
    quick : bool
        True for a smaller version with fewer seeds, networks and paths.
    data, weights, seeds, measures
        Settings chosen by the user, which replace the study's own; empty if none.
    device : str
    progress : Progress, optional
    execution : ExecutionOptions
        By default serial with one PyTorch thread, which gives bitwise the same results as several
        workers.
    command : str
    pending : dict of Path to TrainingRequest
        Networks still to be trained, by checkpoint; see `request_training`.
    """

    folder: Path
    study: str
    quick: bool = False
    data: str = ""
    weights: str = ""
    seeds: tuple[int, ...] = ()
    measures: tuple[str, ...] = ()
    device: str = "auto"
    progress: Progress | None = None
    execution: ExecutionOptions = field(default_factory=lambda: ExecutionOptions(threads=1))
    command: str = ""
    pending: dict[Path, TrainingRequest] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Version of the study: ``full`` or ``quick``, then the chosen settings.

        Examples
        --------
        >>> Context(Path(), "noise").version
        'full'
        >>> Context(Path(), "noise", quick=True, data="cifar10", seeds=(0, 1)).version
        'quick --data cifar10 --seeds 0,1'
        """
        settings = {
            "data": self.data,
            "weights": self.weights,
            "seeds": ",".join(map(str, self.seeds)),
            "measures": ",".join(self.measures),
        }
        flags = [f"--{name} {value}" for name, value in settings.items() if value]
        return " ".join(["quick" if self.quick else "full", *flags])

    def seeds_or(self, full: int, quick: int = 1) -> tuple[int, ...]:
        """Return the chosen seeds or, by default, the first ``full`` or ``quick`` ones.

        Examples
        --------
        >>> Context(Path(), "noise").seeds_or(3), Context(Path(), "noise", quick=True).seeds_or(3)
        ((0, 1, 2), (0,))
        """
        return self.seeds or tuple(range(quick if self.quick else full))

    def run(self, request: Request, part: str = "run") -> Run:
        """Run a request, reusing cells recorded by this or another study.

        Requested networks are trained first. Values have no standard errors, which would take
        longer than the values: verdicts compare networks, seeds and segments.

        Parameters
        ----------
        request : Request
        part : str
            Name of the run's folder; quick studies and chosen datasets have separate folders.
            Several requests may extend one part if their options are equal.
        """
        from nlbench.runner import run

        self.train_pending()
        out = self._part_folder(part)
        others = (file.parent for file in self.folder.glob("*/*/manifest.json"))
        return run(
            replace(request, device=self.device, errors="none"),
            out,
            progress=self.progress,
            execution=self.execution,
            command=self.command,
            known=sorted(folder for folder in others if folder != out),
        )

    def evaluate(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        inputs: Tensor,
        measures: Sequence[str | type[Measure]],
        part: str,
        *,
        settings: Mapping[str, OptionValue | str] | None = None,
        name: str | None = None,
    ) -> Run:
        """Evaluate measures or models that may be unregistered.

        Takes the arguments of `nlbench.evaluate`; `part` names the run's folder. The
        evaluation is always repeated, and the folder holds the latest result.
        """
        from nlbench.evaluation import evaluate
        from nlbench.store.run_folder import RunFolder

        self.train_pending()
        run = evaluate(
            model,
            inputs,
            measures,
            settings=settings,
            name=name,
            progress=self.progress,
            errors="none",
        )
        folder = RunFolder(self._part_folder(part))
        if folder.holds_a_run():
            run.path = folder.path
            current = {record.key for record in run.records}
            for record in folder.read()[1]:
                if record.key not in current:
                    folder.record_file(record.key).unlink()
        run.save(folder.path)
        return run

    def _part_folder(self, part: str) -> Path:
        # Otherwise cells of a quick run or for other data would appear in the full run's table.
        parts = (part, self.data, "quick" if self.quick else "")
        return self.folder / self.study / "-".join(filter(None, parts))

    def request_training(
        self,
        model: str,
        data: str,
        recipe: str = "auto",
        seed: int = 0,
        *,
        label_noise: float | None = None,
        weights: str = "init",
        name: str = "",
        options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        """Request a network, trained only once for all studies, and return its checkpoint path.

        Requested networks are trained in parallel, before the next run or by `train_pending`, each
        after the network it starts from.

        Parameters
        ----------
        model, data, recipe : str
            Registered names; the recipe ``auto`` is the model's own.
        seed : int
        label_noise : float, optional
            Overrides the recipe's label noise.
        weights : str
            Initial weights: a name, or the checkpoint of another requested network.
        name : str
            Part of the checkpoint's file name; identical training requests must use the same name.
        options : mapping, optional
            Dataset options.
        **changes
            Recipe fields to override.

        Raises
        ------
        nlbench.RequestError
            If the recipe or one of its fields does not exist, or if a different training request
            has the same name.
        """
        from nlbench.models.training.training_request import (
            TrainingRequest,
            load_recipe,
            resolve_recipe,
        )

        request = TrainingRequest(
            model,
            data,
            resolve_recipe(model, recipe),
            seed,
            weights,
            label_noise,
            changes,
            tuple(sorted((options or {}).items())),
            self.device,
        )
        load_recipe(request)
        parts = (model.replace("/", "-"), data.replace("/", "-"), name, f"seed{seed}")
        file = self.folder / "checkpoints" / f"{'-'.join(p for p in parts if p)}.safetensors"
        if self.pending.setdefault(file, request) != request:
            raise RequestError(f"{file.stem}: another training run was requested under this name")
        return file

    def train_pending(self) -> None:
        """Train the requested networks in parallel, one per worker.

        Raises
        ------
        nlbench.RequestError
            If an existing checkpoint was trained differently.
        nlbench.NlbenchError
            If a training run fails; raised after the others have finished.
        """
        if not self.pending:
            return
        from nlbench.models.training.parallel import train_networks

        in_processes = self.execution.executor == "processes"
        train_networks(
            self.pending,
            workers=self.execution.workers or 1 if in_processes else 1,
            progress=self.progress,
            command=self.command,
        )
        self.pending.clear()
