"""Evaluation of models in memory."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError, first_line, nearest, shorten
from nlbench.execution.machine import describe_machine
from nlbench.execution.probe_pass import DEPENDS_ON
from nlbench.execution.unit_runner import measure_subject
from nlbench.introspection.batch_independence import depends_on_order, spread
from nlbench.introspection.model_output import output_rows, validated_outputs
from nlbench.introspection.model_state import evaluation_mode, preserve_attributes, refuse_lazy
from nlbench.introspection.precision import exact_arithmetic
from nlbench.introspection.process_state import Changes, restored_thread_state
from nlbench.introspection.pytree import object_parts
from nlbench.introspection.random_state import preserve_rng_state
from nlbench.introspection.threads import default_threads, one_measurement, torch_threads
from nlbench.introspection.wrappers import unwrapped
from nlbench.measure import Measure
from nlbench.measure.contract import checked_measure, load_measures
from nlbench.options import Settings
from nlbench.parsers import parse_names
from nlbench.plan import Cell, SubjectPlan
from nlbench.probes.probe import load_probe
from nlbench.progress import Progress, ProgressMonitor
from nlbench.request import ERRORS
from nlbench.serialization.fields import to_plain
from nlbench.serialization.hashing import content_key, state_hash, tensor_hash
from nlbench.settings import ResolvedSettings, resolve_settings
from nlbench.store.manifest import Manifest, make_manifest
from nlbench.store.record import RecordedMeasure, RecordedProbe
from nlbench.store.run import Run
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.inputs import (
    ArgumentLayout,
    Arguments,
    BatchReader,
    OutputChoice,
    input_error,
    signed_labels,
    single_tensor_call,
)
from nlbench.subjects.own_data import native_array
from nlbench.subjects.samples import Batches, drawn_batches, sample_facts, sample_order
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.subject import Subject
from nlbench.weight_linearity import DIRECTIONS, MAX_SAMPLES, WeightLinearity, weight_linearity

SEED = 0
"""Seed that draws the order of the samples."""


@one_measurement()
def evaluate(
    model: nn.Module | Mapping[str, nn.Module],
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Any],
    measures: str | Sequence[str | type[Measure]],
    *,
    labels: Tensor | Sequence[int] | bool | str | None = None,
    settings: Settings | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    errors: str = "groups",
) -> Run:
    """Measure a model on inputs, on the model's device.

    Parameters
    ----------
    model : torch.nn.Module, or mapping of str to torch.nn.Module
        Its mode, dtype, weights and hooks stay unchanged. Its output is a tensor, or a mapping,
        tuple or object with ``logits`` or with a single tensor; of others, the setting
        ``model.output`` selects one by its name, such as ``"out"`` or ``"boxes.0"``, or by a
        function. Measures of activations need none. A mapping contains several models,
        such as checkpoints from one training run; its keys name their weights in the table.
    inputs : tensor of shape (n, ...), tuple, mapping, dataset or loader
        A tensor contains all samples. A tuple or a mapping is one batch of arguments, for
        ``model(*inputs)`` or ``model(**inputs)``; a mapping whose keys the model doesn't take is
        its first argument. Arguments may be nested containers, numbers, strings and None; see
        `nlbench.Arguments` for tensors without samples, such as the edges of a graph, and for a
        detector's list of images, ``Arguments([image, image])``. Any other
        iterable, such as a DataLoader, a Dataset or a list, yields such batches. Samples are taken
        in a random order, which is always the same. Only a stream, such as a generator or an
        IterableDataset, has its own order. Measures of the probe ``sites`` iterate over a loader
        once, with one batch in memory; other measures use 512 of its samples (or more if
        ``lines.number`` requires it), the first of a stream, and their results note it. Several
        arguments are packed into one tensor (n, k), and must all have the same floating dtype or
        all be integers.
    measures : sequence of str or Measure class
        Registered names, globs or measure classes; or a string of comma-separated names.
    labels : tensor of shape (n,), array, list, bool or str, optional
        Labels for samples in memory. For a loader: True if the last element of a batch contains
        labels, False if there are no labels, or the key of the labels in a mapping. By default, a
        pair is (inputs, labels) if the model takes one argument, and an error otherwise. A third
        element that is an index or a name per sample is ignored.
    settings : mapping, optional
        Options, such as ``{"affinity.shrinkage": "none", "lines.number": 2}``.
    name : str, optional
        Name of the model in the table; by default its class name.
    progress : Progress, optional
    errors : {"groups", "none"}
        ``groups``: values have replicates, from which standard errors are computed; see
        `nlbench.measure.replicates`.

    Returns
    -------
    Run
        ``scores`` is the tidy table, ``["affinity"]`` one result; ``save(path)`` writes a folder.

    Raises
    ------
    nlbench.RequestError
        If a measure, a setting or the inputs can't be used.

    Notes
    -----
    A process measures one model at a time: a call in another thread waits.

    A measure's random numbers are seeded with the record's key, which depends on the samples. For
    a loader, whose samples are not known in advance, the seed depends on its first samples.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> run = evaluate(model, torch.randn(64, 4), measures=["affinity", "absdev"])
    >>> [result.result.status for result in run.records]
    ['ok', 'ok']
    >>> run = evaluate({"epoch 1": model, "epoch 2": model}, torch.randn(64, 4), measures=["r2"])
    >>> run.scores["weights"].unique().tolist()
    ['epoch 1', 'epoch 2']
    """
    if errors not in ERRORS:
        raise RequestError(f"errors: unknown '{errors}'{nearest(errors, ERRORS)}")
    models = model if isinstance(model, Mapping) else {"given": model}
    if not models:
        raise RequestError("no model to evaluate, expected at least one")
    if len(models) > 1 and isinstance(inputs, Iterator):
        raise RequestError("inputs: an iterator can be read only once, expected a loader or tensor")
    monitor = ProgressMonitor(progress)
    loaded = _load_measures(measures, monitor)
    evaluation = _Evaluation(
        inputs, loaded, _as_labels(labels), dict(settings or {}), monitor, errors
    )
    runs = []
    for weights, each in models.items():
        _check_model(each)
        with unwrapped(each) as network:
            label = name or type(network).__name__, str(weights)
            runs.append(evaluation.run(network, label))
    if not isinstance(model, Mapping):
        return runs[0]
    run = combine(runs)
    if len(models) > 1:
        run.models = EvaluatedModels(
            {str(key): each for key, each in models.items()}, inputs, labels, settings
        )
    return run


@dataclass(frozen=True)
class EvaluatedModels:
    """The models of an evaluation by the names of their weights, and their inputs."""

    models: Mapping[str, nn.Module]
    # inputs, labels, settings: see `evaluate`.
    inputs: Any
    labels: Any
    settings: Settings | None

    def weight_linearity(
        self, start: SubjectFacts, end: SubjectFacts, directions: int
    ) -> WeightLinearity:
        """Compare two of the models in their weights."""
        for facts in (start, end):
            with unwrapped(self.models[facts.weights]) as network:
                if state_hash(network) != facts.weights_hash:
                    raise RequestError(
                        f"{facts.weights}: its weights have changed since they were measured; "
                        "evaluate copies of the model, or use nlbench.Monitor"
                    )
        return compare_weights(
            read_parameters(self.models[start.weights]),
            self.models[end.weights],
            self.inputs,
            labels=self.labels,
            settings=self.settings,
            directions=directions,
        )


def read_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters by their names without wrappers."""
    with unwrapped(model) as network:
        return {name: value.detach() for name, value in network.named_parameters()}


