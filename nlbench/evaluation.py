"""Measure anyone's model on anyone's inputs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.execution.measure_subject import records_of
from nlbench.execution.numerics import Machine, default_threads, some_threads
from nlbench.introspection.precision import exact_arithmetic
from nlbench.measure import Measure
from nlbench.plan import checked_measure, load_measures, load_probe, resolve_settings
from nlbench.progress import Monitor, Progress
from nlbench.request import Settings, parse_names
from nlbench.serialization.fields import written
from nlbench.serialization.hashing import content_key, state_hash
from nlbench.store.manifest import make_manifest
from nlbench.store.record import RecordedMeasure
from nlbench.store.run_folder import Run
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.inputs import Arguments, BatchReader, is_batch, model_called, refused
from nlbench.subjects.samples import Batches, sample_facts
from nlbench.subjects.subject import Subject

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Any],
    measures: str | Sequence[str | type[Measure]],
    *,
    labels: Tensor | bool | str | None = None,
    settings: Settings | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Measure anyone's model on anyone's inputs, where the model is.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is found: mode, dtype, weights, hooks. What it gives may be a tensor, or a
        mapping, tuple or object with ``logits``, or with one tensor in it.
    inputs : tensor of shape (n, ...), tuple, mapping, or loader
        A tensor is the samples, as the model is given them. A tuple or a mapping is one batch of
        arguments, for ``model(*inputs)`` or ``model(**inputs)``. Anything else that can be
        iterated, such as a DataLoader or a list, yields batches of these three kinds. Measures of
        the probe ``sites`` go through a loader of any length once, with no more than a batch in
        memory; the others get its first 512 samples (more only if ``lines.number`` asks for
        them). Several arguments are measured together, as one tensor (n, k) with all their
        numbers; they have to be all of one floating type or all integers.
    measures : sequence of str or Measure class
        Registered names or globs, or measures defined on the spot; or names in one text, with
        commas.
    labels : tensor of shape (n,), bool or str, optional
        Of a loader: True if the last of what it yields are labels, False if there are none, or
        the key of a mapping's labels. By default a pair is inputs with labels if the model takes
        one argument, and refused otherwise. Of samples that are all there: the labels.
    settings : mapping, optional
        Options: ``{"affinity.shrinkage": "none", "lines.number": 2}``.
    name : str, optional
        What the model is called in the table; by default its class's name.
    progress : Progress, optional

    Returns
    -------
    Run
        ``scores`` is the tidy table, ``["affinity"]`` one result; ``save(path)`` writes it
        to a folder.

    Raises
    ------
    nlbench.RequestError
        If a measure, a setting or the inputs can't be used.

    Notes
    -----
    Random numbers that measures draw are decided by a record's key, and so by all that decides
    the number, the samples among it. Of a loader that is gone through once nobody knows the
    samples before the end: there the first of them take their place.

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
    chosen = _chosen(measures, monitor)
    settings = dict(settings or {})
    asked = resolve_settings(chosen, settings).probes.items()
    held = max(load_probe(name).held(options) for name, options in asked)
    given, known, stream, arguments = _samples(model, inputs, labels, held)
    resolved = resolve_settings(chosen, settings, inputs=given)
    for probe, options in resolved.probes.items():
        load_probe(probe).check(None, options)
    device = next((p.device for p in model.parameters()), given.device)
    facts = SubjectFacts(
        model=name or type(model).__name__,
        weights="given",
        data="given",
        seed=0,
        weights_hash=state_hash(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        preprocessing="as given",
        **sample_facts(given, stream),
    )
    subject = Subject(model, given, known, facts, stream=stream)

    def key_of(facts: SubjectFacts, measure: type[Measure]) -> str:
        return content_key(
            {
                "measure": written(RecordedMeasure.of(measure, dict(resolved.measures)[measure])),
                "probe": dict(resolved.probes[measure.probe]),
                "subject": written(facts),
                "device": device.type,
            }
        )

    began = time.perf_counter()
    length = len(given) if stream is None else stream.known_length or len(given)
    steps = (load_probe(p).steps(length, options) for p, options in resolved.probes.items())
    monitor.begin(sum(steps))
    called = model_called(model, arguments)
    # In a caller's inference mode copies of the model would have no derivative.
    plain = torch.inference_mode(False)
    with plain, exact_arithmetic(), some_threads(default_threads()), called:
        machine = Machine.at(device)
        records = list(records_of(subject, resolved, machine, monitor, partial(key_of, facts)))
    if stream is not None and stream.error is not None:
        raise stream.error
    if stream is not None:
        # Only now are all samples of a stream known, and with them what decided the numbers.
        facts = replace(facts, **sample_facts(given, stream))
        keys = {measure.name: key_of(facts, measure) for measure, _ in resolved.measures}
        records = [replace(r, key=keys[r.measure.name], subject=facts) for r in records]
    request = {"measures": [m.name for m in chosen], "settings": settings}
    seconds = round(time.perf_counter() - began, 3)
    manifest = replace(make_manifest(request, machine), seconds=seconds)
    return Run(manifest.of_records(records), records)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise RequestError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RequestError(f"{name} of the model is on the meta device, without values")


def _chosen(
    measures: str | Sequence[str | type[Measure]], progress: Monitor
) -> list[type[Measure]]:
    """Load measures that are named, and check those that are given."""
    if isinstance(measures, str):
        measures = parse_names(measures)
    names = [measure for measure in measures if isinstance(measure, str)]
    loaded = {m.name: m for m in load_measures(names, progress.warn)} if names else {}
    for measure in (m for m in measures if not isinstance(m, str)):
        checked = checked_measure(measure)
        if loaded.setdefault(checked.name, checked) is not checked:
            raise RequestError(
                f"two measures are called '{checked.name}', of {loaded[checked.name].__module__} "
                f"and of {checked.__module__}; rename one"
            )
    if not loaded:
        raise RequestError("no measure to run")
    return list(loaded.values())


def _samples(
    model: nn.Module, inputs: object, labels: Tensor | bool | str | None, held: int
) -> tuple[Tensor, Tensor | None, Batches | None, Arguments]:
    """All samples, or the first of a stream; their labels, the stream, how the model is called."""
    where = None if isinstance(labels, Tensor) else labels
    if is_batch(inputs):
        # What is all there is one batch of arguments; a pair of them isn't one with labels.
        reader = BatchReader(model, where or False)
        given, found = reader.read(inputs)
        if len(given) == 0:
            raise RequestError("inputs: no samples, expected one at least")
        if isinstance(labels, Tensor):
            if labels.shape[:1] != given.shape[:1]:
                raise RequestError(
                    f"labels have shape {tuple(labels.shape)} for {len(given)} samples, expected "
                    f"({len(given)},)"
                )
            found = labels
        assert reader.arguments is not None
        return given, found, None, reader.arguments
    is_other = isinstance(inputs, TorchDataset | str | bytes) or hasattr(inputs, "__array__")
    if is_other or not isinstance(inputs, Iterable):
        raise refused(inputs)
    if isinstance(labels, Tensor):
        raise RequestError(
            "labels: a tensor, but a loader yields its labels with its batches; say labels=True "
            "if they are the last of what it yields"
        )
    stream = Batches(inputs, BatchReader(model, where))
    given = stream.head(held)
    return given, stream.head_labels(len(given)), stream, stream.arguments
