"""Access to the installed reports."""

from __future__ import annotations

from typing import Any

from nlbench import registry
from nlbench.errors import PluginError


def load_reports() -> Any:
    """Load the installed reports: a module with the exports of ``nlbench.reports``."""
    for point in registry.entry_points("nlbench.reports"):
        return point.load()
    raise PluginError("no reports are installed; reinstall nlbench")
