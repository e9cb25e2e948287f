"""Spans of consecutive blocks, replaced by nothing or by an affine map of the stream.

There are three replacements of a span that maps the stream x to y. ``skip`` keeps x. ``affine``
adds an affine map of x. ``fold`` adds a linear map of what the last linear layer of the previous
block adds to the stream, and becomes part of that layer's weight (ReplaceMe, arXiv:2505.02819). The
fits are regressions of y - x with a penalty on the map, so that a large penalty means skipping.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, Undefined, first_line
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_copy import rebound_copy
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.measures.statistics.regression import RegressionMap, RegressionSums
from nlbench.measures.substitution import divergence, loss_change
from nlbench.probes.replacement import AffineMap, CallInterception, ReplaceableCall
from nlbench.probes.replacement.interception import first_tensor, get_tensor
from nlbench.probes.replacement.prefix import SharedPrefix

from .curve import class_logits
from .network import AffineModule, record_calls

SPAN_MAPS = ("skip", "fold", "affine")

RIDGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Penalties to choose from, relative to the mean variance of the inputs after position 0."""

ROWS_PER_COEFFICIENT = 16
"""Number of rows per coefficient below which a map may cost more than skipping."""

OUTPUT_TOLERANCE = 1e-4
"""Tolerance for the outputs of a plain network, relative to the largest one."""

STREAM_TOLERANCE = 0.01
"""Tolerance for what a layer adds to the stream, relative to the largest value."""

RANK_TOLERANCE = 1e-12
"""Eigenvalues below this fraction of the largest one are taken as zero."""

BATCH = 4

Key: TypeAlias = int | str | None


@dataclass(frozen=True)
class StreamMap(AffineMap):
    """A fitted map from u (p,) to y - x (k,), with held-out scores.

    Parameters
    ----------
    ridge : float
        Chosen penalty, one of `RIDGES`.
    r2, r2_with_first : float
        Fraction of the variance of y that is predicted at held-out samples, without and with the
        first position of each.
    rows : int
        Number of rows, positions of all samples, in the fit.
    """

    ridge: float
    r2: float
    r2_with_first: float
    rows: int

    @property
    def rows_per_coefficient(self) -> float:
        """Number of rows for each coefficient of an output."""
        return self.rows / (len(self.weight) + bool(self.bias.any()))


class StreamFit:
    """Ridge regression of a span's change of the stream, with the penalty chosen by two folds.

    The first position of each sample is in the fit but not in the penalty's unit or in the choice:
    in language models its norm may be a hundred times that of the others.

    Examples
    --------
    >>> x = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = StreamFit(has_bias=True)
    >>> fit.add(x, x, 3 * x + 1)
    >>> fitted = fit.fit()
    >>> torch.allclose(fitted.weight, 2 * torch.eye(3).double(), atol=1e-6), fitted.ridge
    (True, 0.0)
    """

    def __init__(self, has_bias: bool) -> None:
        self._has_bias = has_bias
        self._samples = 0
        self._parts: dict[tuple[int, bool], _Sums] = {}

    def add(self, u: Tensor, x: Tensor, y: Tensor) -> None:
        """Add tensors of shape (samples, positions, channels)."""
        for fold in (0, 1):
            samples = slice((fold + self._samples) % 2, None, 2)
            for is_first, positions in ((True, slice(0, 1)), (False, slice(1, None))):
                rows = (each[samples, positions].flatten(0, 1).double() for each in (u, x, y))
                part = _sums(*rows)
                key = fold, is_first
                self._parts[key] = _plus(self._parts[key], part) if key in self._parts else part
        self._samples += len(u)

    def fit(self) -> StreamMap:
        """Return the map with the penalty that predicts held-out samples best."""
        rest = [self._parts[fold, False] for fold in (0, 1) if self._samples]
        if not rest or min(change.n for change, _ in rest) < 2:
            raise Undefined("maps of spans need at least two samples of three positions")
        folds = [_plus(self._parts[fold, True], rest[fold]) for fold in (0, 1)]
        after_first = _plus(*rest)
        total = _plus(*folds)
        unit = _Ridge(after_first[0], self._has_bias).mean_variance
        solvers = [_Ridge(change, self._has_bias) for change, _ in folds]
        errors: dict[float, list[float]] = {}
        for ridge in RIDGES:
            maps = [solver.solve(ridge * unit) for solver in solvers]
            errors[ridge] = []
            for (first, _), (second, _) in (rest, folds):
                error = second.squared_errors(maps[0]) + first.squared_errors(maps[1])
                errors[ridge].append(error)
        best = min(RIDGES, key=lambda ridge: errors[ridge][0])
        fitted = _Ridge(total[0], self._has_bias).solve(best * unit)
        scores = []
        for error, (_, stream) in zip(errors[best], (after_first, total), strict=True):
            variation = float(stream.centered()[2].sum())
            scores.append(1 - error / variation if variation > 0 else float("nan"))
        bias = fitted.mean_y - fitted.mean_x @ fitted.coefficients
        r2, r2_with_first = scores
        return StreamMap(fitted.coefficients, bias, best, r2, r2_with_first, total[0].n)


