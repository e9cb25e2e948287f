"""Measure anyone's model on anyone's inputs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.execution.measure_subject import records_of
from nlbench.execution.numerics import Machine, exact_arithmetic
from nlbench.measure import Measure
from nlbench.options import OptionValue
from nlbench.plan import (
    Settings,
    checked_measure,
    content_key,
    load_measures,
    load_probe,
    make_bench,
)
from nlbench.progress import Monitor, Progress
from nlbench.store.manifest import make_manifest, measure_facts
from nlbench.store.run_folder import Run
from nlbench.subjects.samples import Batches, StreamedSubject, sample_facts
from nlbench.subjects.weights import state_hash

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module,
    inputs: Tensor | Iterable[Any],
    measures: str | Sequence[str | type[Measure]],
    *,
    settings: Settings | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Measure anyone's model on anyone's inputs, where the model is.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is found: mode, dtype, weights, hooks.
    inputs : tensor of shape (n, ...), or iterable
        What the model is given; or a loader that yields such batches, alone or as the first
        of a tuple (with labels). Measures of the probe ``sites`` go through a loader of any
        length once, with no more than a batch in memory; the others get its first 512 samples
        (more only if ``lines.number`` asks for them).
    measures : sequence of str or Measure class
        Registered names or globs, or measures defined on the spot; or names in one text, with
        commas.
    settings : mapping, optional
        Options: ``{"affinity.shrinkage": "none", "lines.number": 2}``.
    name : str, optional
        What the model is called in the table; by default its class's name.
    progress : Progress, optional

    Returns
    -------
    Run
        ``scores`` is the tidy table, ``["affinity"]`` one reading; ``save(path)`` writes it
        to a folder.

    Raises
    ------
    nlbench.RequestError
        If a measure, a setting or the inputs can't be used.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> run = evaluate(model, torch.randn(64, 4), measures=["affinity", "absdev"])
    >>> [result.result.status for result in run.records]
    ['ok', 'ok']
    """
    monitor = Monitor(progress)
    _check_model(model)
    if isinstance(measures, str):
        measures = [part.strip() for part in measures.split(",")]
    names = [measure for measure in measures if isinstance(measure, str)]
    loaded = {m.name: m for m in load_measures(names, monitor.warn)} if names else {}
    classes = [m for m in measures if not isinstance(m, str)]
    for measure in classes:
        checked = checked_measure(measure, getattr(measure, "name", repr(measure)))
        if loaded.setdefault(checked.name, checked) is not checked:
            raise RequestError(
                f"two measures are called '{checked.name}', of {loaded[checked.name].__module__} "
                f"and of {checked.__module__}; rename one"
            )
    if not loaded:
        raise RequestError("no measure to run")
    if isinstance(inputs, Tensor):
        stream, given = None, inputs
    else:
        stream = _stream(inputs)
        given = stream.head(_held(list(loaded.values()), settings or {}))
    if given.ndim < 2 or len(given) == 0:
        raise RequestError(
            f"inputs have shape {tuple(given.shape)}, expected (n, ...) with n of at least 1"
        )
    chosen = list(loaded.values())
    bench = make_bench(chosen, {**_defaults(chosen, given), **(settings or {})})
    for probe, options in bench.probes.items():
        load_probe(probe).check(None, options)
    device = next((p.device for p in model.parameters()), given.device)
    facts: dict[str, Any] = {
        "model": name or type(model).__name__,
        "weights": "given",
        "data": "given",
        "seed": 0,
        "weights_hash": state_hash(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "preprocessing": "as given",
    }
    subject = StreamedSubject(model, given, None, facts, stream=stream)

    def key_of(measure: type[Measure]) -> str:
        return content_key(
            {
                "measure": measure_facts(measure, dict(bench.measures)[measure]),
                "probe": dict(bench.probes[measure.probe]),
                "subject": facts,
                "device": device.type,
            }
        )

    began = time.perf_counter()
    machine = Machine.at(device)
    length = len(given) if stream is None else stream.known_length or len(given)
    steps = (load_probe(p).steps(length, options) for p, options in bench.probes.items())
    monitor.begin(sum(steps))
    with exact_arithmetic():
        records = list(records_of(subject, bench, machine, monitor, key_of))
    if stream is not None and stream.error is not None:
        raise stream.error
    # Only now are the samples of a stream known, and with them what decided the numbers.
    facts |= stream.facts() if stream is not None and stream.samples else sample_facts(given)
    keys = {measure.name: key_of(measure) for measure, _ in bench.measures}
    records = [replace(record, key=keys[record.measure["name"]]) for record in records]
    request = {"measures": list(loaded), "settings": dict(settings or {})}
    seconds = round(time.perf_counter() - began, 3)
    manifest = replace(make_manifest(request, machine), seconds=seconds)
    return Run(manifest.of_records(records), records)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise RequestError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RequestError(f"{name} of the model is on the meta device, without values")


def _stream(inputs: Iterable[Any]) -> Batches:
    if not isinstance(inputs, Iterable) or hasattr(inputs, "__array__"):
        kind = type(inputs).__name__
        raise RequestError(f"inputs: a {kind}, expected a tensor or a loader of tensors")
    return Batches(inputs)


def _held(measures: Sequence[type[Measure]], settings: Settings) -> int:
    """How many samples of a stream the probes have to be given at once."""
    bench = make_bench(measures, settings)
    return max(load_probe(name).held(options) for name, options in bench.probes.items())


def _defaults(measures: Sequence[type[Measure]], inputs: Tensor) -> dict[str, OptionValue]:
    """Options of probes that suit the inputs."""
    return {
        f"{name}.{option}": value
        for name in dict.fromkeys(measure.probe for measure in measures)
        for option, value in load_probe(name).defaults(inputs).items()
    }