@one_measurement()
def compare_weights(
    start: Mapping[str, Tensor],
    model: nn.Module,
    inputs: Any,
    *,
    labels: Tensor | Sequence[int] | bool | str | None = None,
    settings: Settings | None = None,
    directions: int = DIRECTIONS,
) -> WeightLinearity:
    """Compare a model with its linearisation at other weights, on inputs of `evaluate`."""
    options: dict[str, Any] = dict(settings or {})
    output = OutputChoice(options.get("model.output", ""))
    with (
        unwrapped(model) as network,
        torch.inference_mode(False),
        exact_arithmetic(),
        torch_threads(default_threads()),
    ):
        samples = _read_samples(network, inputs, _as_labels(labels), MAX_SAMPLES)
        is_divisible = _is_divisible(network, samples, output)
        is_divisible = is_divisible and not _is_ordered(network, samples, output)
        if is_divisible:
            samples = samples.shuffle_rows()
        count = None if is_divisible else len(samples.inputs)
        with single_tensor_call(network, samples.arguments, count, output):
            return weight_linearity(start, network, samples.inputs, directions=directions)


def combine(runs: Sequence[Run]) -> Run:
    """Combine the records of several evaluations into one run."""
    records = [record for run in runs for record in run.records]
    seconds = round(sum(float(run.manifest["seconds"]) for run in runs), 3)
    manifest = replace(Manifest.from_dict(runs[0].manifest), seconds=seconds)
    return Run(manifest.describe_records(records), records)


