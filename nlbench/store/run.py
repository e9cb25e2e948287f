"""A run: its records, their tidy table and its reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, enumerate_names
from nlbench.lazy import load_reports
from nlbench.measure import Result
from nlbench.parsers import unique

from .manifest import Manifest, now
from .record import Record, changed_keys, difference_text, read_decisions
from .run_folder import RunFolder, tidy_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nlbench.evaluation import EvaluatedModels
    from nlbench.representations import Similarity

    from .signature import Signature


@dataclass
class Run:
    """The records of a run's cells, and its manifest.

    Parameters
    ----------
    manifest : Manifest or mapping
        Request, machine, time and versions; a mapping has the content of a manifest's file.
    records : list of Record
    path : Path, optional
        The run's folder.
    models : EvaluatedModels, optional
        The models of `nlbench.evaluate`, if there were several.

    Examples
    --------
    >>> import torch, nlbench
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> run = nlbench.evaluate(model, torch.randn(64, 4), measures=["r2"])
    >>> list(run.scores.columns[:6])
    ['model', 'weights', 'data', 'seed', 'measure', 'place']
    >>> 0 < run["r2"].summary["value"] < 1
    True
    """

    manifest: Mapping[str, Any]
    records: list[Record] = field(default_factory=list)
    path: Path | None = None
    models: EvaluatedModels | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.manifest = Manifest.from_dict(self.manifest)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name if self.path else "run"

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The tidy table: one number per row.

        The columns are ``model, weights, data, seed, measure, place, statistic, value, n, status,
        reason``. ``place`` is the site, path or layer, or empty for the summary. A missing value
        is one row with an empty value, the status and the reason.
        """
        return tidy_table(self.records)

    def __getitem__(self, measure: str) -> Result:
        """Return a measure's result in a run with a single subject."""
        results = [r.result for r in self.records if r.measure.name == measure]
        if len(results) != 1:
            names = sorted({r.measure.name for r in self.records})
            raise KeyError(f"{len(results)} results for '{measure}'; measures: {names}")
        return results[0]

    def __repr__(self) -> str:
        """Return one line with the folder, models, first values and status counts."""
        models = unique(r.subject.model for r in self.records)
        texts: dict[str, list[str]] = {}
        for record in self.records:
            values = texts.setdefault(record.measure.name, [])
            if record.result.status == "ok" and "value" in record.result.summary:
                values.append(f"{record.result.summary['value']:.4g}")
        measures = [
            f"{name} ({enumerate_names(values, 3)})" if values else name
            for name, values in texts.items()
        ]
        statuses = [record.result.status for record in self.records]
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in unique(statuses))
        where = f" in {self.path}" if self.path else ""
        cells = (
            f"{enumerate_names(models, 3)} by {enumerate_names(measures, 3)}"
            if statuses
            else "no cells"
        )
        return f"<Run{where}: {cells}{f': {counts}' if counts else ''}>"

    @property
    def failed(self) -> list[Record]:
        """Cells that failed."""
        return [record for record in self.records if record.result.status == "failed"]

    def save(self, path: str | Path) -> Path:
        """Write the manifest, records and table to a folder of the run's own, and return it.

        If saving is interrupted, save to the same folder again; until then, the folder can't be
        loaded as a run.

        Raises
        ------
        nlbench.RequestError
            If the folder contains anything else or can't be written.
        """
        folder = Path(path)
        manifest = Manifest.from_dict(self.manifest)
        RunFolder(folder).save(manifest, self.records, is_own=folder == self.path)
        self.path = folder
        return folder

    def report(self, output: str | Path) -> Path:
        """Write the run as an HTML page, like ``nlbench report``, and return its path."""
        return load_reports().write_page([self], Path(output))

    def leaderboard(
        self,
        measures: Sequence[str] | None = None,
        *,
        seeds: str = "together",
        full: bool = False,
        reference: bool = False,
    ) -> pd.DataFrame:
        """Rank the subjects, with intervals. Checkpoints of a training run are ordered by step.

        Parameters
        ----------
        measures : sequence of str, optional
            All by default. Rows are sorted by the first measure that has a direction.
        seeds : {"together", "apart"}
            Pool the seeds of a network into one row, or list them separately.
        full : bool
            Add the fields ``least, greatest, tied, best, worst, n, over, status, reason``,
            and add the run, weights, data and seeds to the index.
        reference : bool
            Add the field ``reference``: the fraction of the reference networks that are less
            nonlinear; NaN for a measure without reference networks, and for ``absdev``, which
            depends on units: see ``absdev.relative``.

        Returns
        -------
        DataFrame
            One row per subject; the columns are ``(measure, field)``, where ``field`` is
            ``value``, ``error``, ``low``, ``high`` or ``rank``.
        """
        return load_reports().rank_subjects(
            self, measures, seeds=seeds, full=full, reference=reference
        )

    def agreement(self) -> pd.DataFrame:
        """Correlate each pair of measures across networks, and across sites within networks."""
        return load_reports().correlate_pairs(self)

    def signature(self, subject: str | None = None, measure: str | None = None) -> Signature:
        """Return a measure's signature for the subject with the given label."""
        return load_reports().make_signature(self, subject, measure)

    def figure(
        self,
        form: str,
        *,
        measure: str | None = None,
        subject: str | Sequence[str] | None = None,
        other: Run | None = None,
        width: str | float = "column",
        format: str = "pdf",
    ) -> Figure:
        """Draw a figure for a paper, like ``nlbench figure``: text of 8 points, no scaling needed.

        Parameters
        ----------
        form : {"strip", "signature", "board", "compare", "path"}
            A strip of activations per network, the value at each activation, networks by measures,
            two networks activation by activation, or the outputs along one path.
        measure : str, optional
            By default the first measure of activations; ``board`` draws as many as fit.
        subject : str or sequence of str, optional
            Labels, models or globs of the networks to draw; all by default.
        other : Run, optional
            For ``compare``: the run with the second network; by default both are in this run.
        width : {"column", "text"} or float
            3.25 or 6.75 inches, or a number of inches.
        format : {"pdf", "svg", "png"}
            Format of a file without a suffix, and of ``to_bytes()``.

        Returns
        -------
        matplotlib.figure.Figure
            ``figure.savefig("strip.pdf")`` writes it.

        Raises
        ------
        nlbench.RequestError
            If an argument is unknown, or there is nothing to draw.

        Examples
        --------
        >>> import torch, nlbench
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> run = nlbench.evaluate(model, torch.randn(64, 4), measures=["r2"])
        >>> run.figure("strip").to_bytes()[:4]
        b'%PDF'
        """
        return load_reports().paper_figure(
            self, form, measure=measure, subject=subject, other=other, width=width, format=format
        )

    def fingerprint(self, measure: str | None = None, ax: Axes | None = None) -> Figure:
        """Plot each network as a strip along its depth, coloured by score."""
        return load_reports().plot_fingerprint(self, measure, ax)

    def plot(self, measure: str, ax: Axes | None = None) -> Figure:
        """Plot a measure's value at each place, with one series per subject."""
        return load_reports().plot_places(self, measure, ax)

    def similarity(
        self,
        other: Run | None = None,
        *,
        subject: str | None = None,
        against: str | None = None,
        device: str = "auto",
    ) -> Similarity:
        """Compute the CKA of all places of the run's network with those of another, or its own.

        The networks are loaded again, which runs their code, and must have the recorded weights
        and samples.

        Parameters
        ----------
        other : Run, optional
            Run of the other network; by default this run.
        subject, against : str, optional
            Label or weights of the network in this run, and of the one to compare with.
        device : str
            ``auto``, ``cpu``, ``cuda``, …

        Returns
        -------
        nlbench.representations.Similarity
            ``values`` and ``errors`` by pairs of places; ``frame()``, and ``write(path)`` for a
            heat map.

        Raises
        ------
        nlbench.RequestError
            If a network isn't in the run, has changed, or was measured on other samples.
        """
        # Imported by name, since it loads subjects and a run is only a store of records.
        compute = import_module("nlbench.representations").similarity
        return compute(self, other, subject=subject, against=against, device=device)

    def weight_linearity(
        self, *, since: str = "previous", directions: int = 64, device: str = "auto"
    ) -> pd.DataFrame:
        """Compare each network with its linearisation in the weights at an earlier checkpoint.

        The networks of a run's folder are loaded again, which runs their code; those of
        `nlbench.evaluate` are in memory. See `nlbench.weight_linearity.weight_linearity_of_run`.

        Raises
        ------
        nlbench.RequestError
            If no network has two checkpoints, or one has changed.
        """
        compute = import_module("nlbench.weight_linearity").weight_linearity_of_run
        return compute(self, since=since, directions=directions, device=device)

    def to_latex(self, *, ranks: bool = True, error: bool = False) -> str:
        """Return the leaderboard as a LaTeX table with booktabs rules, with errors on request."""
        return load_reports().to_latex(self, ranks=ranks, error=error)

    def to_markdown(self, *, ranks: bool = True) -> str:
        """Return the leaderboard as a Markdown table."""
        return load_reports().to_markdown(self, ranks=ranks)

    def to_parquet(self, path: str | Path) -> Path:
        """Write the tidy table as Parquet, which requires pyarrow, and return its path."""
        return load_reports().to_parquet(self.scores, path)

    def _repr_html_(self) -> str:
        return load_reports().render_html(self)


