"""Run a probe on a subject once, feeding all measures that use the probe.

`result_of_error` converts exceptions to results. An exception in a measure affects only that
measure; one in the network affects all measures in the pass.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import (
    PluginError,
    RequestError,
    Undefined,
    error_message,
    error_text,
    first_line,
)
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.batch_independence import (
    DEPENDS_ON_BATCH,
    MAX_GROUP_SIZE,
    DependsOnOrder,
    RemembersOutputs,
    check_memory,
    depends_on_order,
    describe_outputs,
    is_finite_among,
    spread,
)
from nlbench.introspection.memory import is_out_of_memory, release_freed_memory, synchronize
from nlbench.introspection.model_copy import cpu_copy
from nlbench.introspection.model_output import output_rows
from nlbench.introspection.model_state import evaluation_mode, preserve_attributes
from nlbench.introspection.precision import without_autocast
from nlbench.introspection.process_state import Changes, restored_thread_state
from nlbench.introspection.random_state import RandomStream, preserve_rng_state
from nlbench.introspection.refused_inputs import describe_refusal
from nlbench.measure import Measure, Result, Value
from nlbench.measure.contract import validated_result
from nlbench.measure.result import MIN_DEFINED_FRACTION
from nlbench.options import OptionValue
from nlbench.parsers import unique
from nlbench.probes import OnStep, ProbeFacts, ProbeOptions, ProbePass, Resources
from nlbench.probes.probe import NothingObserved, load_probe
from nlbench.progress import ProgressMonitor
from nlbench.signals import raise_interruption
from nlbench.subjects.samples import HEAD_SAMPLES, DrawnBatches
from nlbench.subjects.subject import Subject

from .masks import refuse_masks, refuse_mixed_types

DEPENDS_ON = "depends_on"
"""Key in a result's notes: what the network's results depend on but their own sample."""
_SINGLE_SAMPLE_REASON = (
    "the network normalises a batch by the batch's own statistics, so it can't be run on one sample"
)


class Feed:
    """One measure on one subject: it listens during a pass, and then has a result."""

    def __init__(
        self,
        measure: type[Measure],
        options: Mapping[str, OptionValue],
        stream: RandomStream,
        monitor: ProgressMonitor,
        device: torch.device,
        replicated: bool = False,
        memory: int | None = None,
    ) -> None:
        # Time the measure would take on its own, including shared intermediate results.
        self.seconds = 0.0
        self.traceback = ""
        self.is_out_of_memory = False
        self.result = Result.missing("failed", "no result")
        self.facts: ProbeFacts = {}  # facts reported by the probe; none if it has raised an error
        self.replicated = replicated
        self.unreduced = measure.unreduced
        self.row_limit = measure.row_limit_of(options)
        self.independent_sites = measure.independent_sites
        self.counts_crossings = measure.counts_crossings
        # Measures from the same package may share intermediate results.
        self.package = measure.__module__.partition(".")[0]
        self.failure: Result | None = None
        self._failed_at: tuple[int, ...] = ()
        self._memory = memory
        self._name = measure.name
        self._stream = stream
        self._monitor = monitor
        self._device = device
        self._lock = threading.Lock()
        self._measure: Measure
        self._guard(lambda: self._start(measure, options))

    def update(self, observation: object, order: tuple[int, ...] | None = None) -> None:
        """Update the measure, unless an earlier observation has failed.

        If several threads fail, the failure with the lowest `order` is reported.
        """
        if self.failure is not None and (order is None or order >= self._failed_at):
            return
        self._guard(lambda: self._measure.update(observation), order)
        with self._lock:
            self.seconds += getattr(observation, "borrowed_seconds", 0.0)

    def compute(self) -> Result:
        """Return the measure's result, or the result that reports its failure."""
        result = self.failure or self._guard(
            lambda: validated_result(self._measure.compute(), self._bounds)
        )
        return self.failure or result

    def release(self) -> None:
        """Drop the measure, whose state takes memory."""
        self.__dict__.pop("_measure", None)

    def _start(self, measure: type[Measure], options: Mapping[str, OptionValue]) -> None:
        self._bounds = measure.bounds_of(options)
        self._measure = measure(**options)
        self._measure.replicated = self.replicated
        self._measure.memory = self._memory
        self._measure.reset()

    def _guard(self, call: Callable[[], Any], order: tuple[int, ...] | None = None) -> Any:
        # Work that the network has queued on a GPU must not be charged to the measure.
        synchronize(self._device)
        # All threads share the global generators, so no thread may replace them. A wall clock
        # would charge a thread for waiting on the others.
        is_threaded = order is not None
        clock = time.thread_time if is_threaded else time.perf_counter
        stream = contextlib.nullcontext() if is_threaded else self._stream.active()
        start = clock()
        self._monitor.enter(self._name)
        try:
            try:
                with stream, without_autocast():
                    value = call()
                synchronize(self._device)
                return value
            finally:
                self._monitor.leave()
        except BaseException as error:
            raise_interruption(error)
            # A plugin may raise any exception, which must not affect other measures.
            failure, trace = result_of_error(error)
            with self._lock:
                if self.failure is None or (order is not None and order < self._failed_at):
                    self._failed_at = order or ()
                    self.failure = failure
                    self.traceback = trace
                    self.is_out_of_memory = is_out_of_memory(error)
            return None
        finally:
            with self._lock:
                self.seconds += clock() - start


