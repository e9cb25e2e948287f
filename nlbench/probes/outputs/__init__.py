"""The probe `outputs`: a network's outputs with the samples' labels."""

from .probe import OUTPUTS, OutputBatch

__all__ = ["OUTPUTS", "OutputBatch"]
