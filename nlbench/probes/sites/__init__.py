"""The probe `sites`: input and output of every activation call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from nlbench import lazy_exports
from nlbench.options import Option
from nlbench.probes import LazyProbe, ProbeOptions

from .select import Selection

if TYPE_CHECKING:
    from .probe import SiteBatch, list_sites, observe_sites

__all__ = ["SITES", "SiteBatch", "Sites", "list_sites", "observe_sites"]


class Sites(LazyProbe):
    """The probe `sites`."""

    name = "sites"
    description = "input and output of every activation call"
    home = "nlbench.probes.sites.probe"
    shows_on_cpu = True
    options: ClassVar[Mapping[str, Option]] = {
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
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """How many batches that many samples make."""
        return -(-samples // int(options["batch"]))

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Refuse a choice of sites that can't be read."""
        Selection.parse(str(options["select"]))

    def held(self, options: ProbeOptions) -> int:
        """One: all samples go through, batch by batch."""
        return 1


SITES = Sites()
"""Input and output of every activation call."""

# Planning a run reads the options above without PyTorch.
__getattr__ = lazy_exports(
    __name__, {"SiteBatch": "probe", "list_sites": "probe", "observe_sites": "probe"}
)
