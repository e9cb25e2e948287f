"""Spans of consecutive blocks, replaced by nothing or by an affine map of the stream.

There are three replacements of a span that maps the stream x to y. ``skip`` keeps x. ``affine``
adds an affine map of x. ``fold`` adds a linear map of what the last linear layer of the previous
block adds to the stream, and becomes part of that layer's weight (ReplaceMe, arXiv:2505.02819). The
fits are regressions of y - x with a penalty on the map, so that a large penalty means skipping.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, Undefined, first_line
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.probes.replacement import CallInterception, ReplaceableCall
from nlbench.probes.replacement.interception import first_tensor
from nlbench.probes.replacement.prefix import Replacement, SharedPrefix

from .layers import AffineModule

RIDGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Penalties to choose from, relative to the mean variance of the inputs after position 0."""

ROWS_PER_COEFFICIENT = 16
"""Number of rows per coefficient below which a map may cost more than skipping."""

OUTPUT_TOLERANCE = 1e-4
"""Tolerance for the outputs of a plain network, relative to the largest one."""

RANK_TOLERANCE = 1e-12
"""Eigenvalues below this fraction of the largest one are taken as zero."""

BATCH = 4


@dataclass(frozen=True)
class StreamSums:
    """Sums over rows of regressors u (n, p), targets t (n, k) and outputs y (n, k), in float64."""

    n: int
    u: Tensor
    t: Tensor
    y: Tensor
    uu: Tensor
    ut: Tensor
    tt: Tensor
    yy: Tensor

    @classmethod
    def of(cls, u: Tensor, t: Tensor, y: Tensor) -> StreamSums:
        """Compute the sums of some rows."""
        u, t, y = (rows.double() for rows in (u, t, y))
        squares = t.square().sum(), y.square().sum()
        return cls(len(u), u.sum(0), t.sum(0), y.sum(0), u.T @ u, u.T @ t, *squares)

    def plus(self, other: StreamSums) -> StreamSums:
        """Return the sums of both sets of rows."""
        names = (field.name for field in fields(self))
        return StreamSums(*(getattr(self, name) + getattr(other, name) for name in names))

    def squared_errors(self, weight: Tensor, bias: Tensor) -> float:
        """Return the sum of ‖t - u weight - bias‖²."""
        fitted = (weight * (self.uu @ weight)).sum() - 2 * (weight * self.ut).sum()
        shifted = 2 * (self.u @ weight - self.t) @ bias + self.n * bias.square().sum()
        return max(0.0, float(self.tt + fitted + shifted))

    def variation(self) -> float:
        """Return the sum of squares of y about its mean."""
        return float(self.yy - self.y.square().sum() / self.n)


@dataclass(frozen=True)
class StreamMap:
    """A fitted map from u to y - x, with held-out scores.

    Parameters
    ----------
    weight : tensor of shape (p, k)
    bias : tensor of shape (k,)
    ridge : float
        Chosen penalty, one of `RIDGES`.
    r2, r2_with_first : float
        Fraction of the variance of y that is predicted at held-out samples, without and with the
        first position of each.
    rows : int
        Number of rows, positions of all samples, in the fit.
    """

    weight: Tensor
    bias: Tensor
    ridge: float
    r2: float
    r2_with_first: float
    rows: int

    def __call__(self, u: Tensor) -> Tensor:
        """Return the predicted change of the stream."""
        return u @ self.weight.to(u) + self.bias.to(u)

    @property
    def rows_per_coefficient(self) -> float:
        """Number of rows for each coefficient of an output."""
        return self.rows / (len(self.weight) + bool(self.bias.any()))