@dataclass(frozen=True)
class _Evaluation:
    """A request to measure models on the same inputs, see `evaluate`."""

    inputs: Any
    measures: Sequence[type[Measure]]
    labels: Tensor | bool | str | None
    settings: Mapping[str, Any]
    monitor: ProgressMonitor
    errors: str

    @property
    def _output(self) -> OutputChoice:
        return OutputChoice(self.settings.get("model.output", ""))

    def run(self, model: nn.Module, name: tuple[str, str]) -> Run:
        """Measure a model, which has a name and a name of its weights."""
        refuse_lazy(model)
        probe_options = self._resolve().probes.items()
        stored = max(load_probe(name).stored_samples(options) for name, options in probe_options)
        samples = _read_samples(model, self.inputs, self.labels, stored)
        is_divisible = _is_divisible(model, samples, self._output)
        if samples.stream is not None and not is_divisible:
            raise RequestError(
                "inputs: the samples of a batch depend on each other, as nodes of a graph or "
                "images of different sizes do; pass one batch, as nlbench.Arguments, instead of a "
                "loader"
            )
        run = self._measure(model, name, samples, is_divisible=is_divisible)
        is_ordered = any(r.result.notes.get(DEPENDS_ON) == "order" for r in run.records)
        if is_divisible and is_ordered and samples.stream is None:
            return self._measure(model, name, samples, is_divisible=False)
        return run

    def _resolve(self) -> ResolvedSettings:
        settings = {key: value for key, value in self.settings.items() if key != "model.output"}
        return resolve_settings(self.measures, settings)

    def _measure(
        self, model: nn.Module, name: tuple[str, str], samples: _Samples, *, is_divisible: bool
    ) -> Run:
        """Measure a model on samples, which keep their order unless they are divisible."""
        samples = samples.shuffle_rows() if is_divisible else samples
        stream = samples.stream
        resolved = self._resolve()
        for probe, options in resolved.probes.items():
            load_probe(probe).check(None, options)
        device = next((p.device for p in model.parameters()), samples.inputs.device)
        facts = self._describe_subject(model, name, samples)
        subject = Subject(
            model,
            samples.inputs,
            samples.labels,
            facts,
            stream=stream,
            is_indivisible=not is_divisible,
        )
        cells = self._plan_cells(name, facts, resolved, device)
        start = time.perf_counter()
        count = len(samples.inputs)
        known = count if stream is None else stream.known_length or count
        self.monitor.begin(self._count_steps(resolved, samples.inputs, known))
        only_count = None if is_divisible else count
        # In the caller's inference mode, copies of the model would have no gradients.
        with (
            torch.inference_mode(False),
            exact_arithmetic(),
            torch_threads(default_threads()),
            single_tensor_call(model, samples.arguments, only_count, self._output),
        ):
            machine = describe_machine(device)
            loaded = {measure.name: measure for measure, _ in resolved.measures}
            records = list(measure_subject(subject, cells, loaded, machine, self.monitor))
        if stream is not None and stream.error is not None:
            raise stream.error
        if stream is not None:
            # The samples determine the keys, and those of a stream are only known at its end.
            facts = replace(facts, **sample_facts(samples.inputs, stream))
            records = [
                replace(r, key=_cell_key(facts, r.measure, r.probe, device), subject=facts)
                for r in records
            ]
        requested = {key: value for key, value in self.settings.items() if not callable(value)}
        request = {"measures": [m.name for m in self.measures], "settings": requested}
        seconds = round(time.perf_counter() - start, 3)
        manifest = replace(make_manifest(request, machine), seconds=seconds)
        return Run(manifest.describe_records(records), records)

    def _count_steps(self, resolved: ResolvedSettings, inputs: Tensor, count: int) -> int:
        steps = 0
        for name, options in resolved.probes.items():
            probe = load_probe(name)
            steps += probe.steps(count, probe.resolve(options, inputs))
        return steps

    def _describe_subject(
        self, model: nn.Module, name: tuple[str, str], samples: _Samples
    ) -> SubjectFacts:
        return SubjectFacts(
            model=name[0],
            weights=name[1],
            data="given",
            seed=SEED,
            weights_hash=state_hash(model),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            preprocessing=samples.preprocessing + self._output.description,
            **sample_facts(samples.inputs, samples.stream),
        )

    def _plan_cells(
        self,
        name: tuple[str, str],
        facts: SubjectFacts,
        resolved: ResolvedSettings,
        device: torch.device,
    ) -> list[Cell]:
        planned = SubjectPlan("", SubjectSpec(*name, "given", SEED), name[1])
        cells = []
        for measure, options in resolved.measures:
            recorded = RecordedMeasure.of(measure, options, self.errors)
            probe = RecordedProbe(measure.probe, resolved.probes[measure.probe])
            # Errors don't change the value: the random numbers are the same without.
            random_stream = _cell_key(facts, replace(recorded, errors=None), probe, device)
            key = _cell_key(facts, recorded, probe, device)
            cells.append(Cell(key, planned, recorded, probe, random_stream))
        return cells


