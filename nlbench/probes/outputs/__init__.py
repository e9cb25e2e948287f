"""The probe `outputs`: a network's outputs with the samples' labels."""

from .outputs_probe import OUTPUTS, OutputBatch

__all__ = ["OUTPUTS", "OutputBatch"]
