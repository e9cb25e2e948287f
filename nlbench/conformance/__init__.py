"""The checks of ``nlbench check-measure``, for measures of any probe."""

from .checks import Check, check_measure

__all__ = ["Check", "check_measure"]
