"""The probe `lines`: the network restricted to straight segments of input space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from nlbench import lazy_exports
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.probes import LazyProbe, ProbeOptions, Resources, Samples

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .planes import Plane, plane
    from .probe import TracedSegment, estimate_segment, observe_paths, trace_segment, trace_segments
    from .trace import ChordParts, SegmentEstimate, SegmentTrace, chord_parts

__all__ = [
    "LINES",
    "ChordParts",
    "Lines",
    "Plane",
    "SegmentEstimate",
    "SegmentTrace",
    "TracedSegment",
    "chord_parts",
    "estimate_segment",
    "is_channels_last",
    "observe_paths",
    "plane",
    "trace_segment",
    "trace_segments",
]


class Lines(LazyProbe):
    """The probe `lines`."""

    name = "lines"
    description = "the network restricted to straight segments of input space"
    home = "nlbench.probes.lines.probe"
    options: ClassVar[Mapping[str, Option]] = {
        "paths": Option(
            "closed",
            "closed: loops of translated images; open: from an image through augmentations; "
            "random: loops through noise; pairs: straight lines between samples; directions: "
            "straight lines from samples",
            choices=("closed", "open", "random", "pairs", "directions"),
        ),
        "direction": Option(
            "random",
            "of directions: random: uniform on the sphere; sign: every number up or down; "
            "gradient: up the gradients of the largest outputs",
            choices=("random", "sign", "gradient"),
        ),
        "number": Option(4, "number of paths; samples of directions", minimum=1, maximum=1e6),
        "anchors": Option(
            8, "segments of a path, but for pairs; directions of a sample", minimum=2, maximum=1e4
        ),
        "radius": Option(
            4.0,
            "pixels by which an anchor is translated; of directions their length, in units of "
            "the network's inputs",
            minimum=0.0,
            maximum=1e4,
        ),
        "seed": Option(
            0, "decides open and random paths, the same for all models", minimum=0, maximum=2**53
        ),
        "method": Option(
            "auto",
            "auto: exact within the budget, else refined; exact: all breakpoints, layer by layer; "
            "refined: estimates from activation patterns on nested grids, with their error; "
            "adaptive: from one breakpoint to the next; sampling: patterns at uniform steps",
            choices=("auto", "exact", "refined", "adaptive", "sampling"),
        ),
        "budget": Option(
            1000,
            "of auto: forward passes a segment that an exact trace may take",
            minimum=0,
            maximum=1e12,
        ),
        "dtype": Option(
            "auto",
            "what the network is computed in; auto: float64, estimates float32 where that does",
            choices=("auto", "float64", "float32"),
        ),
        "sensitivity": Option(
            1e-6,
            "of adaptive: how far behind a breakpoint it goes on, as a share of the segment",
            minimum=1e-12,
            maximum=0.1,
        ),
        "resolution": Option(1000, "of sampling: steps a segment", minimum=1, maximum=1e9),
        "tolerance": Option(
            1e-3,
            "relative error wanted of estimates, and where the network is not piecewise affine",
            minimum=1e-10,
            maximum=0.1,
        ),
        "evaluations": Option(
            4096, "most evaluations a segment for such estimates", minimum=64, maximum=1e7
        ),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """How many segments the paths have."""
        number = int(options["number"])
        return number if options["paths"] == "pairs" else number * int(options["anchors"])

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Refuse more paths than there are samples for."""
        number, needed = int(options["number"]), self._needed(options)
        if samples is not None and samples < needed:
            raise RequestError(
                f"lines.number: {number} paths ({options['paths']}) need {needed} samples, there "
                f"are {samples}"
            )

    def held(self, options: ProbeOptions) -> int:
        """As many as the paths start from."""
        return max(super().held(options), 2 * int(options["number"]))

    def defaults(self, inputs: Tensor) -> ProbeOptions:
        """Paths that the inputs allow: loops of translated images, else lines between samples."""
        is_images = inputs.ndim == 4 and not is_channels_last(inputs)
        most = len(inputs) if is_images else len(inputs) // 2
        number = int(self.options["number"].default)
        return {"paths": "closed" if is_images else "pairs", "number": max(1, min(number, most))}

    def _needed(self, options: ProbeOptions) -> int:
        number = int(options["number"])
        return {"pairs": 2 * number, "random": 2}.get(str(options["paths"]), number)

    def forecast(
        self, model: nn.Module, samples: Samples, options: ProbeOptions, *, resources: Resources
    ) -> str:
        """See `nlbench.probes.Probe.forecast`."""
        from .probe import forecast

        return forecast(model, samples, options, resources)


LINES = Lines()
"""The network restricted to straight segments of input space."""


def is_channels_last(images: Tensor) -> bool:
    """Whether 4-D inputs look like (n, height, width, channels): few of the last, many before."""
    return images.ndim == 4 and images.shape[-1] <= 4 < images.shape[1]


# Planning a run reads the options above without PyTorch.
__getattr__ = lazy_exports(
    __name__,
    {
        "ChordParts": "trace",
        "Plane": "planes",
        "SegmentEstimate": "trace",
        "SegmentTrace": "trace",
        "TracedSegment": "probe",
        "chord_parts": "trace",
        "estimate_segment": "probe",
        "observe_paths": "probe",
        "plane": "planes",
        "trace_segment": "probe",
        "trace_segments": "probe",
    },
)