MeasureEntry = tuple[type[Measure], Mapping[str, OptionValue], str]
"""A measure, its options and the name of its random stream.

Without a name, it samples from the global generators in their current state.
"""


@dataclass(frozen=True)
class Pass:
    """A pass of a probe through a subject."""

    subject: Subject
    probe: str
    settings: ProbeOptions  # the probe's options
    resources: Resources
    step: OnStep = lambda: None  # called after each batch or segment
    monitor: ProgressMonitor = field(default_factory=ProgressMonitor)
    # What the model changed in this thread is restored before the measures compute their results,
    # and is added here.
    changes: Changes = field(default_factory=Changes)
    replicated: bool = True  # whether results have replicates

    def observe(self, entries: Sequence[MeasureEntry]) -> list[Feed]:
        """Run the probe and return the outcome of each measure.

        A measure that raises is ``failed``, or ``undefined`` if it raises `nlbench.Undefined`. If
        the probe itself raises, this applies to all measures. A measure that runs out of memory is
        retried in a separate pass and, if that also fails on a GPU, on the CPU.
        """
        outcomes = self._observe_once(entries)
        stream = self.subject.stream
        if stream is not None and not isinstance(stream, DrawnBatches):
            return outcomes
        for index, entry in enumerate(entries):
            # A pass with a single measure requires less memory.
            for device in unique([self.resources.device, torch.device("cpu")]):
                if outcomes[index].is_out_of_memory:
                    outcomes[index] = self._observe_alone(entry, device, outcomes[index])
        return outcomes

    def _observe_alone(self, entry: MeasureEntry, device: torch.device, outcome: Feed) -> Feed:
        """Run another pass for one measure, on the subject's device or on the CPU."""
        release_freed_memory(self.resources.device)
        subject = self.subject
        remark = ""
        if device != self.resources.device:
            try:
                subject = subject.converted(cpu_copy(subject.model), Tensor.cpu)
                remark = f"computed on the CPU: {self.resources.device} is full"
            except RequestError as error:
                outcome.result, outcome.traceback = result_of_error(error)
                outcome.is_out_of_memory = False
                outcome.seconds = 0.0
                outcome.facts = {}
                return outcome
        # Use a single thread, since processing several sites at once requires more memory.
        resources = replace(self.resources, device=device, threads=1)
        alone = replace(self, subject=subject, resources=resources, step=lambda: None)
        (outcome,) = alone._observe_once([entry])
        outcome.result = append_remarks(outcome.result, remark)
        return outcome

    def _observe_once(self, entries: Sequence[MeasureEntry]) -> list[Feed]:
        with preserve_rng_state(self.resources.device):
            return self._outcomes(entries)

    def _outcomes(self, entries: Sequence[MeasureEntry]) -> list[Feed]:
        probe = load_probe(self.probe)
        subject = self.subject
        resources = self.resources
        monitor = self.monitor
        device = torch.device("cpu") if probe.shows_on_cpu else resources.device
        streams = [RandomStream(stream, resources.device) for *_, stream in entries]
        feeds = [
            Feed(measure, options, stream, monitor, device, self.replicated, resources.memory)
            for (measure, options, _), stream in zip(entries, streams, strict=True)
        ]
        facts: ProbeFacts
        check = _SampleCheck(subject, resources.device, self.changes, probe.needs_function)
        stream = None if isinstance(subject.stream, DrawnBatches) else subject.stream
        read = 0 if stream is None else stream.samples
        failure: tuple[Result, str] | None = None
        out_of_memory = False
        try:
            with restored_thread_state(self.changes):
                if probe.needs_function:
                    refuse_masks(subject)
                if probe.needs_one_type:
                    refuse_mixed_types(subject)
                if probe.runs_samples and not probe.checks_samples:
                    check()
                facts = probe.observe(
                    ProbePass(
                        subject.model, subject, self.settings, feeds, resources, self.step, check
                    )
                )
            if not isinstance(facts, dict):
                kind = type(facts).__name__
                raise PluginError(
                    f"the probe '{probe.name}' returns a {kind}, expected a dict of facts"
                )
        except BaseException as error:
            raise_interruption(error)
            # The model's forward pass may raise any exception; every measure then fails.
            failure = result_of_error(error)
            out_of_memory = is_out_of_memory(error)
            facts = error.facts if isinstance(error, NothingObserved) else {}
        if stream is not None and stream.samples == read and stream.exceeds(len(subject.inputs)):
            count = len(subject.inputs)
            remark = f"of the first {count} samples of a stream"
            if stream.is_drawn:
                remark = f"of {count} samples drawn from all"
            facts["remark"] = _join(facts.get("remark", ""), remark)
        if check.dependence:
            facts["remark"] = _join(facts.get("remark", ""), check.dependence)
        for feed in feeds:
            feed.facts = facts
            if failure is not None and feed.failure is None:
                feed.result, feed.traceback = failure
                feed.is_out_of_memory = out_of_memory
            else:
                feed.result = _annotate(feed.compute(), facts)
                values = feed.result.values
                has_batches = any(v.statistics.get("batches", 0) > 1 for v in values)
                if stream is not None and not stream.is_drawn and has_batches:
                    feed.result = append_remarks(feed.result, "batches in the order of a stream")
            feed.release()
        # Part of a traceback if an error was raised in the forward pass of a module.
        in_forward = [f for f in feeds if "in _call_impl" in f.traceback and not f.is_out_of_memory]
        cause = _forward_failure(subject, device, self.changes) if in_forward else None
        if cause is not None:
            for feed in in_forward:
                feed.result = cause
        return feeds


