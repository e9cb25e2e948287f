"""The probe `function` and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nlbench.options import Option
from nlbench.probes.probe import LazyProbe, ProbeOptions


class Function(LazyProbe):
    """The probe `function`."""

    name = "function"
    needs_function = True
    needs_one_type = True
    description = "the network as a plain differentiable function of its input"
    home = "nlbench.probes.function.function_observation"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(128, "samples per batch", minimum=1, maximum=1e9)
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches."""
        return -(-samples // int(options["batch"]))


FUNCTION = Function()
