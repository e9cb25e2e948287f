"""Export and report of spans that were removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nlbench.cli.common import note, print_table
from nlbench.errors import RequestError
from nlbench.models.networks.hugging_face import model_folder
from nlbench.reporting import load_reports
from nlbench.serialization.files import write_atomically

from .export import ExportReport, export_decoder
from .span_removal import SpanRemoval


def export_spans(spans: SpanRemoval, folder: Path, model: str, tokens: Tensor) -> ExportReport:
    """Export a network without its spans.

    Raises
    ------
    nlbench.RequestError
        If a map of the stream stands in the network: no layer of a decoder can hold it.
    """
    for removed in spans.removed:
        if removed.map == "affine":
            fold = removed.result.costs.get("fold")
            advice = f"--map fold costs {fold} nats" if fold else "fold isn't possible there"
            raise RequestError(
                f"--export: the affine map at {removed.name} costs {removed.result.costs['affine']}"
                " nats, but no layer of the network can hold it, since the residual stream passes "
                f"every layer; {advice}, and --map skip {removed.result.costs['skip']}"
            )
    source = model_folder(model.removeprefix("hf/")) if model.startswith("hf/") else None
    return export_decoder(spans.network, folder, tokens, source)


def show_spans(
    spans: SpanRemoval, folder: Path, title: str, exported: ExportReport | None, as_json: bool
) -> None:
    """Write the page and the table of spans to a folder, and print them."""
    import pandas as pd

    reports = load_reports()
    write_atomically(folder / "spans.csv", pd.DataFrame(spans.candidates).to_csv(index=False))
    names = ", ".join(f"{removed.name} ({removed.map})" for removed in spans.removed)
    lines = [f"Removed: {names}.", *(f"{remark}." for remark in spans.remarks)]
    if exported is not None:
        lines.append(f"Export: {exported}.")
    page = reports.write_spans(
        spans.candidates, spans.totals, folder / "spans.html", title=title, sentence=" ".join(lines)
    )
    if as_json:
        print_table([dict(row) for row in spans.candidates], as_json)
        return
    for rows in (spans.candidates, spans.totals):
        _print_rows(reports.span_table(rows))
        print()
    print(f"removed  {names}")
    if exported is not None:
        print(f"export   {exported}")
    print(f"page     {page}")
    for remark in spans.remarks:
        note(remark)


def _print_rows(table: Any) -> None:
    rows: Sequence[Mapping[str, str]] = [dict(zip(table.head, r, strict=True)) for r in table.rows]
    print_table([dict(row) for row in rows], False, show_header=True)