def _cell_key(
    facts: SubjectFacts, measure: RecordedMeasure, probe: RecordedProbe, device: torch.device
) -> str:
    # Without errors, the key is that of versions that had none.
    in_key = None if measure.errors == "none" else measure.errors
    return content_key(
        {
            "measure": to_plain(replace(measure, errors=in_key)),
            "probe": dict(probe.options),
            "subject": to_plain(facts),
            "device": device.type,
        }
    )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise RequestError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RequestError(f"{name} of the model is on the meta device, without values")


def _load_measures(
    measures: str | Sequence[str | type[Measure]], progress: ProgressMonitor
) -> list[type[Measure]]:
    if isinstance(measures, str):
        measures = parse_names(measures)
    names = [measure for measure in measures if isinstance(measure, str)]
    loaded = {m.name: m for m in load_measures(names, progress.warn)} if names else {}
    for measure in (m for m in measures if not isinstance(m, str)):
        checked = checked_measure(measure)
        if loaded.setdefault(checked.name, checked) is not checked:
            raise RequestError(
                f"two measures are named '{checked.name}', in {loaded[checked.name].__module__} "
                f"and in {checked.__module__}; rename one"
            )
    if not loaded:
        raise RequestError("no measure to run")
    return list(loaded.values())


class _Samples(NamedTuple):
    """All samples, or the first samples of a stream, and the layout of the model's arguments."""

    inputs: Tensor
    labels: Tensor | None
    stream: Batches | None
    arguments: ArgumentLayout

    def shuffle_rows(self) -> _Samples:
        """Return samples in memory in random order, as those of a stream are already."""
        if self.stream is not None:
            return self
        order = sample_order(self.inputs, SEED)
        labels = self.labels
        return self._replace(
            inputs=self.inputs[order.to(self.inputs.device)],
            labels=None if labels is None else labels[order.to(labels.device)],
        )

    @property
    def preprocessing(self) -> str:
        """Description of the inputs."""
        whole = self.arguments.whole_tensors
        if not whole:
            return "as given"
        names = ", ".join(f"inputs{name}" for name in whole)
        digest = hashlib.sha256("".join(map(tensor_hash, whole.values())).encode()).hexdigest()
        return f"as given; {names} without samples ({digest[:12]})"


