"""The interface of reports for runs, results and commands, and its installed plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from nlbench import registry
from nlbench.errors import PluginError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

    from nlbench.measure import Result
    from nlbench.probes.lines import Plane
    from nlbench.store.run import Run
    from nlbench.store.signature import Signature


class Reports(Protocol):
    """Functions of the module named by the entry point of the group ``nlbench.reports``."""

    def agreement_of(self, run: Run) -> pd.DataFrame:
        """Correlate the measures of a run."""

    def compare_runs(self, first: Run, second: Run) -> Any:
        """Compare the cells and manifests of two runs."""

    def draw_plane(self, plane: Plane, path: Path, names: list[str], caption: str = "") -> None:
        """Draw the pieces of all layers on a plane."""

    def fingerprint_of(self, run: Run, measure: str | None = None) -> Figure:
        """Draw each network as a strip over its depth."""

    def html_of(self, shown: Run | Result) -> str:
        """Return the HTML of a notebook cell."""

    def leaderboard_of(
        self,
        run: Run,
        measures: Sequence[str] | None = None,
        *,
        seeds: str = "together",
        full: bool = False,
        reference: bool = False,
    ) -> pd.DataFrame:
        """Rank the subjects of a run."""

    def manifest_text(self, manifest: Mapping[str, Any]) -> str:
        """Return a manifest as lines for a terminal."""

    def plot_of(self, run: Run, measure: str) -> Figure:
        """Draw a measure's value at each place."""

    def print_leaderboard(self, run: Run, console: Console) -> None:
        """Print the leaderboard of a run."""

    def signature_of(
        self, run: Run, subject: str | None = None, measure: str | None = None
    ) -> Signature:
        """Return the signature of a subject by a measure."""

    def to_latex(self, run: Run, *, ranks: bool = True) -> str:
        """Return the leaderboard of a run as a LaTeX table."""

    def to_markdown(self, run: Run, *, ranks: bool = True) -> str:
        """Return the leaderboard of a run as a Markdown table."""

    def to_parquet(self, table: pd.DataFrame, path: str | Path) -> Path:
        """Write a table as Parquet."""

    def write_page(self, runs: Sequence[Run], output: str | Path) -> Path:
        """Write runs as one HTML page."""

    def write_site(self, runs: Sequence[Run], output: str | Path) -> Path:
        """Write runs as a folder of HTML pages."""


def load_reports() -> Reports:
    """Load the installed reports."""
    for point in registry.entry_points("nlbench.reports"):
        return cast(Reports, point.load())
    raise PluginError("no reports are installed; install nlbench again")
