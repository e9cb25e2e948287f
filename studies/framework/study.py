"""The base class of studies and the results that a study returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from nlbench.citation import Source

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nlbench.store.run import Run

    from .context import Context
    from .verdicts import Verdict

Runs: TypeAlias = "Mapping[str, Run]"
"""Runs of a study, keyed by part."""


@dataclass(frozen=True)
class Findings:
    """Results of a study.

    Parameters
    ----------
    verdicts : sequence of Verdict
    tables : mapping of str to DataFrame
        Keyed by title, in the order of the page.
    figures : mapping of str to matplotlib.figure.Figure
        Keyed by title.
    remarks : sequence of str
        Caveats for the reader: random weights, small data.
    headline : sequence of str
        The answer in prose. If given, figures and the first table precede the verdicts.
    """

    verdicts: Sequence[Verdict]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    headline: Sequence[str] = ()


class Study(ABC):
    """One question, the runs that answer it and the published results.

    A study is registered in the group ``nlbench.studies``; ``nlbench list studies`` prints the
    first line of its docstring. Importing its module must not import PyTorch.

    Attributes
    ----------
    question : str
        A sentence with a question mark.
    source : Source
        Publication of the numbers to compare with.
    needs : str
        Requirements in a few words: ``digits``, ``trains 9 networks``, ``pretrained weights``.
    minutes, quick_minutes : float
        Duration on two idle cores.
    takes : tuple of str
        Settings that the user can choose, of ``data``, ``weights``, ``seeds`` and ``measures``.
    """

    question: ClassVar[str]
    source: ClassVar[Source] = Source("")
    needs: ClassVar[str] = ""
    minutes: ClassVar[float] = 1.0
    quick_minutes: ClassVar[float] = 0.5
    takes: ClassVar[tuple[str, ...]] = ()

    def missing(self) -> str:
        """Return the missing requirements and how to install them; empty if there are none.

        Studies chosen by a glob are then skipped.
        """
        return ""

    @abstractmethod
    def measure(self, context: Context) -> Runs:
        """Run the measurements that the question needs, and return the runs by part."""

    @abstractmethod
    def analyse(self, runs: Runs) -> Findings:
        """Answer the question from the cells recorded by `measure` alone."""
