"""The parts of a study: its class, its verdicts, its figures and the command that runs it."""

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

if TYPE_CHECKING:
    from .context import Context as Context
    from .study import Findings as Findings
    from .study import Runs as Runs
    from .study import Study as Study
    from .verdicts import Verdict as Verdict

# Lazy, so that the command line loads without NumPy.
__getattr__, __dir__, __all__ = lazy_imports(__name__)