_Sums = tuple[RegressionSums, RegressionSums]
"""Sums of the change of the stream on the regressors, and of the new stream on nothing."""


def _sums(u: Tensor, x: Tensor, y: Tensor) -> _Sums:
    return RegressionSums.of(u, y - x), RegressionSums.of(y[:, :0], y)


def _plus(first: _Sums, second: _Sums) -> _Sums:
    return first[0].plus(second[0]), first[1].plus(second[1])


class _Ridge:
    """Ridge regressions with several penalties, about the means if there is a bias."""

    def __init__(self, sums: RegressionSums, has_bias: bool) -> None:
        self._mean_u, self._mean_t = (x / sums.n * has_bias for x in (sums.x, sums.y))
        uu, ut, _ = sums.about(self._mean_u, self._mean_t)
        self._values, self._vectors = torch.linalg.eigh(uu / sums.n)
        self._products = self._vectors.T @ (ut / sums.n)
        self.mean_variance = float(uu.trace()) / sums.n / len(uu)

    def solve(self, ridge: float) -> RegressionMap:
        """Return the map, of minimum norm if the inputs are dependent and `ridge` is 0."""
        values = self._values.clamp(min=0)
        is_zero = values <= RANK_TOLERANCE * values.max()
        scale = torch.where(is_zero & (ridge == 0), 0.0, 1 / (values + ridge))
        weight = self._vectors @ (scale[:, None] * self._products)
        return RegressionMap(weight, self._mean_u, self._mean_t, len(values))


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of a network, as a place and as entries of a module list.

    Parameters
    ----------
    place : ReplaceableCall
    blocks : str
        Path of the module list.
    first, last : int
        Indices of the first and the last block, inclusive.
    """

    place: ReplaceableCall
    blocks: str
    first: int
    last: int

    @classmethod
    def at(cls, place: ReplaceableCall, model: nn.Module) -> Span:
        """Return the span at a place."""
        blocks, _, first = place.call.path.rpartition(".")
        last = place.end.path.rpartition(".")[2]
        members = model.get_submodule(blocks)
        if not isinstance(members, nn.ModuleList | nn.Sequential) or place.call.number:
            raise RequestError(f"{place.name} isn't a span of blocks that are each called once")
        if len({id(member) for member in members}) < len(members):
            raise RequestError(f"the blocks of {blocks} share weights, so none can be removed")
        if place.channel_axis != len(place.shape):
            raise RequestError(f"{place.name} has no channels on the last axis, as tokens have")
        return cls(place, blocks, int(first), int(last))

    @property
    def length(self) -> int:
        """Number of blocks."""
        return self.last - self.first + 1

    def overlaps(self, other: Span) -> bool:
        """Return True if the spans have a block in common."""
        is_apart = self.last < other.first or other.last < self.first
        return self.blocks == other.blocks and not is_apart

    def shifted(self, count: int) -> Span:
        """Return the span in a network that lacks some blocks before it."""
        if not count:
            return self
        first = self.first - count
        last = self.last - count
        call, end = (CallId(f"{self.blocks}.{index}", 0) for index in (first, last))
        place = replace(self.place, call=call, last=end if self.place.last is not None else None)
        return Span(place, self.blocks, first, last)


@dataclass(frozen=True)
class Cost:
    """Mean increase of the loss per sample, in nats, with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Cost:
        """Return the mean of the samples' values (n,)."""
        error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        return cls(float(values.mean()), error)

    def __str__(self) -> str:
        """Format the mean and its standard error."""
        return f"{self.mean:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class SpanResult:
    """Maps of one span, and what each costs. A map that can't be made is missing.

    Parameters
    ----------
    maps : mapping of str to StreamMap
        Keyed by ``fold`` and ``affine``.
    costs : mapping of str to Cost
        Keyed by ``skip``, ``fold`` and ``affine``.
    layer : str or None
        Path of the linear layer that ``fold`` changes; None for the embedding.
    name : str
        Name of the span in the original network.
    chosen : str
        Name of the map that takes the span's place; empty if it wasn't removed.
    """

    span: Span
    maps: Mapping[str, StreamMap]
    costs: Mapping[str, Cost]
    layer: str | None = None
    name: str = ""
    chosen: str = ""

    def choose(self, map_name: str) -> str:
        """Return the name of a map, or ``skip`` if that costs no more."""
        cost = self.costs.get(map_name)
        if cost is None or cost.mean >= self.costs["skip"].mean:
            return "skip"
        return map_name