@contextlib.contextmanager
def _checked(model: nn.Module, device: torch.device, changes: Changes) -> Iterator[None]:
    """Run a model in evaluation mode, leaving everything as it was."""
    with (
        torch.no_grad(),
        evaluation_mode(model),
        without_fast_path(),
        preserve_attributes(model),
        preserve_rng_state(device),
        restored_thread_state(changes),
    ):
        yield


def _forward_failure(subject: Subject, device: torch.device, changes: Changes) -> Result | None:
    """Return the result for a model that can't be run on all samples, or not on some of them.

    Return None if it can, or if nothing more is known than the error's message.
    """
    count = len(subject.inputs)
    model = subject.model

    def error_for(size: int) -> BaseException | None:
        try:
            model(subject.inputs[:size].to(device, copy=True))
        except BaseException as error:
            raise_interruption(error)
            return error
        return None

    with _checked(model, device, changes):
        error = error_for(count)
        is_refused = error is not None or subject.is_indivisible
        sizes = () if is_refused else range(1, min(count, MAX_GROUP_SIZE + 1))
        refused = next(((size, e) for size in sizes if (e := error_for(size)) is not None), None)
    # The model may have left a mode, which is gone now.
    if error is not None:
        reason = describe_refusal(error, model)
        return Result.missing("failed", f"the inputs don't fit: {reason}") if reason else None
    if refused is None:
        return None
    reason = f"the network can be run on {count} samples, but not on {refused[0]}"
    return Result.missing("undefined", f"{reason}: {first_line(refused[1])}")


_MORE_SAMPLES = 128
"""Maximum number of samples that are run if the output for a few of them is not finite."""


