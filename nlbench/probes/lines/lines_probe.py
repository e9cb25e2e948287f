"""The probe `lines` and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.probes.probe import LazyProbe, ProbeOptions

if TYPE_CHECKING:
    from torch import Tensor


class Lines(LazyProbe):
    """Probe that restricts the network to straight segments between inputs."""

    name = "lines"
    needs_function = True
    needs_one_type = True
    description = "the network restricted to straight segments in input space"
    home = "nlbench.probes.lines.lines_observation"
    options: ClassVar[Mapping[str, Option]] = {
        "paths": Option(
            "auto",
            "auto: closed for images, else pairs; closed: loops of translated images; open: from "
            "an image through augmentations; random: loops through noise; pairs: straight lines "
            "between samples; directions: straight lines from samples",
            choices=("auto", "closed", "open", "random", "pairs", "directions"),
        ),
        "direction": Option(
            "random",
            "kind of directions: random: uniform on the sphere; sign: random sign per element; "
            "gradient: along the gradients of the largest outputs",
            choices=("random", "sign", "gradient"),
        ),
        "number": Option(
            4,
            "number of paths; 4: or fewer if samples are few; for directions, of samples",
            minimum=1,
            maximum=1e6,
        ),
        "anchors": Option(
            8,
            "segments per path, except for pairs; for directions, directions per sample",
            minimum=2,
            maximum=1e4,
        ),
        "radius": Option(
            4.0,
            "pixels by which anchors are translated; for directions, the length of a path in the "
            "units of the network's inputs",
            minimum=0.0,
            maximum=1e4,
        ),
        "seed": Option(
            0, "seed for open and random paths and directions", minimum=0, maximum=2**53
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
            "for auto: maximum number of forward passes per segment for an exact trace",
            minimum=0,
            maximum=1e12,
        ),
        "dtype": Option(
            "auto",
            "precision of the network; auto: float64, or float32 for estimates if it suffices",
            choices=("auto", "float64", "float32"),
        ),
        "sensitivity": Option(
            1e-6,
            "for adaptive: step past a breakpoint, as a fraction of the segment",
            minimum=1e-12,
            maximum=0.1,
        ),
        "resolution": Option(1000, "for sampling: steps per segment", minimum=1, maximum=1e9),
        "tolerance": Option(
            2e-3,
            "relative error of estimates, and of integrals of smooth networks",
            minimum=1e-10,
            maximum=0.1,
        ),
        "evaluations": Option(
            4096, "maximum evaluations per segment for estimates", minimum=64, maximum=1e7
        ),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of segments, that of images if the paths depend on the samples."""
        number = int(options["number"])
        return number if options["paths"] == "pairs" else number * int(options["anchors"])

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Raise if there are too few samples for the paths."""
        number = int(options["number"])
        if number == self.options["number"].default:
            return
        kind = str(options["paths"])
        needed = {"pairs": 2 * number, "random": 2}.get(kind, number)
        if samples is not None and samples < needed:
            raise RequestError(
                f"lines.number: {number} paths ({kind}) need {needed} samples, there are {samples}"
            )

    def stored_samples(self, options: ProbeOptions) -> int:
        """Return the number of samples that the paths start from."""
        return max(super().stored_samples(options), 2 * int(options["number"]))

    def resolve(self, options: ProbeOptions, inputs: Tensor) -> ProbeOptions:
        """Return closed paths for images and lines between pairs of samples otherwise.

        The default number of paths is smaller if there are too few samples.
        """
        # Imported here, since planning a run must not import PyTorch.
        from nlbench.introspection.distinct_rows import first_distinct

        kind = str(options["paths"])
        if kind == "auto":
            is_images = inputs.ndim == 4 and not is_channels_last(inputs)
            kind = "closed" if is_images else "pairs"
        number = int(options["number"])
        if number == self.options["number"].default:
            max_paths = len(inputs)
            if kind == "pairs":
                max_paths = len(first_distinct(inputs, 2 * number)) // 2
            number = max(1, min(number, max_paths))
        return {**options, "paths": kind, "number": number}


LINES = Lines()


def is_channels_last(images: Tensor) -> bool:
    """Return True if the sizes of 4-D inputs suggest (n, height, width, channels)."""
    return images.ndim == 4 and images.shape[-1] <= 4 < images.shape[1]
