"""The checks of ``nlbench check-measure``, for measures of any probe."""

from .check import Check
from .suite import check_measure

__all__ = ["Check", "check_measure"]
