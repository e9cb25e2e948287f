"""Pass observations to the measures, in parallel with the forward pass.

A float32 network is replaced by a float64 copy where float32 is not precise enough at some site.
The rounding error of a column depends on everything that it was computed from: the sum of a large
offset and a small difference is rounded at the scale of the offset, even if the offset is
subtracted later. Only a forward pass in float64 reveals it, so a few samples are run in both types.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nlbench.errors import enumerate_names
from nlbench.introspection.memory import available_memory
from nlbench.introspection.model_copy import double_copy, iter_tensors, own_float_type
from nlbench.introspection.precision import float32_precision
from nlbench.introspection.random_state import preserve_rng_state, rng_state
from nlbench.introspection.threads import BackgroundWorkers, measure_threads, overlap_pays
from nlbench.parsers import unique
from nlbench.probes import Listener, ProbeFacts, ProbeOptions, ProbePass
from nlbench.probes.probe import NothingObserved

from .intercept import GATED_UNITS
from .reduce import UnreducedFunction
from .rows import draw_rows, unread_remark
from .site import SharedBatch, Site, SiteBatch, UnreducedResults
from .sites_observation import channel_note, observe_sites
from .sites_probe import COMPARED_SAMPLES, RowPolicy

# Square root of noise variance divided by variance, each summed over the columns of a side. This
# bounds the change in affinity, the most sensitive measure.
MAX_POOLED_NOISE = 3e-4

# Mean over columns of noise variance divided by variance, capped at 1. R² changes by about as much.
MAX_MEAN_NOISE = 1e-4

# Noise relative to the bin width of `entropy`; about this fraction of features may change bins.
MAX_BIN_NOISE = 1e-2

# A column counts as constant if its range is at most this many eps of its maximum magnitude.
MAX_CONSTANT_ROUNDINGS = 8

# The rows (k, d) of input and output at each site.
_Rows = dict[str, tuple[Tensor, Tensor]]


class Float64Comparison(NamedTuple):
    """Sites at which a float32 model differs from its float64 copy."""

    # Float64 copy, to measure in place of the model; None if float32 is sufficient. Networks of
    # other types, and float32 networks in TF32 or under autocast, are measured as they are.
    copy: nn.Module | None = None
    sites: Sequence[str] = ()  # names of the sites where float32 is not sufficient
    problem: str = ""  # reason why a float32 model can't be compared
    # The model's output for the first samples in float32; None if it was not run on all of them at
    # once.
    output: object = None


def compare_with_float64(
    model: nn.Module, first_samples: Tensor, options: Mapping[str, Any]
) -> Float64Comparison:
    """Test whether float32 is precise enough at every site of a model.

    The first two of at most `COMPARED_SAMPLES` also run in float64; no copy is made for fewer.
    """
    device = first_samples.device
    if len(first_samples) < 2 or not _computes_in_float32(model, first_samples):
        return Float64Comparison()
    try:
        with preserve_rng_state(device):
            before = rng_state(device)
            pair = first_samples[:2]
            rows, other_rows, output = _float32_rows(model, first_samples, options)
            if rng_state(device) != before:
                return Float64Comparison(problem="the network draws random numbers", output=output)
    except Exception as error:
        # The pass over all samples raises it again, unless only the small batch causes it.
        return Float64Comparison(problem=str(error).partition("\n")[0])
    # A copy that fills the device would leave no memory to run the model.
    if sum(8 * tensor.numel() for tensor in iter_tensors(model)) > available_memory(device) / 2:
        return Float64Comparison(problem="too little memory for a copy of the model", output=output)
    try:
        with preserve_rng_state(device):
            copy = double_copy(model)
            pair = pair.double() if pair.is_floating_point() else pair
            exact = _rows_at_sites(copy, pair, options)
    except Exception as error:
        # An operation may not support float64, or the copy may not fit into memory.
        return Float64Comparison(problem=str(error).partition("\n")[0], output=output)
    sites = unresolved_sites(rows, exact, other_rows)
    return Float64Comparison(copy if sites else None, sites, output=output)


def _computes_in_float32(model: nn.Module, samples: Tensor) -> bool:
    device = samples.device
    if own_float_type(model) != torch.float32 or device.type == "mps":
        return False
    if samples.is_floating_point() and samples.dtype != torch.float32:
        return False
    is_tf32 = device.type == "cuda" and "tf32" in float32_precision(device).values()
    return not is_tf32 and not torch.is_autocast_enabled(device.type)


def _float32_rows(
    model: nn.Module, samples: Tensor, options: Mapping[str, Any]
) -> tuple[_Rows, _Rows, object]:
    """Return the rows of the first two samples, those of the others, and the output for all.

    The output is None if the samples are not run at once, since memory is limited or the sample of
    a row is unknown.
    """
    pair = samples[:2]
    others = samples[2:]
    if options["memory"] is None:
        outputs: list[object] = []
        hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            rows = _SplitRows(len(samples))
            observe_sites(model, [samples], rows.add, **options)
        finally:
            hook.remove()
        if len(outputs) == 1 and rows.is_complete:
            return rows.first, rows.others if len(others) else {}, outputs[0]
    other_rows = _rows_at_sites(model, others, options) if len(others) else {}
    return _rows_at_sites(model, pair, options), other_rows, None


class _SplitRows:
    """The rows of a batch's first two samples, and those of its other samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.first: _Rows = {}
        self.others: _Rows = {}
        self.is_complete = True  # False if there are rows whose sample is unknown
        # Tensors that several places share, as consecutive blocks do, and their two parts.
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def add(self, observation: SiteBatch) -> None:
        """Add the rows of one place."""
        x = observation.x
        y = observation.y
        sample_index = observation.sample_index
        if sample_index is None and len(x) == self._samples:
            sample_index = torch.arange(self._samples, device=x.device)
        if sample_index is not None:
            _, first_x, other_x = self._split(x, sample_index < 2)
            _, first_y, other_y = self._split(y, sample_index < 2)
            self.first[observation.place] = first_x, first_y
            self.others[observation.place] = other_x, other_y
        elif len(x) > 1:  # A single row is the same for all samples.
            self.is_complete = False

    def _split(self, rows: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if id(rows) not in self._parts:
            # The tensor is kept, so that no other one gets its identity.
            self._parts[id(rows)] = rows, rows[is_first], rows[~is_first]
        return self._parts[id(rows)]


def _rows_at_sites(model: nn.Module, samples: Tensor, options: Mapping[str, Any]) -> _Rows:
    rows: _Rows = {}

    def record(observation: SiteBatch) -> None:
        rows[observation.place] = observation.x, observation.y

    if len(samples) <= 2:
        # As many samples as the memory for a forward pass is estimated from.
        options = {**options, "memory": None, "feasible_sizes": None}
    observe_sites(model, [samples], record, **options)
    return rows


def unresolved_sites(rows: _Rows, exact: _Rows, others: _Rows) -> list[str]:
    """Return the names of sites where rows in float32 differ too much from those in float64.

    The rows of other samples in float32 count as well, since two samples may be close by chance.

    Examples
    --------
    >>> offset = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    >>> exact = {"relu": (offset, offset), "sigmoid": (offset, 0.5 + 1e-8 * offset)}
    >>> rows = {name: (x.float(), y.float()) for name, (x, y) in exact.items()}
    >>> unresolved_sites(rows, exact, {})
    ['sigmoid']
    """
    # Places may share tensors.
    resolved: dict[tuple[int, ...], bool] = {}
    unresolved = []
    for name in rows:
        if name not in exact:
            continue
        for side in zip(rows[name], exact[name], others.get(name, rows[name]), strict=True):
            key = tuple(map(id, side))
            if key not in resolved:
                resolved[key] = _is_resolved(*side)
            if not resolved[key]:
                unresolved.append(name)
                break
    return unresolved


def _is_resolved(values: Tensor, exact: Tensor, others: Tensor) -> bool:
    """Return True if the rounding errors of values (k, d) are small compared with their spread."""
    if values.shape != exact.shape or len(values) < 2:
        return True
    pooled = torch.cat([values, others]).double()
    if not bool(pooled.isfinite().all()):
        return True  # The measures report it.
    rounding = torch.finfo(values.dtype).eps
    varies = _varies(pooled, rounding) | _varies(exact, torch.finfo(exact.dtype).eps)
    if not varies.any():
        return True
    errors = values.double() - exact
    # An error common to all samples changes no score.
    noise = errors.var(0)
    variance = pooled.var(0)
    if noise.sum() > MAX_POOLED_NOISE**2 * variance.sum():
        return False
    ratios = torch.where(noise < variance, noise / variance, 1.0)[varies]
    if ratios.mean() > MAX_MEAN_NOISE:
        return False
    low, high = exact.aminmax(dim=1)
    bins = (high - low) / exact.shape[1]
    differs = _varies(exact.T, torch.finfo(exact.dtype).eps)
    # The bins start at the minimum feature.
    deviations = (errors - errors.mean(1, keepdim=True)).square().mean(1).sqrt()
    return bool((deviations <= MAX_BIN_NOISE * bins)[differs].all())


def _varies(columns: Tensor, rounding: float) -> Tensor:
    low, high = columns.aminmax(dim=0)
    peak = torch.maximum(low.abs(), high.abs())
    return high - low > MAX_CONSTANT_ROUNDINGS * rounding * peak


QUEUE_BYTES = 2**28
"""Maximum size in bytes of the observations queued for the measures."""

# A batch at one site, and a function that waits until it has been copied from the device.
_Item = tuple[SiteBatch, Callable[[], None]]


def observe(probe_pass: ProbePass) -> ProbeFacts:
    """Pass every activation call of a subject to the measures, batch by batch.

    The measures run on the CPU in separate threads, while the network computes the next
    observation. Each measure gets its own copies, in the same order for any number of threads. The
    network and the measures run alternately in the first batch, and in all batches if the network
    or the source of the samples uses the global random generators, which measures may also use.
    Several threads share the sites only if every measure declares its sites independent. A float32
    network is run in float64 if float32 is not precise enough at some sites.
    """
    model = probe_pass.model
    samples = probe_pass.samples
    options = probe_pass.options
    listeners = probe_pass.listeners
    resources = probe_pass.resources
    sites: dict[str, Site] = {}
    rows: Counter[str] = Counter()
    undefined: dict[str, str] = {}
    unmasked: dict[str, None] = {}
    unread: dict[str, None] = {}
    unseen: dict[str, None] = {}
    threads = measure_threads(resources.device) if resources.threads is None else resources.threads
    if not all(getattr(listener, "independent_sites", False) for listener in listeners):
        threads = 1
    updater = _Updater(listeners, threads, has_nodes=options["rows"] == "nodes")

    names = ("of", "rows", "skip", "reduction", "select", "attention")
    arguments: dict[str, Any] = {name: options[name] for name in names}
    arguments |= {"memory": resources.memory, "feasible_sizes": resources.feasible_sizes}
    first_samples = samples.inputs[:COMPARED_SAMPLES].to(resources.device)
    comparison = compare_with_float64(model, first_samples, arguments)
    probe_pass.check_samples(first_samples, comparison.output)
    copy = comparison.copy
    model = model if copy is None else copy

    def batches(source: Iterable[Tensor], workers: BackgroundWorkers[_Item]) -> Iterator[Tensor]:
        before = rng_state(resources.device)
        for index, batch in enumerate(source):
            rng_unused = index == 1 and rng_state(resources.device) == before
            if rng_unused and overlap_pays(resources.device):
                workers.set_limit(QUEUE_BYTES)
            batch = batch.to(resources.device)
            yield batch.double() if copy is not None and batch.is_floating_point() else batch
            probe_pass.step()

    source = samples.batches(int(options["batch"]))
    # Samples in memory are split at once.
    last = len(source) - 1 if isinstance(source, tuple) else None

    with BackgroundWorkers(
        updater.update,
        lambda item: item[0].x.nbytes + item[0].y.nbytes,
        0,
        resources.device,
        lane=updater.lane,
        threads=threads,
    ) as workers:

        def on_observation(observation: SiteBatch) -> None:
            sites.setdefault(observation.place, observation.site)
            rows[observation.place] += len(observation.x)
            is_last = observation.batch == last
            workers.put(_to_host(replace(observation, is_last=is_last)))

        count = observe_sites(
            model,
            batches(source, workers),
            on_observation,
            functions=updater.functions,
            on_unseen=unseen.setdefault,
            on_undefined=undefined.setdefault,
            on_unmasked=unmasked.setdefault,
            on_unread=unread.setdefault,
            **arguments,
        )
    facts = _facts(
        sites, rows, count, list(unseen), comparison, options, list(unmasked), list(unread)
    )
    if undefined:
        facts["undefined"] = undefined
    if not sites:
        inside = f", except inside {enumerate_names(list(unseen))}" if unseen else ""
        none = f"the model calls no known activation function{inside}"
        raise NothingObserved("; ".join(unique(undefined.values())) or none, facts)
    return facts


class _Updater:
    """Updates the measures with the batches of sites, on one or several threads."""

    def __init__(self, listeners: Sequence[Listener], threads: int, *, has_nodes: bool) -> None:
        self._listeners = listeners
        self._is_parallel = threads > 1
        self._has_nodes = has_nodes
        self.functions, self._keys = _declared_functions(listeners)

    def update(self, item: _Item) -> None:
        """Update each measure with its own copy of a batch."""
        observation, wait = item
        wait()
        # Wall time would include waiting for the other threads.
        clock = time.thread_time if self._is_parallel else time.perf_counter
        shared_by_package: dict[object, SharedBatch] = {}
        for listener, names in zip(self._listeners, self._keys, strict=True):
            limit = getattr(listener, "row_limit", None)
            limited = _limit_rows(observation, limit, self._has_nodes)
            shared = shared_by_package.setdefault(
                (getattr(listener, "package", listener), len(limited.x)),
                SharedBatch(limited, clock),
            )
            batch = _copy(limited, names, shared)
            if self._is_parallel:
                listener.update(batch, (observation.batch, observation.site.index))
            else:
                listener.update(batch)

    def lane(self, item: _Item) -> str:
        """Return the site of a batch if sites may run at the same time, else ""."""
        return item[0].place if self._is_parallel else ""


def _facts(
    sites: Mapping[str, Site],
    rows: Mapping[str, int],
    samples: int,
    unseen: Sequence[str],
    comparison: Float64Comparison,
    options: ProbeOptions,
    unmasked: Sequence[str],
    unread: Sequence[str],
) -> ProbeFacts:
    facts: ProbeFacts = {}
    if comparison.problem:
        facts["not_compared_with_float64"] = comparison.problem
    facts["samples"] = samples
    facts["sites"] = len(sites)
    facts["kinds"] = {name: site.kind for name, site in sites.items()}
    remarks = []
    if where := {name: site.where for name, site in sites.items() if site.where}:
        facts["where"] = where
    if comparison.sites:
        facts["precision"] = "float64"
        facts["unresolved"] = comparison.sites
        names = enumerate_names(comparison.sites, 2)
        remarks.append(f"measured in float64, since float32's rounding shows at {names}")
    if unseen:
        facts["unseen"] = list(unseen)
        remarks.append(f"activations not captured: {enumerate_names(unseen)}")
    gates = {name: site.kind for name, site in sites.items() if site.role == "gate"}
    gated = [name for name, kind in gates.items() if kind in GATED_UNITS]
    if gated:
        facts["gated"] = gated
        remarks.append(f"gate products are not measured (at {enumerate_names(gated, 2)})")
    if unmasked:
        remarks.append(unmasked_remark(unmasked))
    remarks += map(unread_remark, unread)
    policy = RowPolicy.parse(str(options["rows"]), int(options["skip"]), str(options["of"]))
    if policy.description:
        remarks.append(policy.description)
    if remarks:
        facts["remark"] = "; ".join(remarks)
    notes = {name: [channel_note([site])] for name, site in sites.items() if site.assumed}
    if not (policy.tokens or options["reduction"] == "spatial"):
        notes.clear()
    for name, count in rows.items():
        # Experts have fewer rows, since they receive only the tokens routed to them. A single row
        # is the same for all samples and needs no note.
        if not (policy.tokens or policy.nodes) and count not in (samples, 1):
            notes.setdefault(name, []).append(
                f"its rows are {count} tokens or windows of {samples} samples"
            )
    if notes:
        facts["remarks"] = {name: "; ".join(texts) for name, texts in notes.items()}
    if policy.description:
        facts["row_policy"] = policy.description
    if any(count != samples for count in rows.values()):
        facts["rows"] = dict(rows)
    return facts


def unmasked_remark(places: Sequence[str]) -> str:
    """Return a remark on the places to whose positions a padding mask doesn't apply."""
    return f"padding counts at {enumerate_names(places)}, to which the padding mask doesn't fit"


def _declared_functions(
    listeners: Sequence[Listener],
) -> tuple[Mapping[str, UnreducedFunction], Sequence[Mapping[str, str]]]:
    """Collect the functions that the measures declare in ``unreduced``, without duplicates."""
    key_of: dict[UnreducedFunction, str] = {}
    keys = []
    for listener in listeners:
        declared: Mapping[str, UnreducedFunction] = getattr(listener, "unreduced", {})
        keys.append({name: key_of.setdefault(f, str(len(key_of))) for name, f in declared.items()})
    return {key: function for function, key in key_of.items()}, keys


def _limit_rows(observation: SiteBatch, limit: int | None, has_nodes: bool) -> SiteBatch:
    """Subsample rows for a measure whose run time is superlinear in the number of rows.

    Rows that are samples are not subsampled, since ``sites.batch`` limits their number.
    """
    are_samples = observation.sample_index is None and len(observation.x) == observation.samples
    if limit is None or len(observation.x) <= limit or (are_samples and not has_nodes):
        return observation
    chosen = draw_rows(len(observation.x), limit, observation.batch).to(observation.x.device)
    return replace(
        observation,
        x=observation.x[chosen],
        y=observation.y[chosen],
        sample_index=None if observation.sample_index is None else observation.sample_index[chosen],
        sources=observation.sources and observation.sources.select_rows(chosen),
    )


def _copy(observation: SiteBatch, names: Mapping[str, str], shared: SharedBatch) -> SiteBatch:
    """Copy a batch for a listener, with the results of its functions under their own names."""
    results = dict(observation.unreduced.items())
    unreduced = UnreducedResults((new, results[name]) for new, name in names.items())
    return replace(
        observation,
        x=observation.x.clone(),
        y=observation.y.clone(),
        unreduced=unreduced.map(torch.clone),
        borrowed=shared,
    )


def _to_host(observation: SiteBatch) -> _Item:
    """Copy a batch to the CPU, where the measures run.

    Reduced activations are small, and the measures take many steps. On a GPU, each step would
    launch a kernel and often synchronise with the forward pass.
    """
    device = observation.x.device
    if device.type == "cpu":
        return observation, lambda: None
    # Only CUDA copies to pinned memory without waiting.
    is_cuda = device.type == "cuda"

    def to_cpu(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=is_cuda)

    sample_index = observation.sample_index
    moved = replace(
        observation,
        x=to_cpu(observation.x),
        y=to_cpu(observation.y),
        unreduced=UnreducedResults(observation.unreduced.items()).map(to_cpu),
        sample_index=None if sample_index is None else to_cpu(sample_index),
    )
    if not is_cuda:
        return moved, lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return moved, event.synchronize