class StreamFit:
    """Ridge regression of a span's change of the stream, with the penalty chosen by two folds.

    The first position of each sample is in the fit but not in the penalty's unit or in the choice:
    in language models its norm may be a hundred times that of the others.

    Parameters
    ----------
    has_bias : bool
        Fit a bias, which isn't penalised.

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
        self._has_bias, self._samples = has_bias, 0
        self._parts: dict[tuple[int, bool], StreamSums] = {}

    def add(self, u: Tensor, x: Tensor, y: Tensor) -> None:
        """Add tensors of shape (samples, positions, channels)."""
        change = y.double() - x.double()
        for index in range(len(u)):
            fold = (self._samples + index) % 2
            for is_first, rows in ((True, slice(0, 1)), (False, slice(1, None))):
                part = StreamSums.of(u[index, rows], change[index, rows], y[index, rows])
                key = fold, is_first
                self._parts[key] = self._parts[key].plus(part) if key in self._parts else part
        self._samples += len(u)

    def fit(self) -> StreamMap:
        """Return the map with the penalty that predicts held-out samples best.

        Raises
        ------
        nlbench.Undefined
            If there are fewer than two samples, or fewer than three positions.
        """
        rest = [self._parts.get((fold, False)) for fold in (0, 1)]
        if not all(part is not None and part.n > 1 for part in rest):
            raise Undefined("maps of spans need at least two samples of three positions")
        folds = [self._parts[fold, True].plus(self._parts[fold, False]) for fold in (0, 1)]
        after_first = self._parts[0, False].plus(self._parts[1, False])
        unit = self._covariances(after_first)[0].trace().item() / len(after_first.u)
        errors = {}
        solvers = [_RidgeSolver(*self._covariances(part)) for part in folds]
        for ridge in RIDGES:
            errors[ridge] = [0.0, 0.0]
            for fold, solver in enumerate(solvers):
                solution = self._with_bias(folds[fold], solver.solve(ridge * unit))
                errors[ridge][0] += self._parts[1 - fold, False].squared_errors(*solution)
                errors[ridge][1] += folds[1 - fold].squared_errors(*solution)
        best = min(RIDGES, key=lambda ridge: errors[ridge][0])
        total = folds[0].plus(folds[1])
        weight, bias = self._with_bias(
            total, _RidgeSolver(*self._covariances(total)).solve(best * unit)
        )
        scores = [
            1 - error / part.variation() if part.variation() > 0 else float("nan")
            for error, part in zip(errors[best], (after_first, total), strict=True)
        ]
        return StreamMap(weight, bias, best, scores[0], scores[1], total.n)

    def _covariances(self, sums: StreamSums) -> tuple[Tensor, Tensor]:
        """Return mean products of u with u and t, about the means if there is a bias."""
        uu = sums.uu / sums.n
        ut = sums.ut / sums.n
        if self._has_bias:
            mean = sums.u / sums.n
            uu = uu - torch.outer(mean, mean)
            ut = ut - torch.outer(mean, sums.t / sums.n)
        return uu, ut

    def _with_bias(self, sums: StreamSums, weight: Tensor) -> tuple[Tensor, Tensor]:
        bias = (sums.t - sums.u @ weight) / sums.n
        return weight, bias if self._has_bias else torch.zeros_like(bias)


class _RidgeSolver:
    """Solutions W of (A + ridge) W = B for several values of ridge."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._values, self._vectors = torch.linalg.eigh(a)
        self._products = self._vectors.T @ b

    def solve(self, ridge: float) -> Tensor:
        """Return the solution, of minimum norm if A is singular and `ridge` is 0."""
        values = self._values.clamp(min=0)
        is_zero = values <= RANK_TOLERANCE * values.max()
        scale = torch.where(is_zero & (ridge == 0), 0.0, 1 / (values + ridge))
        solution: Tensor = self._vectors @ (scale[:, None] * self._products)
        return solution


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
        """Return the span at a place.

        Raises
        ------
        nlbench.RequestError
            If its blocks are not consecutive members of a module list that are called once.
        """
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

    def __str__(self) -> str:
        """Format the mean and its standard error."""
        return f"{self.mean:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class SpanResult:
    """Maps of one span, and what each costs.

    A map that can't be made is missing.

    Parameters
    ----------
    maps : mapping of str to StreamMap
        Keyed by ``fold`` and ``affine``.
    costs : mapping of str to Cost
        Keyed by ``skip``, ``fold`` and ``affine``.
    """

    span: Span
    maps: Mapping[str, StreamMap]
    costs: Mapping[str, Cost]

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
    modules = dict(block.named_modules())
    for path in reversed(called):
        weight = modules[path]._parameters.get("weight")
        is_linear = isinstance(modules[path], nn.Linear)
        if weight is None or weight.ndim != 2 or not (is_linear or _is_transposed(modules[path])):
            continue
        if weight.shape[0 if is_linear else 1] == width:
            return path
    return None


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers")


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

    def __init__(
        self, model: nn.Module, fitting: Tensor, inputs: Tensor, labels: Tensor | None
    ) -> None:
        self._model, self._fitting = model, fitting
        self._inputs, self._labels = inputs, labels

    def evaluate(self, spans: Sequence[Span]) -> list[SpanResult]:
        """Fit the maps of some spans, and measure what each costs."""
        with torch.no_grad(), evaluation_mode(self._model), without_fast_path():
            folds = {span: self._folding_layer(span) for span in spans}
            maps = self._fit(spans, folds)
            costs = self._costs(spans, folds, maps)
        return [SpanResult(span, maps[span], costs[span]) for span in spans]

    def _folding_layer(self, span: Span) -> str | None:
        """Return the path of the linear layer that a span's map folds into."""
        if span.first == 0:
            return None
        before = f"{span.blocks}.{span.first - 1}"
        called: list[str] = []

        def note(call: CallId, x: Tensor, compute: Any) -> Any:
            output = compute()
            if call.position is None and call.path.startswith(f"{before}."):
                called.append(call.path.removeprefix(f"{before}."))
            return output

        CallInterception(self._model).run(self._inputs[:1].clone(), note)
        path = last_linear(self._model.get_submodule(before), span.place.channels, called)
        return None if path is None else f"{before}.{path}"

    def _fit(
        self, spans: Sequence[Span], folds: Mapping[Span, str | None]
    ) -> dict[Span, dict[str, StreamMap]]:
        fits: dict[Span, dict[str, StreamFit]] = {}
        for span in spans:
            fits[span] = {"affine": StreamFit(has_bias=True)}
            if (path := folds[span]) is not None:
                has_bias = self._model.get_submodule(path).bias is not None
                fits[span]["fold"] = StreamFit(has_bias)
        starts = {span.place.call for span in spans}
        ends = {span.place.end for span in spans}
        for batch in torch.split(self._fitting, BATCH):
            before: dict[CallId, Tensor] = {}
            after: dict[CallId, Tensor] = {}

            def note(call: CallId, x: Tensor, compute: Any) -> Any:
                if call in starts:
                    before[call] = x.clone()  # noqa: B023 - runs within the iteration
                output = compute()
                if call in ends:
                    after[call] = first_tensor((output,)).clone()  # type: ignore[union-attr]  # noqa: B023
                return output

            with self._watch_outputs(folds) as branches:
                CallInterception(self._model).run(batch.clone(), note)
            for span in spans:
                x = before[span.place.call]
                y = after[span.place.end]
                fits[span]["affine"].add(x, x, y)
                if (path := folds[span]) is not None:
                    fits[span]["fold"].add(branches[path], x, y)
        maps = {}
        for span, of_span in fits.items():
            maps[span] = {name: fit.fit() for name, fit in of_span.items()}
            if span.first == 0 and embedding(self._model) is not None:
                maps[span]["fold"] = maps[span]["affine"]
        return maps

    @contextmanager
    def _watch_outputs(self, folds: Mapping[Span, str | None]) -> Iterator[dict[str, Tensor]]:
        """Record the outputs of the layers that maps fold into."""
        outputs: dict[str, Tensor] = {}
        handles = []
        for path in {path for path in folds.values() if path is not None}:

            def hook(module: nn.Module, args: Any, output: Tensor, path: str = path) -> None:
                outputs[path] = output.clone()

            handles.append(self._model.get_submodule(path).register_forward_hook(hook))
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def _costs(
        self,
        spans: Sequence[Span],
        folds: Mapping[Span, str | None],
        maps: Mapping[Span, Mapping[str, StreamMap]],
    ) -> dict[Span, dict[str, Cost]]:
        losses: dict[tuple[Span, str], list[Tensor]] = {}
        prefix = SharedPrefix(self._model, [span.place for span in spans], self._inputs[:1])
        for start in range(0, len(self._inputs), BATCH):
            batch = self._inputs[start : start + BATCH]
            labels = None if self._labels is None else self._labels[start : start + BATCH]
            with self._watch_outputs(folds) as branches:
                original = validated_outputs(prefix.record(batch), len(batch))
                base = sample_losses(original, labels, original)
                for span in spans:
                    for name in ("skip", *maps[span]):
                        path = folds[span] if name == "fold" else None
                        branch = None if path is None else branches[path]
                        new = replacement(maps[span].get(name), branch)
                        output = validated_outputs(prefix.run(span.place, new), len(batch))
                        added = sample_losses(output, labels, original) - base
                        losses.setdefault((span, name), []).append(added)
        return {
            span: {name: _mean(torch.cat(losses[span, name])) for name in ("skip", *maps[span])}
            for span in spans
        }

    def outputs(self, result: SpanResult, map_name: str, inputs: Tensor) -> Tensor:
        """Return the network's outputs with a span replaced, without a change of its weights."""
        path = self._folding_layer(result.span) if map_name == "fold" else None
        folds = {result.span: path}
        with torch.no_grad(), evaluation_mode(self._model), without_fast_path():
            prefix = SharedPrefix(self._model, [result.span.place], inputs)
            with self._watch_outputs(folds) as branches:
                prefix.record(inputs)
                branch = None if path is None else branches[path]
                new = replacement(result.maps.get(map_name), branch)
                return validated_outputs(prefix.run(result.span.place, new), len(inputs))

    def network(self, result: SpanResult, map_name: str) -> nn.Module:
        """Return a copy of the network in which a span is replaced for good.

        Raises
        ------
        nlbench.RequestError
            If the copy doesn't compute what the replacement does: for example, a norm between the
            layer that the map is folded into and the stream, or a layer that several blocks share.
        """
        span = result.span
        path = self._folding_layer(span) if map_name == "fold" else None
        example = self._inputs[:2]
        expected = self.outputs(result, map_name, example)
        twin = copy.deepcopy(self._model).eval()
        if map_name == "fold":
            if path is None:
                untie_head(pretrained_model(twin))
            _fold(twin.get_submodule(path) if path else embedding(twin), result.maps["fold"])
        delete_blocks(twin, span, result.maps["affine"] if map_name == "affine" else None)
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
                layer = path or "the embedding"
                reason = (
                    f"the output of {layer} isn't added to the stream as it is, which folding "
                    "needs and --map skip does not"
                )
            raise RequestError(
                f"--map {map_name} at {span.place.name}: {reason} (the outputs differ by "
                f"{error:.2g} of the largest one)"
            )
        return twin


