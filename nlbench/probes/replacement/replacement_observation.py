"""Observe a network with one place at a time replaced by a fitted affine map."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, Undefined
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.memory import SampleLimit, microbatch_sizes, usable_memory
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.introspection.precision import exact_by_default
from nlbench.introspection.random_state import preserve_rng_state
from nlbench.probes.probe import OnStep, ProbeFacts, ProbePass
from nlbench.probes.sites.listeners import unmasked_remark
from nlbench.probes.sites.rows import PositionSelector, tokens_of_outputs, unread_remark
from nlbench.probes.sites.sites_probe import RowPolicy

from .fits import FEW_ROWS_PER_COEFFICIENT, AffineFit, PolynomialMap, copy_to_rows
from .interception import CallInterception, ReplaceableCall, find_calls, first_tensor, get_tensor
from .prefix import Replacement, SharedPrefix
from .replacement_probe import POLYNOMIAL_DEGREES, UNFITTED, parse_maps

if TYPE_CHECKING:
    from nlbench.subjects.subject import Subject

__all__ = ["ReplacedOutputs", "fit_places", "list_maps", "observe"]


MAX_FITTING_FRACTION = 0.5
"""Fraction of the memory for moments and full maps; the rest is for forward passes."""

SOLVER_MATRICES = 6
"""Number of matrices as large as a full map that are in memory while it is fitted."""


@dataclass(frozen=True)
class ReplacedOutputs:
    """A network's outputs for one batch, with and without a place replaced.

    Parameters
    ----------
    place : str
    primary : str
        Name of the map whose cost is the place's value.
    map : str
        One of `MAPS`.
    outputs, replaced : tensor of shape (n, ...)
    labels : tensor of shape (n, ...) or None
    batch : int
        Index of the batch, from 0.
    tokens : tensor of shape (n, t) or None
        False at padding; None if the outputs have no positions, or none of them is padding.
    inputs : tensor of shape (n, ...), optional
        Samples.
    outside : float or None
        Fraction of the place's inputs outside the range on which a polynomial was fitted; None for
        other maps.
    """

    place: str
    primary: str
    map: str
    outputs: Tensor
    replaced: Tensor
    labels: Tensor | None
    batch: int
    tokens: Tensor | None = None
    inputs: Tensor | None = None
    outside: float | None = None


class _RangeCounter:
    """A polynomial that records which fraction of its last input is outside its range.

    `tokens` (n, t) is False at padding, which doesn't count.
    """

    def __init__(
        self,
        polynomial: PolynomialMap,
        place: ReplaceableCall,
        samples: int,
        tokens: Tensor | None,
    ) -> None:
        self._polynomial = polynomial
        self._place = place
        self._samples = samples
        self._tokens = tokens
        self.outside = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        is_outside = self._polynomial.is_outside(*self._place.split_by_sample(x, self._samples))
        self.outside = float(self._drop_padding(is_outside).double().mean())
        return self._polynomial(x, self._place.channel_axis)

    def _drop_padding(self, values: Tensor) -> Tensor:
        """Return the values (n, ..., d) at tokens, or all of them if there is no axis of tokens."""
        tokens = self._tokens
        if tokens is None or len(tokens) != len(values):
            return values
        for axis, size in enumerate(values.shape[1:-1], 1):
            if size == tokens.shape[1]:
                return values.movedim(axis, 1)[tokens.to(values.device)]
        return values


LabelledBatch = tuple[Tensor, Tensor | None]
"""Inputs and their labels, if any."""


def observe(probe_pass: ProbePass) -> ProbeFacts:
    """Fit maps on every other sample, and observe the outputs with each map on the other half."""
    return _Observation(probe_pass).run()


class _Observation:
    """One pass of the probe, and what it finds."""

    def __init__(self, probe_pass: ProbePass) -> None:
        self._pass = probe_pass
        self._model = probe_pass.model
        self._device = probe_pass.resources.device
        self._options = probe_pass.options
        self._of = str(self._options["of"])
        self._names = parse_maps(str(self._options["maps"]), self._of)
        # Number of samples used to find places and the outputs that can be cached.
        self._example = probe_pass.samples.inputs[:2].to(self._device)
        # Number of evaluated samples of each batch.
        self._evaluated: dict[int, int] = {}
        # Reasons why maps are missing.
        self._reasons: list[str] = []
        self._rows_per_coefficient: dict[str, float] = {}
        self._unseen: dict[str, None] = {}
        self._undefined: dict[str, str] = {}
        self._unmasked: dict[str, None] = {}
        self._unread: dict[str, None] = {}

    def run(self) -> ProbeFacts:
        """Fit and observe all maps in groups of places that fit in memory."""
        batch = self._batch_size()
        select = str(self._options["select"])
        places = self._find_places(select)
        memory = usable_memory(self._device, self._pass.resources.memory)
        with exact_by_default(), evaluation_mode(self._model), without_fast_path():
            prefix = SharedPrefix(self._model, places, self._example)
            fitting = (1 - MAX_FITTING_FRACTION) * memory / prefix.bytes_per_sample
            if prefix.is_cached and fitting < 1:
                prefix.disable()
            # Only half of each batch is used in a pass, for fitting or for evaluation.
            # Maximum size of a batch's outputs, which can be larger than a language model's
            # activations.
            max_samples = max(1, 2**28 // prefix.output_bytes)
            batch = min(batch, 2 * max_samples)
            limit = max(1, int(fitting)) if prefix.is_cached else batch
            limit = min(limit, max_samples)
            for group in _groups(places, self._full_channels, MAX_FITTING_FRACTION * memory):
                indices = itertools.count()
                for half in (0, 1) if self._options["crossed"] else (0,):
                    maps = self._fit(group, batch, half)
                    if maps:
                        self._observe(prefix, maps, batch, 1 - half, limit, indices)
        if not self._evaluated:
            no_samples = "there are no samples to evaluate maps on: at least 4 are needed"
            raise Undefined(next(filter(None, self._reasons), no_samples))
        return self._facts(places, prefix)

    def _find_places(self, select: str) -> list[ReplaceableCall]:
        """Find the places to replace, and the calls that can't be."""
        try:
            places = find_calls(
                self._model,
                self._example,
                of=self._of,
                select=select,
                on_unseen=self._unseen.setdefault,
                on_undefined=self._undefined.setdefault,
                on_unmasked=self._unmasked.setdefault,
            )
        except RequestError as error:
            raise type(error)(str(error).replace("sites.", "replacement.", 1)) from error
        if not places:
            raise Undefined("the model calls no known activation function")
        return places

    def _batch_size(self) -> int:
        size = int(self._options["batch"])
        resources = self._pass.resources
        limit = SampleLimit(
            resources.feasible_sizes,
            self._model,
            "samples of replaced passes",
            self._example,
            resources.memory,
            # Memory for a pass with a replacement, relative to a plain forward pass.
            times=2,
        ).limit
        return min(size, 2 * limit) if limit else size

    @property
    def _full_channels(self) -> int | None:
        """Largest number of channels for a full map, or None for any number."""
        if "affine" not in self._names:
            return 0
        # There is no limit for modules: they are few, and by default only a full map is fitted.
        return int(self._options["affine"]) if self._of == "activations" else None

    def _fit(
        self, group: Sequence[ReplaceableCall], size: int, half: int
    ) -> list[tuple[ReplaceableCall, str, Replacement]]:
        """Fit the maps of a group of places on half of the samples."""
        fitted = _halves(self._pass.samples, size, half, self._device, self._pass.step)
        fits = fit_places(
            self._model,
            group,
            (inputs for inputs, _ in fitted),
            full_channels=self._full_channels,
            degree=max((POLYNOMIAL_DEGREES.get(name, 1) for name in self._names), default=1),
            on_unmasked=self._unmasked.setdefault,
            on_unread=self._unread.setdefault,
        )
        maps = []
        for place in group:
            # The moments of a place are freed as soon as its maps are computed.
            fit = fits.pop(place.name)
            self._reasons.append(_missing_map_reason(self._names[0], place, fit))
            if fit.is_full and fit.rows >= fit.min_rows:
                self._rows_per_coefficient[place.name] = fit.rows_per_coefficient
            maps += [(place, name, new) for name, new in list_maps(place, fit, self._names)]
        return maps

    def _observe(
        self,
        prefix: SharedPrefix,
        maps: Sequence[tuple[ReplaceableCall, str, Replacement]],
        size: int,
        half: int,
        limit: int,
        indices: Iterator[int],
    ) -> None:
        """Show the outputs with each map on half of the samples, in batches up to a limit."""
        max_evaluated = int(self._options["judged"]) or None
        halves = _halves(self._pass.samples, size, half, self._device, self._pass.step)
        for part in _split(_first(halves, max_evaluated), limit):
            index = next(indices)
            self._evaluated[index] = len(part[0])
            for outputs in _observe_maps(self._model, prefix, maps, self._names[0], part, index):
                self._pass.show(outputs)

    def _facts(self, places: Sequence[ReplaceableCall], prefix: SharedPrefix) -> ProbeFacts:
        facts = ProbeFacts(
            samples=sum(self._evaluated.values()),
            sites=len(places),
            kinds={place.name: place.kind for place in places},
            is_prefix_shared=prefix.is_cached,
        )
        if self._undefined:
            facts["undefined"] = self._undefined
        remarks = []
        if self._names[0] == "affine":
            remarks.append(_few_rows_remark(self._rows_per_coefficient))
        if self._unseen:
            facts["unseen"] = list(self._unseen)
            remarks.append(f"activations not captured: {', '.join(list(self._unseen)[:6])}")
        if self._unmasked:
            remarks.append(unmasked_remark(list(self._unmasked)))
        remarks += map(unread_remark, self._unread)
        if remark := "; ".join(filter(None, remarks)):
            facts["remark"] = remark
        return facts


