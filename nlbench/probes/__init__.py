"""The shared instrumentation: the interface of probes, and the probes of nlbench.

A probe is a way to observe a model. Each sub-package is one; a plugin adds its own through the
entry-point group ``nlbench.probes``. Importing this package does not import PyTorch.
"""

from .probe import LazyProbe, Listener, OnStep, Probe, ProbeOptions, Resources, Samples

__all__ = ["LazyProbe", "Listener", "OnStep", "Probe", "ProbeOptions", "Resources", "Samples"]
