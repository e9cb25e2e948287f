"""The shared instrumentation: the interface for probes, and nlbench's own probes.

A probe is a way to observe a model. Each sub-package is a probe; plugins add more through the
entry-point group ``nlbench.probes``. Importing this package does not import PyTorch.
"""

from .probe import (
    LazyProbe,
    Listener,
    OnStep,
    Probe,
    ProbeFacts,
    ProbeOptions,
    ProbePass,
    Resources,
)

__all__ = [
    "LazyProbe",
    "Listener",
    "OnStep",
    "Probe",
    "ProbeFacts",
    "ProbeOptions",
    "ProbePass",
    "Resources",
]
