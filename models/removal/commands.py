"""The ``nlbench remove`` command."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.cli.common import (
    check_unused,
    command_line,
    file_stem,
    name_completer,
    note,
    numbered,
    parse_folder,
    print_table,
    split_subject_options,
)
from nlbench.cli.parameters import (
    DataName,
    Device,
    JsonFlag,
    MeasureSettings,
    ModelName,
    ProgressStyle,
)
from nlbench.errors import RequestError
from nlbench.lazy import load_reports
from nlbench.parsers import MAX_COUNT, MAX_INTEGER
from nlbench.serialization.files import make_folder, write_atomically

if TYPE_CHECKING:
    from .curve import RemovalResult
    from .span_removal import SpanRemoval

CHECKPOINT = "left.safetensors"
CURVE = "curve.csv"

Criterion = Annotated[
    str,
    typer.Option(
        help="A measure with a value per activation, or random, depth (last first) or size "
        "(smallest first). By a measure, the activations closest to affine are removed first.",
        autocompletion=name_completer("measures"),
    ),
]
Keep = Annotated[float, typer.Option(help="Fraction of the network to keep.", min=0, max=1)]
Share = Annotated[
    str,
    typer.Option(
        help="What --keep is a fraction of: calls, units (channels), positions (values per sample) "
        "or flops (each call counts with the layers since the previous one)."
    ),
]
KeepRelus = Annotated[
    int | None,
    typer.Option(
        help="Keep at most this number of positions: values per sample that activations compute, "
        "the ReLU count of private inference. Replaces --keep and --share.",
        min=0,
        max=MAX_INTEGER,
    ),
]
Of = Annotated[
    str,
    typer.Option(
        help="Parts to remove: activations, replaced by per-channel maps, or blocks, mlp, "
        "attention or modules:GLOB, replaced by full maps; spans:L for L consecutive blocks."
    ),
]
SpanName = Annotated[
    str | None,
    typer.Option(
        "--span", help="The span of blocks to remove, with both ends: 12-15. Replaces --of."
    ),
]
Count = Annotated[int, typer.Option(help="Spans to remove.", min=1, max=MAX_COUNT)]
MapName = Annotated[
    str,
    typer.Option(
        "--map",
        help="Replacement of a span: skip (nothing), affine (a map of the stream) or fold (a map "
        "in the weights of the previous block), unless it costs more than skip.",
    ),
]
Judged = Annotated[
    int,
    typer.Option(
        help="Number of spans, the best by the criterion, whose cost is measured to choose one.",
        min=1,
        max=MAX_COUNT,
    ),
]
Export = Annotated[
    str | None,
    typer.Option(
        help="New folder for the network that is left, without nlbench: for transformers after "
        "the removal of spans, otherwise for torch.export.load."
    ),
]
Curve = Annotated[
    bool, typer.Option(help="Evaluate the network after every removal, not only at the end.")
]
Reverse = Annotated[bool, typer.Option("--reverse", help="Remove in the opposite order.")]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        help="New folder for curve.html, curve.csv and left.safetensors. "
        r"\[default: MODEL-removed, numbered if it exists]",
    ),
]
Weights = Annotated[
    str, typer.Option(help="trained, init or a checkpoint's path; auto: trained if available.")
]
Samples = Annotated[
    int,
    typer.Option(help="Samples from the test split for evaluation; 0: all.", min=0, max=MAX_COUNT),
]
FitSamples = Annotated[
    int,
    typer.Option(
        help="Samples from the training split for ranking and fitting.", min=4, max=MAX_COUNT
    ),
]
Seed = Annotated[
    int, typer.Option(help="Seed for the samples and the random order.", min=0, max=MAX_INTEGER)
]


def remove(
    model: ModelName,
    by: Criterion = "substitution",
    keep: Keep = 0.5,
    of: Of = "activations",
    data: DataName = "digits",
    weights: Weights = "auto",
    share: Share = "calls",
    keep_relus: KeepRelus = None,
    curve: Curve = True,
    reverse: Reverse = False,
    span: SpanName = None,
    count: Count = 1,
    map_name: MapName = "fold",
    judged: Judged = 5,
    export: Export = None,
    out: Out = None,
    samples: Samples = 512,
    fit_samples: FitSamples = 512,
    seed: Seed = 0,
    setting: MeasureSettings = None,
    device: Device = "auto",
    progress: ProgressStyle = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Replace activations or blocks by affine maps, one by one, and evaluate what remains.

    All maps are refitted after each removal. The network that keeps the requested fraction is
    saved as a checkpoint for --weights. Spans of blocks (--of spans:L, --span) are deleted instead,
    --count of them. --export writes the remaining network.
    """
    for group, name in (("models", model), ("datasets", data)):
        registry.expand(group, [name])
    arguments, options, settings = split_subject_options(setting or [], model, data)
    from nlbench.introspection.precision import resolve_device
    from nlbench.probes.sites.sites_probe import parse_places
    from nlbench.progress import create_progress
    from nlbench.subjects.load import load_subject
    from nlbench.subjects.spec import SubjectSpec
    from nlbench.subjects.weights import save_weights

    from .curve import CALL_WEIGHTS, check_criterion, run_removal
    from .export import export_calls, export_spans
    from .span_removal import SpanRemoval
    from .spans import SPAN_MAPS

    check_criterion(by)
    try:
        places = parse_places(of)
    except RequestError as error:
        raise RequestError(str(error).replace("sites.of", "--of", 1)) from None
    for option, value, known in (("share", share, CALL_WEIGHTS), ("map", map_name, SPAN_MAPS)):
        if value not in known:
            raise RequestError(f"--{option}: '{value}', expected {', '.join(known)}")
    _output_folder(out, model)
    spans_named = [place for place in places if place.startswith("spans:")]
    if spans_named and len(spans_named) < len(places):
        raise RequestError(f"--of: '{of}', expected {spans_named[0]} alone")
    is_span = span is not None or bool(spans_named)
    if is_span:
        changed = {"--keep": keep != 0.5, "--share": share != "calls", "--no-curve": not curve}
        _refuse_changed({**changed, "--keep-relus": keep_relus is not None}, "spans")
    else:
        changed = {"--count": count != 1, "--map": map_name != "fold", "--judged": judged != 5}
        _refuse_changed(changed, "activations or modules")
    exports = None if export is None else parse_folder(export, "--export")
    if exports is not None:
        check_unused(exports, "--export")
    command = command_line()
    with create_progress(progress) as bar:
        bar.show_status("loading")
        spec = SubjectSpec(model, weights, data, seed, options=options, arguments=arguments)
        train_spec = replace(spec, samples=fit_samples, split="train")
        test_spec = replace(spec, samples=samples or None, split="test")
        train, test = (load_subject(s, resolve_device(device)) for s in (train_spec, test_spec))
        bar.show_status("removing")
        choice: dict[str, Any] = {"reverse": reverse, "seed": seed, "settings": settings}
        exported = ""
        if is_span:
            spans = SpanRemoval(train, test, map_name)
            if span is not None:
                spans.remove_named(span)
            else:
                spans.remove_ranked(by, of, count, judged, **choice)
            totals = spans.totals()
            if exports is not None:
                exported = export_spans(spans.network, spans.removed, exports, model, test)
        else:
            result = run_removal(
                train,
                test,
                by,
                keep=keep,
                share=share,
                of=of,
                compute_curve=curve,
                keep_relus=keep_relus,
                **choice,
            )
    # Another process may have written its result in the meantime.
    folder = _output_folder(out, model)
    make_folder(folder)
    if is_span:
        _write_spans(folder, spans, totals, model, exported, as_json)
        return
    metadata = {**result.metadata, "command": command}
    save_weights(folder / CHECKPOINT, result.network, metadata)
    _write_csv(folder / CURVE, result.rows())
    if exports is not None:
        description = export_calls(result.network, exports, test.inputs[:8])
        exported = f"{export} ({description}; reloaded by PyTorch alone)"
    share = share if keep_relus is None else "positions"
    _write_calls(folder, result, model, by, share, exported, curve, as_json)


