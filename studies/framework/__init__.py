"""The parts of a study: its class, its verdicts, its figures and the command that runs it."""

from .context import Context
from .study import Findings, Runs, Study
from .verdicts import Verdict

__all__ = ["Context", "Findings", "Runs", "Study", "Verdict"]
