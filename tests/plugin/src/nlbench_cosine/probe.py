"""A probe of one's own, and a measure that is shown what it sees."""

from dataclasses import dataclass
from typing import ClassVar

import torch

import nlbench
from nlbench.probes import Probe


@dataclass(frozen=True)
class Matrix:
    """One layer's weights, as a matrix (outputs, inputs)."""

    place: str
    weights: torch.Tensor


class Parameters(Probe):
    """Shows the weights of each layer that has a matrix of them, one after another."""

    name = "parameters"
    description = "the weights, layer by layer"
    options: ClassVar = {"smallest": nlbench.Option(2, "fewest rows of a matrix", minimum=1)}

    def check(self, samples, options):
        if options["smallest"] > 10_000:
            raise nlbench.RequestError("parameters.smallest: no layer has as many rows")

    def stored_samples(self, options):
        return 1

    def observe(self, probe_pass):
        found = [
            Matrix(name.removesuffix(".weight"), value.detach().flatten(1))
            for name, value in probe_pass.model.named_parameters()
            if value.ndim > 1 and len(value) >= probe_pass.options["smallest"]
        ]
        if not found:
            raise nlbench.Undefined("no layer has a matrix of weights")
        for matrix in found:
            probe_pass.show(matrix)
        probe_pass.step()
        return {"matrices": len(found)}


PARAMETERS = Parameters()


class StableRank(nlbench.Measure):
    """Stable rank of the weights: squared Frobenius norm over squared spectral norm."""

    name, probe = "stable-rank", "parameters"
    bounds, more_means = (1, float("inf")), "neither"

    def reset(self):
        self.ranks = {}

    def update(self, observation):
        strengths = torch.linalg.svdvals(observation.weights.double())
        self.ranks[observation.place] = (strengths.square().sum() / strengths[0] ** 2).item()

    def compute(self):
        return nlbench.Result.of(self.ranks)