def _refuse_changed(options: Mapping[str, bool], what: str) -> None:
    """Raise if one of the options, which don't apply, was set."""
    for option, is_set in options.items():
        if is_set:
            raise RequestError(f"{option} has no effect on the removal of {what}")


def _write_spans(
    folder: Path,
    spans: "SpanRemoval",
    totals: list[dict[str, Any]],
    model: str,
    exported: str,
    as_json: bool,
) -> None:
    """Write and print the result of a removal of spans."""
    rows = spans.rows()
    removed = ", ".join(f"{span.name} ({span.chosen})" for span in spans.removed)
    remarks = spans.remarks()
    sentences = [f"Removed: {removed}.", *(f"{remark}." for remark in remarks)]
    if exported:
        sentences.append(f"Export: {exported}.")
    _write_csv(folder / "spans.csv", rows)
    reports = load_reports()
    page = reports.write_removal(
        {"Networks": totals, "Judged spans": rows},
        folder / "spans.html",
        title=f"{model}: spans of blocks removed",
        sentence=" ".join(sentences),
    )
    tables = [reports.removal_table(rows), reports.removal_table(totals)]
    lines = {"removed": removed, "export": exported, "page": page}
    _show(rows, tables, lines, as_json)
    if not as_json:
        for remark in remarks:
            note(remark)


