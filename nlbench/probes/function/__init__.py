"""The probe `function`: the network as a differentiable function of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

from .function_probe import FUNCTION as FUNCTION

if TYPE_CHECKING:
    # Runs are planned without PyTorch, which these modules import.
    from nlbench.introspection.autodiff import input_gradient as input_gradient

    from .derivatives import directional_derivative as directional_derivative
    from .function_observation import FunctionBatch as FunctionBatch
    from .function_observation import observe_function as observe_function

__getattr__, __dir__, __all__ = lazy_imports(__name__)
