"""The probe `sites` and its options, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nlbench.options import Option
from nlbench.probes import LazyProbe, ProbeOptions

from .select import Selection

__all__ = ["COMPARED_SAMPLES", "SITES", "Sites"]

COMPARED_SAMPLES = 4
"""Number of samples that are run beforehand, to see whether float32 resolves their differences."""


class Sites(LazyProbe):
    """The probe `sites`."""

    name = "sites"
    description = "input and output of every activation call"
    home = "nlbench.probes.sites.listeners"
    shows_on_cpu = True
    options: ClassVar[Mapping[str, Option]] = {
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
            "sites to observe: globs over names, kind:KIND, role:ROLE, every:K; joined by + all "
            "must hold, by commas any",
        ),
        "attention": Option(False, "include the softmaxes of attention"),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches."""
        return -(-samples // int(options["batch"]))

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Validate ``sites.select``."""
        Selection.parse(str(options["select"]))

    def stored_samples(self, options: ProbeOptions) -> int:
        """Return the number of samples that are run beforehand; all pass batch by batch."""
        return COMPARED_SAMPLES


SITES = Sites()
"""Input and output of every activation call."""
