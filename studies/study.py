"""What a study is: a fixed run, what comes of it, and what was published, side by side."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.progress import Progress
from nlbench.request import ExecutionOptions, Request

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from nlbench.measure import Measure
    from nlbench.models.training.train import TrainingRequest
    from nlbench.options import OptionValue
    from nlbench.reports.agreement import Correlation
    from nlbench.store.run_folder import Run

__all__ = ["Context", "Findings", "Study", "Verdict", "above", "over_networks"]


@dataclass(frozen=True)
class Verdict:
    """One thing that was published or is to be expected, and what comes out here.

    Parameters
    ----------
    claim : str
        In a sentence.
    published : str
        The number or the words of the paper; empty where nothing was published.
    ours : str
        What comes out, with its interval.
    agrees : bool or None
        None where what was measured can't tell.
    remark : str
        What was done to make sure, or why it can't be told.

    Examples
    --------
    >>> Verdict("ReLU is the least nonlinear", "0.90", "0.91 ± 0.02", True).word
    'yes'
    """

    claim: str
    published: str
    ours: str
    agrees: bool | None
    remark: str = ""

    @property
    def word(self) -> str:
        """How `agrees` is said."""
        return "can't tell" if self.agrees is None else "yes" if self.agrees else "no"


def above(low: float, high: float, bound: float = 0.0) -> bool | None:
    """Judge an interval: True above a bound, False below it, None where it holds it or is NaN.

    Examples
    --------
    >>> above(0.1, 0.3), above(-0.3, -0.1), above(-0.1, 0.3), above(0.1, 0.3, 0.2)
    (True, False, None, None)
    """
    return True if low > bound else False if high < bound else None


def over_networks(symbol: str, found: Correlation) -> str:
    """Write a correlation over networks with its interval, or how few networks there are.

    Examples
    --------
    >>> from nlbench.reports.agreement import Correlation
    >>> over_networks("τ", Correlation(0.5, 0.25, 0.75, 12))
    'τ = 0.50 (0.25 to 0.75), 12 networks'
    >>> over_networks("τ", Correlation(math.nan, math.nan, math.nan, 2))
    'too few networks: 2'
    """
    if not math.isfinite(found.value):
        return f"too few networks: {found.n}"
    return f"{symbol} = {found.text}, {found.n} networks"


@dataclass(frozen=True)
class Findings:
    """What a study found.

    Parameters
    ----------
    verdicts : sequence of Verdict
    tables : mapping of str to DataFrame
        By title, as they are shown and written.
    figures : mapping of str to matplotlib.figure.Figure
        By title.
    remarks : sequence of str
        What a reader has to know: that the weights are random, that the data are small.
    """

    verdicts: Sequence[Verdict]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remarks: Sequence[str] = ()


class Study(ABC):
    """One question, the run that answers it, and what was published.

    Its class is registered in the group ``nlbench.studies`` under its name; its docstring's first
    line is what ``nlbench list studies`` says. Importing its module imports no PyTorch.

    Attributes
    ----------
    question : str
        A sentence with a question mark.
    source : Source
        Where the published numbers are from.
    needs : str
        In a few words what it needs: ``digits``, ``trains 9 networks``, ``pretrained weights``.
    minutes, quick_minutes : float
        What it takes on two cores, alone.
    takes : tuple of str
        Which of ``data``, ``weights``, ``seeds`` and ``measures`` can be chosen.
    """

    question: ClassVar[str]
    source: ClassVar[Source] = Source("")
    needs: ClassVar[str] = ""
    minutes: ClassVar[float] = 1.0
    quick_minutes: ClassVar[float] = 0.5
    takes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def measure(self, context: Context) -> Mapping[str, Run]:
        """Measure what the question needs, by ordinary runs.

        Parameters
        ----------
        context : Context

        Returns
        -------
        mapping of str to Run
            By the part's name.
        """

    @abstractmethod
    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Answer the question from recorded cells, and from nothing else.

        Parameters
        ----------
        runs : mapping of str to Run
            What `measure` gave.
        """


