"""The probe `function`: the network as a differentiable function of its input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from nlbench import lazy_exports
from nlbench.options import Option
from nlbench.probes import LazyProbe, ProbeOptions

if TYPE_CHECKING:
    from .probe import FunctionBatch, directional_derivative, observe_function

__all__ = ["FUNCTION", "Function", "FunctionBatch", "directional_derivative", "observe_function"]


class Function(LazyProbe):
    """The probe `function`."""

    name = "function"
    description = "the network as a plain differentiable function of its input"
    home = "nlbench.probes.function.probe"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(128, "samples a batch", minimum=1, maximum=1e9)
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """How many batches that many samples make."""
        return -(-samples // int(options["batch"]))


FUNCTION = Function()
"""The network as a plain differentiable function of its input."""

# Planning a run reads the options above without PyTorch.
_NAMES = ("FunctionBatch", "directional_derivative", "observe_function")
__getattr__ = lazy_exports(__name__, dict.fromkeys(_NAMES, "probe"))
