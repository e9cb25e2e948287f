"""The probe `replacement` and its options, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nlbench.errors import RequestError, nearest
from nlbench.options import Option
from nlbench.parsers import unique
from nlbench.probes.probe import LazyProbe, ProbeOptions
from nlbench.probes.sites.sites_probe import Selection, parse_places

MAPS = ("channel", "identity", "mean", "affine", "poly2", "poly3", "poly5")
"""Names of the maps: the best slope and intercept per channel, the identity, the output's mean, the
best full affine map of the channels, and the best polynomials per channel of degree 2, 3 and 5."""

POLYNOMIAL_DEGREES = {"poly2": 2, "poly3": 3, "poly5": 5}
"""Degrees of the polynomials, by the map's name."""

DEGREES = {"mean": 0, "channel": 1, **POLYNOMIAL_DEGREES}
"""Degrees of the maps that treat channels separately and are fitted, by the map's name."""


_CHANNELS = "input and output have different channels"
UNFITTED = {
    "channel": f"there is no map per channel: {_CHANNELS}",
    "identity": f"there is no identity: {_CHANNELS}",
    "affine": "there is no full map: fewer than four rows per coefficient, or more channels than "
    "replacement.affine",
    **dict.fromkeys(POLYNOMIAL_DEGREES, f"there is no polynomial per channel: {_CHANNELS}"),
}
"""Reasons why a place lacks a map, by the map's name."""


def parse_maps(text: str, of: str = "activations") -> tuple[str, ...]:
    """Parse comma-separated names of maps. ``auto`` means the default, which depends on `of`.

    Examples
    --------
    >>> parse_maps("channel, mean")
    ('channel', 'mean')
    >>> parse_maps("auto", "blocks")
    ('affine',)
    """
    if text.strip() == "auto":
        if of == "activations":
            return ("channel", "identity", "affine")
        # The cost of a span's map means little without that of skipping the span.
        return ("affine", "identity") if of.startswith("spans:") else ("affine",)
    names = tuple(unique(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in MAPS:
            raise RequestError(f"replacement.maps: unknown map '{name}'{nearest(name, MAPS)}")
    if not names:
        raise RequestError(f"replacement.maps is empty, expected one or more of {', '.join(MAPS)}")
    return names


class Replacements(LazyProbe):
    """The probe `replacement`."""

    name = "replacement"
    description = "the network's outputs with one place replaced by a fitted affine map"
    home = "nlbench.probes.replacement.replacement_observation"
    follows: ClassVar[Mapping[str, str]] = {"of": "sites.of", "select": "sites.select"}
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(128, "samples per batch", minimum=2, maximum=1e9),
        "of": Option(
            "activations",
            "places to replace: activations, blocks, mlp, attention, spans:L or modules:GLOB; the "
            "default is a value set for sites.of",
        ),
        "select": Option("*", "sites to replace; the default is a value set for sites.select"),
        "maps": Option(
            "auto",
            f"maps to fit, from {', '.join(MAPS)}; the first one determines the value. auto: "
            "channel,identity,affine at activations; affine,identity at spans; affine at others",
        ),
        "affine": Option(
            128,
            "maximum number of channels of an activation for which a full affine map is fitted",
            minimum=0,
            maximum=1e6,
        ),
        "judged": Option(
            0,
            "maximum number of samples to evaluate maps on; 0: all samples not used for fitting",
            minimum=0,
            maximum=1e9,
        ),
        "crossed": Option(
            False, "also fit maps on the half used for evaluation, and evaluate on the other"
        ),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches in all passes over the samples, to fit and to evaluate."""
        return (4 if options["crossed"] else 2) * -(-samples // int(options["batch"]))

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Validate ``of``, ``select`` and ``maps``."""
        parse_maps(str(options["maps"]))
        try:
            parse_places(str(options["of"]))
            Selection.parse(str(options["select"]))
        except RequestError as error:
            raise type(error)(str(error).replace("sites.", "replacement.", 1)) from error


REPLACEMENT = Replacements()
