"""The shared instrumentation: the interface for probes, and nlbench's own probes.

A probe is a way to observe a model. Each sub-package is a probe; plugins add more through the
entry-point group ``nlbench.probes``. Importing this package does not import PyTorch.
"""

from .probe import LazyProbe as LazyProbe
from .probe import Listener as Listener
from .probe import OnStep as OnStep
from .probe import Probe as Probe
from .probe import ProbeFacts as ProbeFacts
from .probe import ProbeOptions as ProbeOptions
from .probe import ProbePass as ProbePass
from .probe import Resources as Resources