def _halves(
    samples: Subject, size: int, parity: int, device: torch.device, step: OnStep
) -> Iterator[LabelledBatch]:
    """Yield the samples with even or odd indices, in batches."""
    position = 0
    for inputs, labels in samples.repeatable(size):
        chosen = slice((parity - position) % 2, None, 2)
        position += len(inputs)
        if len(inputs[chosen]):
            yield inputs[chosen].to(device), None if labels is None else labels[chosen].to(device)
        step()


def _first(batches: Iterator[LabelledBatch], count: int | None) -> Iterator[LabelledBatch]:
    """Yield batches with a total of at most `count` samples, but exhaust the iterator."""
    for inputs, labels in batches:
        taken = slice(count)
        if count is not None:
            count = max(0, count - len(inputs))
        if len(inputs[taken]):
            yield inputs[taken], None if labels is None else labels[taken]


def _split(batches: Iterable[LabelledBatch], limit: int) -> Iterator[LabelledBatch]:
    for inputs, labels in batches:
        sizes = microbatch_sizes(len(inputs), min(limit, len(inputs)))
        parts = torch.split(inputs, sizes)
        if labels is None:
            yield from ((part, None) for part in parts)
        else:
            yield from zip(parts, torch.split(labels, sizes), strict=True)


def _groups(
    places: Sequence[ReplaceableCall], full_channels: int | None, memory: float
) -> Iterator[list[ReplaceableCall]]:
    """Yield groups of places whose full maps fit in memory together."""
    group: list[ReplaceableCall] = []
    used = 0.0
    for place in places:
        # Products of the inputs with themselves and with the outputs, in float64.
        is_full = full_channels is None or place.channels <= full_channels
        matrix = 8 * place.channels**2 if is_full else 0
        if group and used + (2 + SOLVER_MATRICES) * matrix > memory:
            yield group
            group = []
            used = 0.0
        group.append(place)
        used += 2 * matrix
    yield group