def compare(first: Run, second: Run) -> Any:
    """Compare the cells and manifests of two runs, like ``nlbench compare``.

    Returns
    -------
    nlbench.reports.compare.Comparison
        ``frame()`` returns a table of the differences by place, with their errors;
        ``broken(["affinity@* > 0.05"])`` lists the changes beyond a bound; ``write(path)`` saves
        the comparison.

    Raises
    ------
    nlbench.RequestError
        If the runs share no cell.

    Examples
    --------
    >>> import torch, nlbench
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> run = nlbench.evaluate(model, torch.randn(64, 4), measures=["r2"])
    >>> nlbench.compare(run, run).frame()[["place", "difference"]].values.tolist()
    [['', 0.0], ['1', 0.0]]
    """
    return load_reports().compare_runs(first, second)


def load_run(path: str | Path) -> Run:
    """Load a run from its folder.

    Parameters
    ----------
    path : str or Path
        The folder passed to ``nlbench run --out``.

    Raises
    ------
    nlbench.RequestError
        If it is not a run folder or one of its files is damaged.
    """
    folder = Path(path)
    manifest, records = RunFolder(folder).read()
    return Run(manifest, records, folder)


def merge_runs(runs: Sequence[str | Path], out: str | Path) -> Run:
    """Merge the cells of several runs into a new or empty folder, leaving the runs unchanged.

    If several runs contain a cell, one record is kept, and finished records take precedence. Raise
    RequestError if two runs disagree: different values for the same cell, different options for a
    measure, or different weights or samples for a subject.
    """
    loaded = [load_run(path) for path in runs]
    if not loaded:
        raise RequestError("merge: expected at least one run")
    records: dict[str, Record] = {}
    origins: dict[str, Run] = {}
    for run in loaded:
        for record in run.records:
            other = records.get(record.key)
            if other is None or (record.is_done and not other.is_done):
                records[record.key] = record
                origins[record.key] = run
            elif record.is_done and record.result != other.result:
                model, weights, data, seed, measure = record.identity
                raise RequestError(
                    f"{origins[record.key].path} and {run.path} have different results for the "
                    f"same key: {measure} of {model} ({weights}) on {data}, seed {seed}"
                )
    finished = [record for record in records.values() if record.is_done]
    _check_consistent(finished, origins)
    identities = {record.identity for record in finished}
    selected = [r for r in records.values() if r.is_done or r.identity not in identities]
    manifests = [Manifest.from_dict(run.manifest) for run in loaded]
    manifest = replace(
        manifests[0],
        merged={"from": [str(path) for path in runs], "at": now()},
        calls=tuple(call for manifest in manifests for call in manifest.calls),
        seconds=round(sum(manifest.seconds for manifest in manifests), 3),
        unfinished=False,
    )
    merged = Run(manifest.describe_records(selected), selected)
    merged.save(out)
    return merged


def _check_consistent(records: Sequence[Record], origins: dict[str, Run]) -> None:
    decisions: dict[tuple[object, ...], object] = {}
    first_runs: dict[tuple[object, ...], Run] = {}
    for record in records:
        run = origins[record.key]
        record_decisions = read_decisions(record)
        for key in changed_keys(record_decisions, decisions):
            raise RequestError(
                f"{first_runs[key].path} and {run.path} can't be merged: "
                f"{difference_text(record, key)}"
            )
        decisions |= record_decisions
        first_runs |= {key: run for key in record_decisions if key not in first_runs}
