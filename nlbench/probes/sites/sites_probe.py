"""The probe `sites` and its options, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nlbench.options import Option
from nlbench.probes import LazyProbe, ProbeOptions

from .places_and_rows import RowPolicy, parse_places
from .select import Selection

COMPARED_SAMPLES = 4
"""Number of samples that are run first, to test whether float32 is precise enough."""


class Sites(LazyProbe):
    """The probe `sites`."""

    name = "sites"
    description = "input and output of every activation call, block or other module"
    home = "nlbench.probes.sites.listeners"
    shows_on_cpu = True
    checks_samples = True
    options: ClassVar[Mapping[str, Option]] = {
        "of": Option(
            "activations",
            "places to observe: activations, or blocks, mlp, attention, spans:L, modules:GLOB, "
            "joined by commas",
        ),
        "rows": Option(
            "auto",
            "rows (n, d) of a place: samples, tokens, tokens:K drawn from each sample, last, or "
            "nodes of a graph; auto: tokens for blocks, mlp and attention, else samples",
        ),
        "skip": Option(0, "leading positions to omit from each sample", minimum=0, maximum=1e9),
        "reduction": Option(
            "spatial",
            "reduction of a site's tensor to (n, d)",
            choices=("spatial", "flatten", "published"),
        ),
        "batch": Option(
            128, "samples per batch; scores are computed per batch", minimum=1, maximum=1e9
        ),
        "select": Option(
            "*",
            "sites to observe: globs over names, kind:KIND, role:ROLE, every:K; + means and, "
            "a comma means or",
        ),
        "attention": Option(False, "include the softmaxes of attention"),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches."""
        return -(-samples // int(options["batch"]))

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Validate ``sites.select``, ``sites.of`` and ``sites.rows``."""
        Selection.parse(str(options["select"]))
        parse_places(str(options["of"]))
        RowPolicy.parse(str(options["rows"]), int(options["skip"]), str(options["of"]))

    def stored_samples(self, options: ProbeOptions) -> int:
        """Return the number of samples to run before all samples are run in batches."""
        return COMPARED_SAMPLES


SITES = Sites()
"""The registered instance."""