@dataclass(frozen=True)
class Context:
    """Where and how a study measures.

    Parameters
    ----------
    folder : Path
        Of all studies: each has a folder in it under its name, and takes over what another's
        runs have recorded.
    study : str
    quick : bool
        Whether a smaller version is wanted: fewer seeds, networks and paths.
    data, weights, seeds, measures
        What was chosen in place of the study's own; empty where nothing was.
    device : str
    progress : Progress, optional
    execution : ExecutionOptions
        By default cells are measured one after the other with one of PyTorch's threads, so that
        they are the same, to the last bit, as with several workers.
    command : str
    asked_for : dict of Path to TrainingRequest
        Networks that are still to be trained, by checkpoint; see `trained`.
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
    asked_for: dict[Path, TrainingRequest] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """What of a study this is: ``full`` or ``quick``, and what was chosen.

        Examples
        --------
        >>> Context(Path(), "noise").version
        'full'
        >>> Context(Path(), "noise", quick=True, data="cifar10", seeds=(0, 1)).version
        'quick --data cifar10 --seeds 0,1'
        """
        chosen = {
            "data": self.data,
            "weights": self.weights,
            "seeds": ",".join(map(str, self.seeds)),
            "measures": ",".join(self.measures),
        }
        said = [f"--{flag} {value}" for flag, value in chosen.items() if value]
        return " ".join(["quick" if self.quick else "full", *said])

    def seeds_or(self, full: int, quick: int = 1) -> tuple[int, ...]:
        """Give the seeds that were chosen, or the first so many.

        Parameters
        ----------
        full, quick : int
            How many a full and a quick study takes.

        Examples
        --------
        >>> Context(Path(), "noise").seeds_or(3), Context(Path(), "noise", quick=True).seeds_or(3)
        ((0, 1, 2), (0,))
        """
        return self.seeds or tuple(range(quick if self.quick else full))

    def run(self, request: Request, part: str = "run") -> Run:
        """Carry out an ordinary run; what is recorded already, here or by another study, is taken.

        Networks that were asked for are trained first.

        Parameters
        ----------
        request : Request
        part : str
            The run's folder in the study's own, for quick studies and chosen data each its own.
            It is extended by several requests; requests of different options need different
            parts.
        """
        from nlbench.runner import run

        self.train()
        out = self._folder_of(part)
        others = (file.parent for file in self.folder.glob("*/*/manifest.json"))
        return run(
            replace(request, device=self.device),
            out,
            progress=self.progress,
            execution=self.execution,
            command=self.command,
            known=sorted(folder for folder in others if folder != out),
        )

    def evaluated(
        self,
        model: nn.Module,
        inputs: Tensor,
        measures: Sequence[str | type[Measure]],
        part: str,
        *,
        settings: Mapping[str, OptionValue | str] | None = None,
        name: str | None = None,
    ) -> Run:
        """Measure by measures of the study's own, or what is no registered subject.

        It is measured each time, and the part's folder holds what came last.

        Parameters
        ----------
        model, inputs, measures, settings, name
            As for `nlbench.evaluate`.
        part : str
            The run's folder in the study's own.
        """
        from nlbench.evaluation import evaluate
        from nlbench.store.run_folder import RunFolder

        self.train()
        found = evaluate(
            model, inputs, measures, settings=settings, name=name, progress=self.progress
        )
        folder = RunFolder(self._folder_of(part))
        if folder.holds_a_run():
            found.path = folder.path
            kept = {record.key for record in found.records}
            for record in folder.read()[1]:
                if record.key not in kept:
                    folder.record_file(record.key).unlink()
        found.save(folder.path)
        return found

    def _folder_of(self, part: str) -> Path:
        # What one run has measured would else stand in another's table.
        kept = (part, self.data, "quick" if self.quick else "")
        return self.folder / self.study / "-".join(filter(None, kept))

    def trained(
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
        """Ask for a network that is trained once for all studies; give its checkpoint.

        The networks that were asked for are trained side by side, each after the one that it starts
        from, before the next run; or by `train`.

        Parameters
        ----------
        model, data, recipe : str
            Registered names; ``auto``: the recipe that suits the model.
        seed : int
        label_noise : float, optional
            Instead of the recipe's.
        weights : str
            Where it starts: a name, or the checkpoint of another network that was asked for.
        name : str
            What is said of it in its file's name beside model, data and seed; the same training
            has to be called the same.
        options : mapping, optional
            Of the dataset.
        **changes
            Fields of the recipe that are to be otherwise.

        Raises
        ------
        nlbench.RequestError
            If there is no such recipe or field of it, or another network was asked for under the
            same name.
        """
        from nlbench.models.training.train import TrainingRequest, recipe_of, suited_recipe

        request = TrainingRequest(
            model,
            data,
            suited_recipe(model, recipe),
            seed,
            weights,
            label_noise,
            changes,
            tuple(sorted((options or {}).items())),
            self.device,
        )
        recipe_of(request)
        parts = (model.replace("/", "-"), data, name, f"seed{seed}")
        file = self.folder / "checkpoints" / f"{'-'.join(p for p in parts if p)}.safetensors"
        if self.asked_for.setdefault(file, request) != request:
            raise RequestError(f"{file.stem}: another training was asked for under this name")
        return file

    def train(self) -> None:
        """Train the networks that were asked for, as many at a time as there are workers.

        Raises
        ------
        nlbench.RequestError
            If there is a checkpoint that was trained in another way.
        nlbench.NlbenchError
            If one can't be trained, once the others are.
        """
        if not self.asked_for:
            return
        from nlbench.models.training.train import run_trainings

        in_processes = self.execution.executor == "processes"
        run_trainings(
            self.asked_for,
            workers=self.execution.workers or 1 if in_processes else 1,
            progress=self.progress,
            command=self.command,
        )
        self.asked_for.clear()