def _observe_maps(
    model: nn.Module,
    prefix: SharedPrefix,
    maps: Sequence[tuple[ReplaceableCall, str, Replacement]],
    primary: str,
    batch: LabelledBatch,
    index: int,
) -> Iterator[ReplacedOutputs]:
    """Yield the outputs for a batch with each map replacing its place."""
    inputs, labels = batch
    selector = PositionSelector(RowPolicy(tokens=True))
    selector.begin(0, len(inputs))
    with selector.hooked(model):
        outputs = validated_outputs(prefix.record(inputs), len(inputs))
    tokens = tokens_of_outputs(selector.outermost, outputs)
    for place, name, new in maps:
        watched = new
        if isinstance(new, partial) and isinstance(new.func, PolynomialMap):
            watched = _RangeCounter(new.func, place, len(inputs), tokens)
        replaced = first_tensor((prefix.run(place, watched),))
        assert replaced is not None
        outside = watched.outside if isinstance(watched, _RangeCounter) else None
        yield ReplacedOutputs(
            place.name, primary, name, outputs, replaced, labels, index, tokens, inputs, outside
        )


def _missing_map_reason(name: str, place: ReplaceableCall, fit: AffineFit) -> str:
    """Return the reason why a place has no map of the given name. Return "" if it has one."""
    if name in ("channel", "identity", *POLYNOMIAL_DEGREES):
        return "" if fit.keeps_channels else UNFITTED[name]
    if name == "mean" or (fit.is_full and fit.rows >= fit.min_rows):
        return ""
    if not fit.is_full:
        return UNFITTED[name]
    positions = max(1, math.prod(place.shape) // place.channels)
    samples = 2 * -(-fit.min_rows // positions)
    return (
        f"a full map at {place.name} needs {fit.min_rows:,} rows to fit on, four per coefficient, "
        f"and half of the samples have {fit.rows:,}; measure at least {samples:,} samples (of "
        "text: text.windows), or set replacement.maps=channel"
    )


def _few_rows_remark(rows: Mapping[str, float]) -> str:
    """Return a remark if full maps have few rows per coefficient, by place. Else nothing."""
    few = {name: count for name, count in rows.items() if count < FEW_ROWS_PER_COEFFICIENT}
    if not few:
        return ""
    return (
        f"full maps of {len(few)} of {len(rows)} places are fitted to as few as "
        f"{min(few.values()):.1f} rows per coefficient; below {FEW_ROWS_PER_COEFFICIENT} one can "
        "cost more than skipping the place: compare with replacement.maps=affine,identity, or "
        "measure more samples"
    )


def fit_places(
    model: nn.Module,
    places: Sequence[ReplaceableCall],
    batches: Iterator[Tensor],
    *,
    full_channels: int | None = 0,
    degree: int = 1,
    on_unmasked: Callable[[str], object] = lambda place: None,
    on_unread: Callable[[str], object] = lambda argument: None,
) -> dict[str, AffineFit]:
    """Accumulate the moments of places over all positions except padding.

    A full map is fitted to places of at most `full_channels` channels, None for all, and
    polynomials per channel up to a degree. `on_unmasked` is called with the name of each place to
    whose positions a padding mask doesn't apply, and `on_unread` with each argument that may be a
    mask and isn't read. Raise Undefined if a batch doesn't call every place.
    """
    fitting = _PlaceFits(model, places, full_channels, degree, on_unmasked)
    for inputs in batches:
        fitting.add(inputs)
    for name in fitting.unread:
        on_unread(name)
    return fitting.fits


class _PlaceFits:
    """Fits of places, to which each batch adds its rows."""

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[ReplaceableCall],
        full_channels: int | None,
        degree: int,
        on_unmasked: Callable[[str], object],
    ) -> None:
        self.fits = {
            place.name: AffineFit(full_channels is None or place.channels <= full_channels, degree)
            for place in places
        }
        self._model = model
        self._places = places
        self._on_unmasked = on_unmasked
        self._starting: dict[CallId, list[ReplaceableCall]] = defaultdict(list)
        self._ending: dict[CallId, list[ReplaceableCall]] = defaultdict(list)
        for place in places:
            self._starting[place.call].append(place)
            self._ending[place.end].append(place)
        self._interception = CallInterception(model, places)
        self._selector = PositionSelector(RowPolicy(tokens=True))
        # Rows of the inputs of running calls, without padding, and their indices.
        self._running: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._called: set[str] = set()

    @property
    def unread(self) -> Iterable[str]:
        """Names of arguments that may be masks and aren't read."""
        return self._selector.unread

    def add(self, inputs: Tensor) -> None:
        """Run the model on a batch, and add the rows of all places."""
        self._called.clear()
        self._running.clear()
        self._selector.begin(0, len(inputs))
        with preserve_rng_state(inputs.device), self._selector.hooked(self._model):
            self._interception.run(inputs.clone(), self._around)
        missing = [place.name for place in self._places if place.name not in self._called]
        if missing:
            raise Undefined(
                f"a batch doesn't call {missing[0]}, so one name may stand for several places"
            )

    def _around(self, call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        if starts := self._starting.get(call):
            self._start(starts, x)
        output = compute()
        for place in self._ending.get(call, ()):
            if place.name in self._running:
                self._end(place, output)
        return output

    def _start(self, places: Sequence[ReplaceableCall], x: Tensor) -> None:
        """Store the rows of places that start with one call, and so have one input."""
        selector = self._selector
        x, axis = places[0].split_by_sample(x, selector.samples)
        # Copied before the call, which may overwrite its input.
        rows = copy_to_rows(x, axis)
        index = None
        if axis and len(x) == selector.samples:
            selected = selector.select(x, axis)
            if selector.is_unmasked(x, axis):
                for place in places:
                    self._on_unmasked(place.name)
            index = None if selected is None else selected.index
        elif selector.outermost is not None and places[0].batch_axis is not None:
            raise Undefined(f"which rows of {places[0].name} hold padding is unknown")
        self._running.update((place.name, (rows, index)) for place in places)

    def _end(self, place: ReplaceableCall, output: Any) -> None:
        """Add the rows of a place to its fit."""
        rows, index = self._running.pop(place.name)
        y = get_tensor(output, place.result)
        results = copy_to_rows(*place.split_by_sample(y, self._selector.samples))
        if index is None:
            self.fits[place.name].add(rows, results)
        else:
            self.fits[place.name].add(rows[index], results[index])
        self._called.add(place.name)


def list_maps(
    place: ReplaceableCall, fit: AffineFit, names: Sequence[str]
) -> Iterator[tuple[str, Replacement]]:
    """Yield the given kinds of maps for a place, with their names, where they exist."""
    fitted = {"channel": fit.per_channel, "mean": fit.mean, "affine": fit.full}
    for name in names:
        per_channel = name in ("channel", "identity", *POLYNOMIAL_DEGREES)
        if per_channel and not fit.keeps_channels:
            continue
        if name == "identity":
            # Copied, since the network may modify it in place.
            yield name, torch.clone
        elif name in POLYNOMIAL_DEGREES:
            polynomial = fit.polynomial(POLYNOMIAL_DEGREES[name])
            yield name, partial(polynomial, channel_axis=place.channel_axis)
        elif (affine := fitted[name]()) is not None:
            yield name, partial(affine, channel_axis=place.channel_axis)
