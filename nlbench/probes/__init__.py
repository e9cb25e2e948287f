"""The shared instrumentation: the ways of looking at a subject, and what can be set.

Importing this package does not import torch; its modules do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nlbench.options import Option

__all__ = ["PROBES", "Probe"]


@dataclass(frozen=True)
class Probe:
    """One way of looking at a subject.

    Parameters
    ----------
    name : str
    description : str
        One line.
    options : mapping of str to Option
        What can be set, as ``--set NAME.OPTION=VALUE``; all its measures share it.
    """

    name: str
    description: str
    options: Mapping[str, Option]


_SITES = Probe(
    "sites",
    "input and output of every activation call",
    {
        "reduction": Option(
            "spatial",
            "how a site's tensor becomes (n, d)",
            choices=("spatial", "flatten", "published"),
        ),
        "batch": Option(128, "samples a batch; scores are made per batch", minimum=1, maximum=1e9),
    },
)
_LINES = Probe(
    "lines",
    "the network restricted to straight segments of input space, exactly",
    {
        "paths": Option(
            "closed",
            "closed: loops of translated images; pairs: straight lines between samples",
            choices=("closed", "pairs"),
        ),
        "number": Option(4, "number of paths", minimum=1, maximum=1e6),
        "anchors": Option(8, "anchors of a closed path", minimum=2, maximum=1e4),
        "radius": Option(4.0, "pixels by which an anchor is translated", minimum=0.0, maximum=1e4),
    },
)
_GRAPH = Probe("graph", "the channel graph from input to output", {})
_FUNCTION = Probe(
    "function",
    "the network as a plain differentiable function of its input",
    {"batch": Option(128, "samples a batch", minimum=1, maximum=1e9)},
)

PROBES: Mapping[str, Probe] = {probe.name: probe for probe in (_SITES, _LINES, _GRAPH, _FUNCTION)}