def replacement(fitted: StreamMap | None, branch: Tensor | None) -> Replacement:
    """Return the function that replaces a span: x plus a map of the branch, or else of x."""
    if fitted is None:
        return lambda x: x
    return lambda x: x + fitted(x if branch is None else branch)


def sample_losses(logits: Tensor, labels: Tensor | None, original: Tensor) -> Tensor:
    """Return the loss of each sample (n,), or without labels the divergence from the original.

    Samples are evaluated one at a time, since vocabularies can be large.
    """
    losses = []
    for index, sample in enumerate(logits):
        rows = sample.reshape(-1, sample.shape[-1]).double()
        if labels is None:
            p = original[index].reshape(rows.shape).double().log_softmax(-1)
            losses.append((p.exp() * (p - rows.log_softmax(-1))).sum(-1).mean())
        else:
            targets = labels[index].flatten()
            summed = nn.functional.cross_entropy(rows, targets, reduction="sum")
            losses.append(summed / (targets != -100).sum().clamp(min=1))
    return torch.stack(losses)


def _mean(values: Tensor) -> Cost:
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return Cost(float(values.mean()), error)


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


def delete_blocks(model: nn.Module, span: Span, fitted: StreamMap | None = None) -> None:
    """Delete a span of blocks in place, or put an affine map of the stream where they were."""
    blocks: Any = model.get_submodule(span.blocks)
    length = len(blocks)
    first = span.first
    if fitted is not None:
        width = len(fitted.weight)
        layer = AffineModule(blocks[first], width, width, -1)
        layer.to(next(blocks[first].parameters()))
        with torch.no_grad():
            layer.weight.copy_(fitted.weight + torch.eye(width).to(fitted.weight))
            layer.bias.copy_(fitted.bias)
        blocks[first] = layer
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
    """Give the head of a transformers model a weight of its own, in place."""
    head = pretrained.get_output_embeddings()
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
    pretrained.config.tie_word_embeddings = False


def cut_config(config: Any, length: int, removed: slice) -> None:
    """Remove blocks from a transformers configuration, in place: their number, and lists of them.

    Raises
    ------
    nlbench.RequestError
        If blocks share keys and values, or the configuration counts other blocks.
    """
    if config.num_hidden_layers != length:
        raise RequestError(
            f"the configuration has {config.num_hidden_layers} blocks and the network {length}"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise RequestError("the last blocks read the keys and values of earlier ones")
    lists = {
        name: [value for index, value in enumerate(values) if index not in range(length)[removed]]
        for name, values in vars(config).items()
        if isinstance(values, list | tuple) and len(values) == length and "token" not in name
    }
    config.num_hidden_layers = length - len(range(length)[removed])
    for name, values in lists.items():
        setattr(config, name, values)
