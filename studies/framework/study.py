"""The base class for studies and the results that a study returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import pandas as pd
from matplotlib.figure import Figure

from nlbench.citation import Source
from nlbench.store.run import Run

from .context import Context
from .verdicts import Verdict

Runs: TypeAlias = "Mapping[str, Run]"
"""The runs of a study, keyed by part."""


@dataclass(frozen=True)
class Findings:
    """The results of a study.

    Parameters
    ----------
    verdicts : sequence of Verdict
    tables : mapping of str to DataFrame
        Keyed by title, in the order of the page.
    figures : mapping of str to matplotlib.figure.Figure
        Keyed by title.
    remarks : sequence of str
        Caveats for the reader, such as random weights or small data.
    headline : sequence of str
        The answer in prose. If given, the figures and the first table precede the verdicts.
    """

    verdicts: Sequence[Verdict]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    headline: Sequence[str] = ()


class Study(ABC):
    """A question, the runs that answer it and the published results.

    A study is registered in the group ``nlbench.studies``; ``nlbench list studies`` prints the
    first line of its docstring. Importing its module must not import PyTorch.

    Attributes
    ----------
    question : str
        A sentence that ends with a question mark.
    source : Source
        Publication of the results to compare with.
    needs : str
        Brief requirements, such as ``digits``, ``trains 9 networks`` or ``pretrained weights``.
    minutes, quick_minutes : float
        Durations of the full and the quick version on two idle cores.
    takes : tuple of str
        Settings that users can choose: any of ``data``, ``weights``, ``seeds``, ``measures``.
    """

    question: ClassVar[str]
    source: ClassVar[Source] = Source("")
    needs: ClassVar[str] = ""
    minutes: ClassVar[float] = 1.0
    quick_minutes: ClassVar[float] = 0.5
    takes: ClassVar[tuple[str, ...]] = ()

    def missing(self) -> str:
        """Return the missing requirements and how to install them.

        Return "" if there are none. If any are missing, a study chosen by a glob is skipped.
        """
        return ""

    @abstractmethod
    def measure(self, context: Context) -> Runs:
        """Run the measurements needed to answer the question. Return the runs, keyed by part."""

    @abstractmethod
    def analyse(self, runs: Runs) -> Findings:
        """Answer the question using only the cells recorded by `measure`."""
