"""The checks of ``nlbench check-measure``, for measures of any probe."""

from .checks import check_measure
from .trial import Check

__all__ = ["Check", "check_measure"]
