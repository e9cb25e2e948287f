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
        "select": Option(
            "*",
            "which sites: globs over names, kind:KIND, role:ROLE, every:K; joined by + all must "
            "hold, by commas one",
        ),
        "attention": Option(False, "whether the softmaxes of attention are sites too"),
    },
)
_LINES = Probe(
    "lines",
    "the network restricted to straight segments of input space, exactly",
    {
        "paths": Option(
            "closed",
            "closed: loops of translated images; open: from an image through augmentations; "
            "random: loops through noise; pairs: straight lines between samples",
            choices=("closed", "open", "random", "pairs"),
        ),
        "number": Option(4, "number of paths", minimum=1, maximum=1e6),
        "anchors": Option(8, "segments of a path, but for pairs", minimum=2, maximum=1e4),
        "radius": Option(4.0, "pixels by which an anchor is translated", minimum=0.0, maximum=1e4),
        "seed": Option(
            0, "decides open and random paths, the same for all models", minimum=0, maximum=2**53
        ),
        "method": Option(
            "exact",
            "exact: all breakpoints, layer by layer; adaptive: from one to the next; "
            "sampling: activation patterns at uniform steps",
            choices=("exact", "adaptive", "sampling"),
        ),
        "dtype": Option(
            "float64", "what the network is computed in", choices=("float64", "float32")
        ),
        "sensitivity": Option(
            1e-6,
            "of adaptive: how far behind a breakpoint it goes on, as a share of the segment",
            minimum=1e-12,
            maximum=0.1,
        ),
        "resolution": Option(1000, "of sampling: steps a segment", minimum=1, maximum=1e9),
        "tolerance": Option(
            1e-5,
            "relative error allowed a network that is not piecewise affine (quadrature)",
            minimum=1e-10,
            maximum=0.1,
        ),
        "evaluations": Option(
            4096, "most evaluations a segment for such a network", minimum=64, maximum=1e7
        ),
    },
)
_GRAPH = Probe(
    "graph",
    "the channel graph from input to output",
    {
        "batch": Option(
            64, "samples a batch, where a measure asks for samples", minimum=1, maximum=1e9
        )
    },
)
_FUNCTION = Probe(
    "function",
    "the network as a plain differentiable function of its input",
    {"batch": Option(128, "samples a batch", minimum=1, maximum=1e9)},
)

PROBES: Mapping[str, Probe] = {probe.name: probe for probe in (_SITES, _LINES, _GRAPH, _FUNCTION)}