def _is_divisible(model: nn.Module, samples: _Samples, output: OutputChoice) -> bool:
    """Return True if samples don't depend on each other through arguments without samples."""
    layout = samples.arguments
    if not layout.whole_tensors:
        return layout.list_parts < 2  # A detector pads images of different sizes together.
    count = len(samples.inputs)
    parts = [slice(count // 2), slice(count // 2, count), slice(count - 1, count)]
    try:
        with _running(model, samples, output, validated_outputs) as run:
            whole = run(samples.inputs)
            pairs = [(run(samples.inputs[part]), whole[part]) for part in parts]
    except Exception:  # For example, an edge of a graph may lead to a node that is left out.
        return False
    return all(torch.allclose(alone, together, 1e-4, 1e-6) for alone, together in pairs)


def _is_ordered(model: nn.Module, samples: _Samples, output: OutputChoice) -> bool:
    """Return True if a model only runs on all samples at once, and their order matters."""
    if samples.stream is not None:
        return False
    with _running(model, samples, output, output_rows) as run:
        return depends_on_order(run, spread(samples.inputs), lambda: samples.inputs)


@contextmanager
def _running(
    model: nn.Module, samples: _Samples, output: OutputChoice, read: Callable[[Any, int], Tensor]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the model as a function of some of the samples, which leaves no mark.

    `read` returns a tensor of the model's output for a number of samples.
    """
    device = next((p.device for p in model.parameters()), samples.inputs.device)

    def run(inputs: Tensor) -> Tensor:
        with single_tensor_call(model, samples.arguments, output=output), evaluation_mode(model):
            return read(model(inputs.to(device)), len(inputs))

    with preserve_attributes(model), preserve_rng_state(device), restored_thread_state(Changes()):
        yield run


def _collate(items: list[Any]) -> Any:
    """Return PyTorch's batch of items."""
    try:
        return default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise RequestError(
            f"inputs: items of the dataset don't form batches: {first_line(error)}; pass a "
            "DataLoader with a collate_fn"
        ) from error


def _as_labels(labels: object) -> Tensor | bool | str | None:
    """Return labels as a tensor, unless they say where a loader's labels are."""
    if isinstance(labels, Tensor):
        return signed_labels(labels)
    if labels is None or isinstance(labels, bool | str):
        return labels
    try:
        return signed_labels(torch.as_tensor(native_array(np.asarray(labels))))
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"labels: {shorten(labels)}, expected the index of a class for each sample"
        ) from error


def _read_samples(
    model: nn.Module, inputs: object, labels: Tensor | bool | str | None, stored: int
) -> _Samples:
    label_place = None if isinstance(labels, Tensor) else labels
    is_batch = isinstance(inputs, Tensor | tuple | Mapping | Arguments)
    if is_batch or (not isinstance(inputs, TorchDataset) and object_parts(inputs)):
        # Samples in memory are one batch of arguments; a pair is two arguments, without labels.
        reader = BatchReader(model, label_place or False)
        tensor, read_labels = reader.read(inputs)
        if len(tensor) == 0:
            raise RequestError("inputs: no samples, expected at least one")
        if isinstance(labels, Tensor):
            if labels.shape[:1] != tensor.shape[:1]:
                raise RequestError(
                    f"labels have shape {tuple(labels.shape)} for {len(tensor)} samples, expected "
                    f"({len(tensor)},)"
                )
            read_labels = labels
        assert reader.arguments is not None
        return _Samples(tensor, read_labels, None, reader.arguments)
    if isinstance(inputs, TorchDataset):
        if not isinstance(inputs, IterableDataset) and not hasattr(inputs, "__len__"):
            kind = type(inputs).__name__
            raise RequestError(f"inputs: {kind} has no __len__, expected a dataset of known size")
        inputs = DataLoader(inputs, batch_size=128, collate_fn=_collate)
    is_invalid = isinstance(inputs, str | bytes) or hasattr(inputs, "__array__")
    if is_invalid or not isinstance(inputs, Iterable):
        raise input_error(inputs)
    if isinstance(labels, Tensor):
        raise RequestError(
            "labels: a tensor, but a loader yields its labels with its batches; use labels=True "
            "if they are the last element of a batch"
        )
    reader = BatchReader(model, label_place)
    stream = drawn_batches(inputs, reader.read, SEED)
    first = stream.head(stored)
    assert reader.arguments is not None
    return _Samples(first, stream.head_labels(len(first)), stream, reader.arguments)
