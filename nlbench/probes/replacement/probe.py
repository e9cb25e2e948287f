"""The probe `replacement` and its options, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nlbench.errors import RequestError, nearest
from nlbench.options import Option
from nlbench.probes.probe import LazyProbe, ProbeOptions
from nlbench.probes.sites.place_options import parse_places
from nlbench.probes.sites.select import Selection

__all__ = ["MAPS", "REPLACEMENT", "Replacements", "parse_maps"]

MAPS = ("channel", "identity", "mean", "affine")
"""The best slope and intercept of each channel; the input itself; the output's mean; the best full
affine map of the channels."""


def parse_maps(text: str) -> tuple[str, ...]:
    """Parse names of maps, separated by commas.

    Raises
    ------
    nlbench.RequestError
        For an unknown name.

    Examples
    --------
    >>> parse_maps("channel, mean")
    ('channel', 'mean')
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in MAPS:
            raise RequestError(f"replacement.maps: unknown map '{name}'{nearest(name, MAPS)}")
    if not names:
        raise RequestError(f"replacement.maps is empty, expected some of {', '.join(MAPS)}")
    return names


class Replacements(LazyProbe):
    """The probe `replacement`."""

    name = "replacement"
    description = "the network's outputs with one place replaced by a fitted affine map"
    home = "nlbench.probes.replacement.observation"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(128, "samples per batch", minimum=2, maximum=1e9),
        "of": Option(
            "activations",
            "places to replace, as for sites.of: activations, blocks, mlp, attention or "
            "modules:GLOB",
        ),
        "select": Option("*", "sites to replace, as for sites.select"),
        "maps": Option("channel,identity,affine", f"maps to fit, of {', '.join(MAPS)}"),
        "affine": Option(
            128,
            "largest number of channels for which a full affine map is fitted",
            minimum=0,
            maximum=1e6,
        ),
        "crossed": Option(
            False, "also judge the half that maps were fitted on, by maps of the other half"
        ),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches of all passes: fitting, and judging."""
        return (4 if options["crossed"] else 2) * -(-samples // int(options["batch"]))

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Validate ``of``, ``select`` and ``maps``."""
        parse_maps(str(options["maps"]))
        try:
            parse_places(str(options["of"]))
            Selection.parse(str(options["select"]))
        except RequestError as error:
            raise RequestError(str(error).replace("sites.", "replacement.", 1)) from error


REPLACEMENT = Replacements()