def last_linear(block: nn.Module, width: int, called: Sequence[str]) -> str | None:
    """Return the path within a block of the linear layer of a width that is called last.

    Linear layers are `torch.nn.Linear` and the transposed layers of GPT-2.
    """
    for path in reversed(called):
        module = block.get_submodule(path)
        weight = getattr(module, "weight", None)
        is_linear = isinstance(module, nn.Linear)
        if not (is_linear or _is_transposed(module)) or weight is None or weight.ndim != 2:
            continue
        if weight.shape[0 if is_linear else 1] == width:
            return path
    return None


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers")


@contextmanager
def watch(
    model: nn.Module,
    inputs: Mapping[str, Key] = MappingProxyType({}),
    outputs: Mapping[str, Key] = MappingProxyType({}),
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Record copies of tensors that modules take and return, by path.

    The paths are mapped to the positions or keys of the tensors; None is the first tensor.
    """
    taken: dict[str, Tensor] = {}
    returned: dict[str, Tensor] = {}

    def record(tensors: dict[str, Tensor], path: str, values: Any, key: Key) -> None:
        if key is not None or first_tensor((values,)) is not None:
            tensors.pop(path, None)  # So that the order is that of the last calls.
            tensors[path] = get_tensor(values, key).clone()

    def record_input(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        record(taken, path, {**dict(enumerate(args)), **kwargs}, inputs[path])

    def record_output(path: str, module: nn.Module, args: Any, output: Any) -> None:
        record(returned, path, output, outputs[path])

    handles: list[Any] = []
    try:
        for path in inputs:
            hook = partial(record_input, path)
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for path in outputs:
            module = model.get_submodule(path)
            handles.append(module.register_forward_hook(partial(record_output, path)))
        yield taken, returned
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class SpanEvaluation:
    """Fits and costs of spans in one network.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    fitting, inputs : tensor
        Samples to fit on, and to measure costs on.
    labels : tensor or None
        Of the samples in `inputs`; -100 where there is nothing to predict. Without labels, a cost
        is the divergence from the network's class probabilities.
    """

    model: nn.Module
    fitting: Tensor
    inputs: Tensor
    labels: Tensor | None

    def evaluate(self, spans: Sequence[Span]) -> list[SpanResult]:
        """Fit the maps of some spans, and measure what each costs."""
        with torch.no_grad(), evaluation_mode(self.model), without_fast_path():
            return self._measure_costs(self._fit(spans))

    def _folding_layer(self, span: Span) -> str | None:
        """Return the path of the linear layer that a span's map folds into.

        None if the layer's output isn't added to the stream as it is.
        """
        if span.first == 0:
            return None
        before = f"{span.blocks}.{span.first - 1}"
        block = self.model.get_submodule(before)
        start = span.place.call.path
        stream_input = {start: span.place.argument}
        paths = [f"{before}.{path}" for path, _ in block.named_modules() if path]
        example = self.inputs[:1]
        with watch(self.model, stream_input, dict.fromkeys(paths)) as (taken, outputs):
            self.model(example.clone())
        stream = taken[start]
        called = [path.removeprefix(f"{before}.") for path in outputs]
        path = last_linear(block, span.place.channels, called)
        if path is None or outputs[f"{before}.{path}"].numel() != stream.numel():
            return None
        added = outputs[f"{before}.{path}"].reshape(stream.shape)
        # Twice the output must add it to the stream once more.
        layer = block.get_submodule(path)
        handle = layer.register_forward_hook(lambda module, args, output: 2 * output)
        try:
            with watch(self.model, stream_input) as (taken, _):
                self.model(example.clone())
        finally:
            handle.remove()
        error = (taken[start] - stream - added).abs().max()
        rounding = 4 * torch.finfo(stream.dtype).eps * stream.abs().max()
        is_added = error <= STREAM_TOLERANCE * added.abs().max() + rounding
        return f"{before}.{path}" if is_added else None

    def _fit(self, spans: Sequence[Span]) -> list[SpanResult]:
        """Fit the maps of some spans, without costs."""
        layers = {span: self._folding_layer(span) for span in spans}
        fits: dict[Span, dict[str, StreamFit]] = {}
        for span, layer in layers.items():
            fits[span] = {"affine": StreamFit(has_bias=True)}
            if layer is not None:
                fits[span]["fold"] = StreamFit(self.model.get_submodule(layer).bias is not None)
        starts = {span.place.call.path: span.place.argument for span in spans}
        outputs: dict[str, Key] = dict.fromkeys(filter(None, layers.values()))
        outputs |= {span.place.end.path: span.place.result for span in spans}
        for batch in torch.split(self.fitting, BATCH):
            with watch(self.model, starts, outputs) as streams:
                self.model(batch.clone())
            taken, returned = streams
            for span, layer in layers.items():
                x = taken[span.place.call.path]
                y = returned[span.place.end.path]
                fits[span]["affine"].add(x, x, y)
                if layer is not None:
                    fits[span]["fold"].add(returned[layer].reshape(x.shape), x, y)
        results = []
        for span, layer in layers.items():
            maps = {name: fit.fit() for name, fit in fits[span].items()}
            if span.first == 0 and embedding(self.model) is not None:
                maps["fold"] = maps["affine"]
            results.append(SpanResult(span, maps, {}, layer))
        return results

    def _measure_costs(self, results: Sequence[SpanResult]) -> list[SpanResult]:
        """Measure the cost of each map."""
        places = [result.span.place for result in results]
        prefix = SharedPrefix(self.model, places, self.inputs[:1])
        losses: list[dict[str, list[Tensor]]] = [defaultdict(list) for _ in results]
        for start in range(0, len(self.inputs), BATCH):
            batch = self.inputs[start : start + BATCH]
            labels = None if self.labels is None else self.labels[start : start + BATCH]
            original, branches = self._record(prefix, results, batch)
            for result, by_map in zip(results, losses, strict=True):
                for name in ("skip", *result.maps):
                    output = _replaced(prefix, result, name, branches, len(batch))
                    by_map[name].append(_loss_increases(original, output, labels))
        evaluated = []
        for result, by_map in zip(results, losses, strict=True):
            costs = {name: Cost.of(torch.cat(parts)) for name, parts in by_map.items()}
            evaluated.append(replace(result, costs=costs))
        return evaluated

    def _record(
        self, prefix: SharedPrefix, results: Sequence[SpanResult], batch: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the original outputs, and those of the layers that maps fold into."""
        layers = dict.fromkeys(result.layer for result in results if result.layer is not None)
        with watch(self.model, outputs=layers) as (_, branches):
            return validated_outputs(prefix.record(batch), len(batch)), branches

    def outputs(self, result: SpanResult, map_name: str, inputs: Tensor) -> Tensor:
        """Return the network's outputs with a span replaced, without a change of its weights."""
        with torch.no_grad(), evaluation_mode(self.model), without_fast_path():
            prefix = SharedPrefix(self.model, [result.span.place], inputs)
            _, branches = self._record(prefix, [result], inputs)
            return _replaced(prefix, result, map_name, branches, len(inputs))

    def network(self, result: SpanResult, map_name: str) -> nn.Module:
        """Return a copy of the network in which a span is replaced for good.

        Raise if it doesn't compute what the replacement does: for example, because of a norm
        between the layer that the map is folded into and the stream, or a layer that blocks share.
        """
        span = result.span
        if map_name not in ("skip", *result.maps):
            raise RequestError(f"--map {map_name} at {span.place.name} isn't possible")
        example = self.inputs[:2]
        expected = self.outputs(result, map_name, example)
        twin = rebound_copy(self.model).eval()
        if map_name == "fold":
            if result.layer is None:
                untie_head(pretrained_model(twin))
            layer = embedding(twin) if result.layer is None else twin.get_submodule(result.layer)
            _fold(layer, result.maps["fold"])
        fitted = _affine_layer(twin, result, example) if map_name == "affine" else None
        delete_blocks(twin, span, fitted)
        try:
            with torch.no_grad(), evaluation_mode(twin), without_fast_path():
                output = validated_outputs(twin(example.clone()), len(example))
            error = float((output - expected).abs().max() / expected.abs().max())
        except Exception as cause:
            # A network that reads a removed block can raise any error.
            raise RequestError(
                f"the network depends on the blocks of {span.place.name}: {first_line(cause)}"
            ) from cause
        if not error < OUTPUT_TOLERANCE:
            reason = "the network depends on these blocks"
            if map_name == "fold":
                reason = (
                    f"the output of {result.layer or 'the embedding'} doesn't become the stream as "
                    "it is, which folding needs and --map skip does not"
                )
            raise RequestError(
                f"--map {map_name} at {span.place.name}: {reason} (the outputs differ by "
                f"{error:.2g} of the largest one)"
            )
        return twin


def _replaced(
    prefix: SharedPrefix,
    result: SpanResult,
    map_name: str,
    branches: Mapping[str, Tensor],
    samples: int,
) -> Tensor:
    """Return the outputs with a span replaced by x plus a map of the branch, or else of x."""
    fitted = result.maps.get(map_name)
    branch = branches.get(result.layer or "") if map_name == "fold" else None

    def new(x: Tensor) -> Tensor:
        return x if fitted is None else x + fitted(x if branch is None else branch.reshape(x.shape))

    return validated_outputs(prefix.run(result.span.place, new), samples)


def _loss_increases(original: Tensor, output: Tensor, labels: Tensor | None) -> Tensor:
    """Return the increase of each sample's loss (n,), or without labels the divergence."""
    pair = class_logits(original, original), class_logits(output, original)
    change, positions = divergence(*pair) if labels is None else loss_change(*pair, labels)
    return change / positions.clamp(min=1)


@torch.no_grad()
def _fold(layer: nn.Module, fitted: StreamMap) -> None:
    """Make a linear layer return its output plus a map of it, in place."""
    matrix = fitted.weight + torch.eye(len(fitted.weight)).to(fitted.weight)
    weight: Any = layer.weight
    folded = weight.double()
    if isinstance(layer, nn.Embedding):
        weight.copy_(folded @ matrix + fitted.bias)
        return
    weight.copy_(folded @ matrix if _is_transposed(layer) else matrix.T @ folded)
    if layer.bias is not None:
        bias: Any = layer.bias
        bias.copy_(bias.double() @ matrix + fitted.bias)


def _affine_layer(model: nn.Module, result: SpanResult, example: Tensor) -> AffineModule:
    """Return the affine map of the stream that replaces a span."""
    place = result.span.place
    fitted = result.maps["affine"]
    original = model.get_submodule(place.call.path)
    with torch.no_grad(), evaluation_mode(model), without_fast_path():
        recorded = record_calls(CallInterception(model, [place]), example)
        layer = AffineModule.at(place, original, recorded[place.call][0], recorded[place.end][1])
        layer.weight.copy_(fitted.weight + torch.eye(len(fitted.weight)).to(fitted.weight))
        layer.bias.copy_(fitted.bias)
    return layer


def delete_blocks(model: nn.Module, span: Span, fitted: nn.Module | None = None) -> None:
    """Delete a span of blocks in place, or put a layer where they were."""
    blocks: Any = model.get_submodule(span.blocks)
    length = len(blocks)
    first = span.first
    if fitted is not None:
        blocks[first] = fitted
        first += 1
    del blocks[first : span.last + 1]
    for index, block in enumerate(blocks):
        for module in block.modules():
            if isinstance(vars(module).get("layer_idx"), int):
                module.layer_idx = index
    if (pretrained := pretrained_model(model)) is not None:
        cut_config(pretrained.config, length, slice(first, span.last + 1))


def pretrained_model(model: nn.Module) -> Any:
    """Return the transformers model inside a network, or None."""
    candidates = (m for m in model.modules() if hasattr(m, "save_pretrained"))
    return next((m for m in candidates if hasattr(m.config, "num_hidden_layers")), None)


def embedding(model: nn.Module) -> Any:
    """Return the embedding table of the transformers model inside a network, or None."""
    pretrained = pretrained_model(model)
    table = None if pretrained is None else pretrained.get_input_embeddings()
    return table if isinstance(table, nn.Embedding) else None


def has_tied_head(model: nn.Module) -> bool:
    """Return True if the embedding table is also the weight of the head."""
    table = embedding(model)
    head = None
    if table is not None:
        head = pretrained_model(model).get_output_embeddings()
    return head is not None and head.weight is table.weight


def untie_head(pretrained: Any) -> None:
    """Copy the head's weight of a transformers model, so that it is untied, in place."""
    head = pretrained.get_output_embeddings()
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
    pretrained.config.tie_word_embeddings = False


def cut_config(config: Any, length: int, removed: slice) -> None:
    """Remove blocks from a transformers configuration in place: their number and lists of them."""
    if config.num_hidden_layers != length:
        raise RequestError(
            f"the configuration has {config.num_hidden_layers} blocks and the network {length}"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise RequestError("the last blocks read the keys and values of earlier ones")
    indices = range(length)[removed]
    config.num_hidden_layers = length - len(indices)
    for name, values in dict(vars(config)).items():
        is_list = isinstance(values, list | tuple) and len(values) == length
        if is_list and "token" not in name:
            setattr(config, name, [v for index, v in enumerate(values) if index not in indices])