def _write_calls(
    folder: Path,
    result: "RemovalResult",
    model: str,
    by: str,
    share: str,
    exported: str,
    curve: bool,
    as_json: bool,
) -> None:
    """Write and print the result of a removal of calls."""
    from .curve import area_under

    reports = load_reports()
    rows = result.rows()
    kept = f"{len(result.order) - len(result.removed)} of {len(result.order)} calls"
    removed = ", ".join(result.removed) or "none"
    page = reports.write_removal(
        {"Every step": rows},
        folder / "curve.html",
        title=f"{model}: calls replaced by affine maps, by {by}",
        share=share,
        sentence=f"{CHECKPOINT} keeps {kept}; removed: {removed}.",
    )
    left = next(row for row in rows if row["removed"] == "".join(result.removed[-1:]))
    positions = f"{left['positions']:,} of {rows[0]['positions']:,} positions"
    areas = ", ".join(
        f"{statistic} {area_under(result.steps, statistic, share):.4g}"
        for statistic in ("accuracy", "kl")
        if statistic in rows[0]
    )
    lines = {
        "area under the curve,": f"by {share}: {areas}" if curve else "",
        "page": page,
        "curve": folder / CURVE,
        "network": f"{folder / CHECKPOINT} ({kept} and {positions} remain)",
        "export": exported,
    }
    _show(rows, [reports.removal_table(rows)], lines, as_json)
    if result.nested:
        note(f"{result.nested} modules inside other selected modules left out")


def _write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows before the page, which needs more of a disk that is full."""
    import pandas as pd

    write_atomically(file, pd.DataFrame(rows).to_csv(index=False))


def _show(
    rows: list[dict[str, Any]], tables: Sequence[Any], lines: Mapping[str, object], as_json: bool
) -> None:
    """Print rows as JSON, or the tables and the lines that aren't empty."""
    if as_json:
        print_table(rows, as_json)
        return
    for table in tables:
        texts = [dict(zip(table.head, row, strict=True)) for row in table.rows]
        print_table(texts, as_json, show_header=True)
        print()
    for name, text in lines.items():
        if text:
            print(f"{name:<8} {text}")


def _output_folder(out: str | None, model: str) -> Path:
    """Return the folder for the result. Raise if it contains anything."""
    if out is None:
        return numbered(Path(f"{file_stem(model)}-removed"))
    folder = parse_folder(out)
    check_unused(folder)
    return folder