class _SampleCheck:
    """Checks that outputs are a function of their own sample, of models that run on few samples.

    Raises Undefined where results depend on the batch and the probe needs a function.
    """

    def __init__(
        self, subject: Subject, device: torch.device, changes: Changes, needs_function: bool
    ) -> None:
        self._subject = subject
        self._device = device
        self._changes = changes
        self._needs_function = needs_function
        self._is_finite = True
        # Reason why the outputs are no such function; empty if they are, or until it is checked.
        self.dependence = ""

    def __call__(self, samples: Tensor | None = None, output: object = None) -> None:
        """Check the outputs of some samples, which are computed again without `output`."""
        inputs = self._subject.inputs
        if self._subject.is_indivisible or not len(inputs):
            return
        try:
            with _checked(self._subject.model, self._device, self._changes):
                together = None
                if samples is None or output is None:
                    samples = spread(inputs).to(self._device)
                else:
                    together = output_rows(output, len(samples))
                self.dependence = self._describe(samples, together)
        except RemembersOutputs:
            raise
        except Exception as error:
            if reason := describe_refusal(error, self._subject.model):
                raise RequestError(f"the inputs don't fit: {reason}") from error
            self._check_order()
        if self._needs_function and self.dependence == DEPENDS_ON_BATCH:
            raise Undefined(
                f"the output: {DEPENDS_ON_BATCH}, and it is measured as a function of one sample"
            )

    def _check_order(self) -> None:
        """Raise if the model takes no few samples, and the order of all of them matters."""
        subject = self._subject
        stream = subject.stream
        inputs = subject.inputs
        if stream is not None and not stream.samples:
            inputs = stream.head(HEAD_SAMPLES)
        inputs = inputs.to(self._device)

        def rows(samples: Tensor) -> Tensor:
            with _checked(self._subject.model, self._device, self._changes):
                return self._rows(samples)

        if depends_on_order(rows, spread(inputs), lambda: inputs):
            raise DependsOnOrder

    def _describe(self, samples: Tensor, together: Tensor | None) -> str:
        if self._needs_function:
            dependence = check_memory(self._rows, samples)
        else:
            dependence = describe_outputs(self._rows, samples, together)
        if dependence or self._is_finite:
            return dependence
        inputs = self._subject.inputs
        others = inputs[:: -(-len(inputs) // _MORE_SAMPLES)].to(samples.device)
        return DEPENDS_ON_BATCH if is_finite_among(others, self._rows, samples) else ""

    def _rows(self, samples: Tensor) -> Tensor:
        rows = output_rows(self._subject.model(samples), len(samples))
        # Small batches may have no finite results where larger ones do.
        self._is_finite = self._is_finite and bool(rows.isfinite().all())
        return rows


def _annotate(result: Result, facts: ProbeFacts) -> Result:
    """Add the number of samples or segments and the probe's remarks to a result."""
    n = facts.get("samples", facts.get("segments", 0))
    remarks = facts.get("remarks", {})
    values = tuple(
        replace(value, n=value.n or n, reason=_join(value.reason, remarks.get(value.place, "")))
        for value in result.values
    )
    places = {value.place for value in values}
    unobserved = tuple(
        Value.missing(place, "undefined", reason, n)
        for place, reason in facts.get("undefined", {}).items()
        if place not in places
    )
    annotated = replace(result, values=values + unobserved, n=result.n or n)
    defined, total = annotated.places
    if unobserved and result.status == "ok" and 0 < defined < MIN_DEFINED_FRACTION * total:
        reasons = dict.fromkeys(value.reason for value in unobserved)
        reason = f"{defined} of {total} places: {'; '.join(reasons)}"
        annotated = Result.missing("undefined", reason, annotated.values, annotated.n)
    return append_remarks(annotated, facts.get("remark", ""))


def append_remarks(result: Result, *remarks: str) -> Result:
    """Append remarks to a result's reason."""
    return replace(result, reason=_join(result.reason, *remarks))


def _join(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def result_of_error(error: BaseException) -> tuple[Result, str]:
    """Return the result that reports an exception, and the traceback if it is a failure."""
    if isinstance(error, Undefined):
        result = Result.missing("undefined", error_message(error))
        if isinstance(error, DependsOnOrder):
            result = replace(result, notes={DEPENDS_ON: "order"})
        return result, ""
    if "Expected more than 1 value per channel when training" in error_message(error):
        return Result.missing("undefined", _SINGLE_SAMPLE_REASON), ""
    return Result.missing("failed", error_text(error)), traceback.format_exc()
