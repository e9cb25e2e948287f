"""Access to the reports, which the core uses only through their exports."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_reports() -> Any:
    """Import ``nlbench.reports`` when a report is requested, since it imports pandas."""
    return import_module("nlbench.reports")
