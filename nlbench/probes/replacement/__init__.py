"""The probe `replacement`: outputs of the network with one place replaced by a fitted map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

from .replacement_probe import REPLACEMENT as REPLACEMENT
from .replacement_probe import UNFITTED as UNFITTED

if TYPE_CHECKING:
    # Runs are planned without PyTorch, which these modules import.
    from .fits import AffineFit as AffineFit
    from .fits import AffineMap as AffineMap
    from .interception import CallInterception as CallInterception
    from .interception import ReplaceableCall as ReplaceableCall
    from .interception import find_calls as find_calls
    from .replacement_observation import ReplacedOutputs as ReplacedOutputs

__getattr__, __dir__, __all__ = lazy_imports(__name__)
