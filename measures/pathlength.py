"""Average path length: the mean number of nonlinear units on a path through the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import Measure, Result, Value
from nlbench.options import Option, OptionValue
from nlbench.probes.graph.channel_graph import ChannelGraph, counted_lengths, walked_length
from nlbench.probes.graph.graph_observation import channel_graph

from .papers import bibtex

NONLINEAR_ADVANTAGE = Source(
    "C. H. X. A. Mehmeti-Göpel, J. Disselhoff. Nonlinear Advantage: Trained Networks "
    "Might Not Be As Complex as You Think. ICML, 2023.",
    "average path length",
    bibtex("mehmetigopel2023nonlinear"),
)


def average_path_length(
    model: nn.Module, example_input: Tensor | tuple[Tensor, ...], normalized: bool = True
) -> float:
    """Compute the mean number of active nonlinear units on a path from input to output channels.

    With ``normalized=True`` paths are sampled by a random walk backwards from the output, which
    chooses among the branches of a merge with equal probability, then uniformly among channels:
    ℓ_out is the mean of ℓ_in over the input channels of a layer, or over the branches of a merge,
    and an active unit adds 1. With ``normalized=False`` all paths have equal weight.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    example_input : tensor or tuple of tensor
        Arguments of the model, batch first; only their shapes matter.
    normalized : bool

    Returns
    -------
    float
        Number of units, at least 0.

    Raises
    ------
    nlbench.UnsupportedOperation
        If the effect of an operation on channels is unknown.
    nlbench.Undefined
        If the output doesn't depend on the input.
    nlbench.RequestError
        If the model can't be run on the example.

    References
    ----------
    C. H. X. A. Mehmeti-Göpel, J. Disselhoff. Nonlinear Advantage: Trained Networks Might
    Not Be As Complex as You Think. ICML, 2023.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> chain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    >>> average_path_length(chain, torch.zeros(1, 3))
    2.0
    """
    graph = channel_graph(model, example_input)
    return walked_length(graph) if normalized else counted_lengths(graph).mean


class PathLength(Measure):
    r"""Average path length: nonlinear units between input and output channels.

    The statistics of the network are ``value``; ``units`` and ``active``, the numbers of all units
    and of nonlinear ones; ``linear_share``, the fraction of linear units; ``log10_paths``, the
    logarithm of the number of paths. Those of an activation call are ``value``, its number of
    nonlinear units (the effective width), ``units`` and ``linear_share``.

    With ``empirical``, the activity of a unit is the fraction of samples and positions at which its
    output differs from its input. Otherwise a unit is active unless its function is the identity,
    like a PReLU with slope 1.

    Definition
    ----------
    With :math:`\ell = 0` at the inputs, for each channel

    .. math::

        \ell_{\text{layer}} = \operatorname{mean}(\ell_{\text{inputs}}), \quad
        \ell_{a + b} = \tfrac{1}{2} (\ell_a + \ell_b), \quad
        \ell_{\text{active unit}} = \ell + 1, \quad \ell_{\text{linear unit}} = \ell ,

    averaged over output channels. With ``normalized=false`` it is the mean over all paths.

    Units
    -----
    Nonlinear units per path.

    Undefined
    ---------
    An output that doesn't depend on the input, or that depends on an operation whose effect on
    channels is unknown, such as a recurrent layer; the reason names it.

    Cost
    ----
    One forward pass on tensor shapes only; with ``empirical``, one forward pass over the samples.

    Limits
    ------
    It is a property of the architecture and of the linearised units: weights and data don't change
    it, unless ``empirical``. A unit with slope 0.99 counts as much as a ReLU.

    Examples
    --------
    A normalised length of 13 for ResNet18, as in the paper:

    >>> import torch, torchvision
    >>> average_path_length(torchvision.models.resnet18(), torch.zeros(1, 3, 64, 64))
    13.0
    """

    name = "pathlength"
    probe = "graph"
    bounds = (0.0, math.inf)
    more_means = "more nonlinear"
    exact = True
    options: ClassVar[Mapping[str, Option]] = {
        "normalized": Option(
            True, "weight the branches of a merge equally; false: weight all paths equally"
        ),
        "empirical": Option(False, "count a unit as active where it changes its input"),
    }
    source = NONLINEAR_ADVANTAGE

    @classmethod
    def exact_of(cls, options: Mapping[str, OptionValue]) -> bool:
        """Return True unless the activity of units is that on the samples."""
        return not options["empirical"]

    def reset(self) -> None:
        """Discard the last graph."""
        self._result: Result | None = None

    def update(self, observation: ChannelGraph) -> None:
        """Measure the subject's graph."""
        empirical = bool(self.settings["empirical"])
        activity = observation.activity() if empirical else None
        samples = observation.samples if empirical else 0
        counted = counted_lengths(observation, activity)
        walked = bool(self.settings["normalized"])
        value = walked_length(observation, activity) if walked else counted.mean
        values = tuple(_layers(observation, activity, samples))
        units = sum(layer.statistics["units"] for layer in values)
        active = sum(layer.statistics["value"] for layer in values)
        summary = {"value": value, "units": units, "active": active}
        if units:
            summary["linear_share"] = 1 - active / units
        summary["log10_paths"] = counted.log10_paths
        self._result = Result(summary, values, samples, notes={"layers": len(values)})

    def compute(self) -> Result:
        """Return the result for the last graph."""
        if self._result is None:
            raise Undefined("no graph was observed")
        return self._result


def _layers(
    graph: ChannelGraph, activity: Mapping[str, Tensor] | None, samples: int
) -> list[Value]:
    values = []
    for unit in graph.units:
        active = float((unit.active if activity is None else activity[unit.site]).sum())
        statistics = {"value": active, "units": unit.size, "linear_share": 1 - active / unit.size}
        values.append(Value(unit.site, statistics, samples))
    return values
