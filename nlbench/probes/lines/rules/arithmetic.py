"""Rules for affine operations: sums, products with constants, constant masks, layers, averages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nlbench.introspection.operations import known, line_rule, not_affine
from nlbench.introspection.pytree import tree_map

from .rounding import (
    Bound,
    channel_squares,
    largest_bound,
    peak_over,
    root_sum_squares,
    squared_errors,
    unchanged,
)
from .rule import (
    Input,
    NotAffine,
    OutputFunction,
    RecordedCall,
    Rule,
    check_only_first_traced,
    inner_axis,
)

MAX_PEAK_TO_MEAN = 1e3
"""Maximum peak-to-mean ratio of a constant's magnitudes at which one bound per channel is used."""


def term_error(term: Any, bounds: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the error bound for a traced term, or the rounding error of adding a constant."""
    if isinstance(term, Input):
        bound = bounds[term.index]
        return bound if bound.ndim == like.ndim else largest_bound([bound], like.ndim)
    size = torch.as_tensor(term, device=like.device).to(like.dtype).abs() / 2
    return size.reshape((1,) * (like.ndim - size.ndim) + tuple(size.shape))


def _channel_maxima(term: Any, channels: Sequence[int]) -> Any:
    """Reduce a constant to its maximum per channel, if its magnitudes are similar."""
    if not isinstance(term, Tensor) or term.ndim != len(channels) or term.is_meta:
        return term
    positions = list(range(2, term.ndim))
    if not positions or not term.numel():
        return term
    size = term.abs()
    largest = size.amax(positions, keepdim=True)
    mean = size.mean(positions, keepdim=True)
    return largest if bool((largest <= MAX_PEAK_TO_MEAN * mean).all()) else term


@line_rule("add", "sub", "rsub", "subtract")
def sum_of_two(call: RecordedCall) -> Rule:
    alpha = abs(float(call.kwargs.get("alpha", 1)))
    first, second = (_channel_maxima(term, call.shape) for term in call.args[:2])
    if isinstance(first, Input) and first == second:
        # The errors of two equal terms add up.
        return Rule(call.apply, lambda x, bounds, output: bounds[0] * (1 + alpha))

    return _combination(call, (first, 1.0), (second, alpha))


def _combination(call: RecordedCall, *terms: tuple[Any, Any]) -> Rule:
    """Create the rule for a sum of terms that are multiplied by constant factors."""

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        errors = [abs(factor) * term_error(term, bounds, output) for term, factor in terms]
        return root_sum_squares(errors).expand(len(output), *(-1,) * (output.ndim - 1))

    return Rule(call.apply, bound)


@line_rule("mul", "multiply", "div", "divide", "true_divide", caveat="by a constant")
def scaling(call: RecordedCall) -> Rule:
    first, second = call.args[:2]
    if isinstance(first, Input) and isinstance(second, Input):
        raise NotAffine("a product of two values that both depend on the input")
    divides = known(call.name).combines == "quotient"
    if divides and (isinstance(second, Input) or call.kwargs.get("rounding_mode")):
        raise NotAffine("not piecewise affine")
    factor = second if isinstance(first, Input) else first
    size = factor.abs() if isinstance(factor, Tensor) else abs(factor)

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        base = bounds[0] if x[0].ndim == output.ndim else largest_bound(bounds, output.ndim)
        return base / size if divides else base * size

    return Rule(call.apply, bound)


@line_rule("pow", caveat="to the power of 1")
def power(call: RecordedCall) -> Rule:
    if not isinstance(call.args[0], Input) or call.args[1] != 1:
        raise NotAffine("not piecewise affine")
    return Rule(call.apply, unchanged)


@line_rule("lerp", caveat="with a constant weight")
def interpolated(call: RecordedCall) -> Rule:
    first, second, weight = call.args[:3]
    if isinstance(weight, Input):
        raise NotAffine("a product of two values that both depend on the input")
    return _combination(call, (first, 1 - weight), (second, weight))


@line_rule("addcmul", "addcdiv", caveat="with a constant factor or divisor")
def product_added(call: RecordedCall) -> Rule:
    summand, first, second = call.args[:3]
    if isinstance(second, Input) and (isinstance(first, Input) or call.name == "addcdiv"):
        raise NotAffine("a product of two values that both depend on the input")
    value = float(call.kwargs.get("value", 1))
    factor, base = (first, second) if isinstance(second, Input) else (second, first)
    size = factor * value if call.name == "addcmul" else value / factor
    return _combination(call, (summand, 1.0), (base, size))


@line_rule("where", "masked_fill", caveat="with a constant mask")
def choice(call: RecordedCall) -> Rule:
    """Create the rule for selecting between two terms with a constant mask."""
    mask, first, second = call.args[:3]
    if call.name == "masked_fill":
        second, mask, first = call.args[:3]
    if isinstance(mask, Input):
        raise NotAffine("its mask depends on the input")

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        return torch.where(
            mask, _inherited_error(first, bounds, output), _inherited_error(second, bounds, output)
        )

    return Rule(call.apply, bound)


def _inherited_error(term: Any, bounds: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the bound for a copied term, which is 0 for a constant."""
    return term_error(term, bounds, like) if isinstance(term, Input) else like.new_zeros(())


not_affine(
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "sign",
    "sgn", "heaviside", "floor", "ceil", "round", "trunc", "fix", "frac", "floor_divide", "fmod",
    "remainder", "logical_and", "logical_or", "logical_not", "logical_xor", "argmax", "argmin",
    "argsort", "isnan", "isinf", "isfinite", "signbit", "copysign", "bitwise_and", "bitwise_or",
    why="not piecewise affine, as it is discontinuous",
)  # fmt: skip
not_affine(
    "reciprocal", "square", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10",
    "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh",
    "acosh", "atanh", "erf", "erfc", "erfinv", "sinc", "logit", "float_power", "hypot",
    "logaddexp", "xlogy", "special_erf", "special_erfc", "special_entr", "special_log1p",
    "special_expm1", "special_exp2", "special_sinc", "special_xlogy", "special_i0", "polar",
    "lgamma", "digamma", "outer", "cross", "dot", "kron", "tensordot", "chain_matmul",
)  # fmt: skip


MAX_UNFOLDED_BYTES = 4 * 2**20
"""Limit on a convolution's unfolded inputs, to fit in a core's cache (2 to 8 MiB perform alike)."""
MAX_SEPARATE_INPUTS = 8192
"""Maximum number of a layer's inputs with separate errors; above it, groups share the largest."""


def _squares(weight: Tensor) -> tuple[Tensor, float]:
    """Return the squares of the weights divided by a scale, and that scale."""
    size = float(_largest(weight))
    return (weight / size).square_(), size


@line_rule("linear")
def linear(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    weight = call.args[1]
    bias = call.argument(2, "bias")
    inputs = weight.shape[-1]
    group = -(-inputs // MAX_SEPARATE_INPUTS)

    def grouped(squares: Tensor) -> Tensor:
        padded = functional.pad(squares, (0, -inputs % group))
        return padded.reshape(len(padded), -1, group)

    @functools.cache
    def sums_of_squares() -> tuple[Tensor, float]:
        squares, size = _squares(weight.reshape(-1, inputs))
        return grouped(squares).sum(-1) if group > 1 else squares, size

    @functools.cache
    def scaled_offset() -> tuple[Tensor, float]:
        """Return the squares of the bias's errors divided by a scale, and that scale."""
        if bias is None or bias.is_meta or not bias.numel():
            return weight.new_zeros(()), 0.0
        squares, size = _squares(bias / 2)
        return squares, size if bool(squares.any()) else 0.0

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        squares, size = channel_squares(x[0], bounds[0], -1, inputs)
        if group > 1:
            squares = grouped(squares).amax(-1)
        factors, weight_size = sums_of_squares()
        errors = squares @ factors.mT
        size = size * weight_size
        offset, offset_size = scaled_offset()
        if offset_size:
            # Sums of squares, scaled against overflow, take a third of the time of `hypot`.
            own_size = size
            size = size.clamp(min=offset_size)
            errors.mul_((own_size / size).square_())
            errors.addcmul_((offset_size / size).square_(), offset)
        errors = errors.sqrt_().mul_(size)
        return errors.reshape(len(errors), *(1,) * (output.ndim - 2), output.shape[-1])

    return Rule(call.apply, bound)


@line_rule("conv1d", "conv2d", "conv3d")
def convolution(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    weight = call.args[1]
    terms = weight[0].numel()
    # A convolution unfolds its inputs for all points at once. On a CPU they should fit in the
    # cache: processing a few points at a time is up to four times as fast (for 16 channels of
    # 32×32, 0.16 ms per point instead of 0.69).
    unfolded = terms * math.prod(call.shape[2:])
    batch_points = max(1, MAX_UNFOLDED_BYTES // (weight.element_size() * max(1, unfolded)))
    across_samples = _across_samples(call)

    def apply(points: Sequence[Tensor]) -> Tensor:
        x = points[0]
        if across_samples is None and (len(x) <= batch_points or x.device.type != "cpu"):
            return call.apply(points)
        convolve = across_samples or call.apply
        return torch.cat([convolve([batch]) for batch in torch.split(x, batch_points)])

    groups = call.shapes[0][1] // max(1, weight.shape[1])
    on_cpu = weight.device.type == "cpu"
    return Rule(
        apply,
        _convolution_bound(call, groups),
        workspace=0 if on_cpu else unfolded,
        reserve=batch_points * unfolded if on_cpu else 0,
        direct=call.apply,
    )


MAX_POSITIONS_ACROSS_SAMPLES = 64
"""Maximum number of output positions at which a convolution across samples is faster."""


def _across_samples(call: RecordedCall) -> OutputFunction | None:
    """Return a convolution with the samples as another spatial axis, or None where that is slower.

    In float64, a CPU convolves each sample separately, as a matrix product with one column per
    position. With few positions, reading the weights takes most of the time, and one product for
    many samples is faster: 1.1 times with 64 positions, twice with 16, four times with 4.
    """
    weight = call.args[1]
    bias = call.argument(2, "bias")
    if weight.dtype != torch.float64 or weight.device.type != "cpu":
        return None
    axes = weight.ndim - 2
    stride, padding, dilation = (
        call.argument(i, name, default)
        for i, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    groups = call.shapes[0][1] // max(1, weight.shape[1])
    if (
        axes > 2
        or groups > 1
        or isinstance(padding, str)
        or math.prod(call.shape[2:]) > MAX_POSITIONS_ACROSS_SAMPLES
    ):
        return None
    convolve = functional.conv2d if axes == 1 else functional.conv3d
    settings = (
        [1, *per_axis(stride, axes)],
        [0, *per_axis(padding, axes)],
        [1, *per_axis(dilation, axes)],
    )

    def apply(points: Sequence[Tensor]) -> Tensor:
        x = points[0].transpose(0, 1)[None]
        return convolve(x, weight.unsqueeze(2), bias, *settings)[0].transpose(0, 1)

    return apply


@line_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    return Rule(call.apply, _convolution_bound(call, call.argument(6, "groups", 1)))


def per_axis(value: Any, axes: int) -> list[int]:
    """Expand a setting to one value per axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _convolution_bound(call: RecordedCall, groups: int) -> Bound:
    """Return the bound for a convolution: the largest over the sets of taps that meet its input."""
    weight = call.args[1]
    bias = call.argument(2, "bias")
    transposed = "transpose" in call.name
    inputs = weight.shape[0] // groups if transposed else weight.shape[1]

    # Computed with the first bound: values don't need the sums, which may take as much memory as
    # the weights.
    @functools.cache
    def sums_of_squares() -> tuple[Tensor, float, int]:
        """Return sums (groups, sets × outputs, inputs), their scale, and the number of terms."""
        sets = _taps_that_meet_input(call, transposed)
        squares, size = _squares(weight.flatten(2))
        sums = squares @ sets.to(squares).mT
        by_group = sums.reshape(groups, -1, *sums.shape[1:])
        order = (0, 3, 2, 1) if transposed else (0, 3, 1, 2)
        used = (squares.amax((0, 1)) > 0).cpu()
        terms = inputs * int((sets & used).sum(1).max())
        return by_group.permute(order).flatten(1, 2), size, terms

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        factors, weight_size, terms = sums_of_squares()
        squares, size = channel_squares(x[0], bounds[0], 1, terms)
        sums = squares.reshape(-1, groups, inputs).transpose(0, 1) @ factors.mT
        sums = sums.reshape(groups, len(squares), -1, output.shape[1] // groups).amax(2)
        errors = sums.transpose(0, 1).flatten(1).sqrt().mul_(size * weight_size)
        errors = errors.reshape(*errors.shape, *(1,) * (output.ndim - 2))
        if bias is None:
            return errors
        return torch.hypot(errors, bias.abs().reshape(1, -1, *errors.shape[2:]) / 2)

    return bound


def _taps_that_meet_input(call: RecordedCall, transposed: bool = False) -> Tensor:
    """Return the largest sets of taps that meet the input, not padding, at one output position.

    They are rows of bools, of shape (sets, taps). Most layers have a single set, of all taps.
    """
    kernel = call.args[1].shape[2:]
    axes = len(kernel)
    stride = per_axis(call.argument(3, "stride", 1), axes)
    dilation = per_axis(call.argument(7 if transposed else 5, "dilation", 1), axes)
    padding = call.argument(4, "padding", 0)
    if isinstance(padding, str):
        same = padding == "same"
        padding = [d * (k - 1) // 2 * same for k, d in zip(kernel, dilation, strict=True)]
    sizes = (call.shapes[0][2:], call.shape[2:], kernel, stride, per_axis(padding, axes), dilation)
    sets = torch.ones(1, 1, dtype=torch.bool)
    for axis in zip(*sizes, strict=True):
        # A set is a product of sets along each axis, and so are the largest ones.
        sets = (
            sets[:, None, :, None] & _taps_on_axis(*axis, transposed=transposed)[:, None]
        ).flatten(0, 1)
        sets = sets.flatten(1)
    return sets


def _taps_on_axis(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    *,
    transposed: bool = False,
) -> Tensor:
    """Return the largest sets of taps that meet the input along an axis, (sets, taps)."""
    first = -(-padding // stride)
    last_read = first * stride - padding + (kernel - 1) * dilation
    if not transposed and first < outputs and last_read < inputs:
        return torch.ones(1, kernel, dtype=torch.bool)
    positions = torch.arange(outputs)[:, None]
    taps = torch.arange(kernel) * dilation
    if transposed:
        offset = positions + padding - taps
        read = torch.where(offset % stride == 0, offset // stride, -1)
    else:
        read = positions * stride - padding + taps
    meets = (read >= 0) & (read < inputs)
    sets: Tensor = torch.unique(meets, dim=0)
    shared = sets.float() @ sets.float().mT
    inside_another = (shared == shared.diagonal()[:, None]).sum(1) > 1
    return sets[~inside_another]


@line_rule("batch_norm", caveat="with running statistics only")
def batch_norm(call: RecordedCall) -> Rule:
    if any(isinstance(a, Input) for a in call.args[1:]):
        raise NotAffine("its parameters depend on the input")
    weight, bias, mean, var, training = call.args[1:6]
    eps = call.args[7]
    if training or mean is None or var is None:
        raise NotAffine("it uses the statistics of the batch")
    units = (1, -1) + (1,) * (len(call.shape) - 2)
    slope = (var + eps).rsqrt() if weight is None else weight.abs() * (var + eps).rsqrt()
    offset = mean.abs() * slope if bias is None else mean.abs() * slope + bias.abs()
    slope = slope.reshape(units)
    offset = offset.reshape(units)
    return Rule(call.apply, lambda x, bounds, output: torch.hypot(bounds[0] * slope, offset))


@line_rule("matmul", "mm", "bmm", "addmm", "einsum", caveat="with a constant factor")
def contraction(call: RecordedCall) -> Rule:
    """Create the rule for a matrix product with a constant, or for einsum."""
    operands = call.args[1] if call.name == "einsum" else call.args[-2:]
    traced = [a.index for a in operands if isinstance(a, Input)]
    if len(traced) > 1:
        raise NotAffine("a product of two values that both depend on the input")
    if call.name == "addmm":
        return _sum_and_product(call)
    if call.name == "bmm":
        # The constant's leading axis is 1, which bmm, unlike matmul, doesn't broadcast.
        call = replace(call, name="matmul", function=torch.matmul)
    constants = [a for a in operands if isinstance(a, Tensor)]
    size = math.prod(float(_largest(a)) for a in constants)
    squared = [(a / _largest(a)).square() if isinstance(a, Tensor) else Input(0) for a in operands]
    args = (call.args[0], squared) if call.name == "einsum" else tuple(squared)

    @functools.cache
    def terms() -> int:
        """Return the number of products summed for each output element."""
        ones = tree_map(lambda a: torch.ones(a.shape) if isinstance(a, Tensor) else a, call.args)
        points = [torch.ones(shape) for shape in call.shapes]
        return int(replace(call, args=ones).apply(points).max())

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        product_bound = _product_sum_bound(replace(call, args=args).apply, terms(), size)
        return product_bound([x[traced[0]]], [bounds[traced[0]]], output)

    return Rule(call.apply, bound)


def _largest(x: Tensor) -> Tensor:
    """Return the largest magnitude, or 1 if the tensor is empty or zero."""
    if x.is_meta or not x.numel():
        return torch.ones((), dtype=x.dtype)
    size = x.abs().max()
    return torch.where(size > 0, size, 1)


def _product_sum_bound(
    apply: Callable[[Sequence[Tensor]], Tensor], terms: int, size: float
) -> Bound:
    """Return the bound for a sum of products.

    `apply` sums the products of squares; constants were divided by `size` before squaring.
    """

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        squares, input_size = squared_errors(x[0], bounds[0], terms)
        sums = apply([squares]).clamp(min=0).sqrt()
        return sums * (input_size * size).reshape(-1, *(1,) * (sums.ndim - 1))

    return bound


def _sum_and_product(call: RecordedCall) -> Rule:
    """Create the rule for ``addmm``, a matrix product added to a tensor."""
    summand, first, second = call.args[:3]
    alpha, beta = (abs(float(call.kwargs.get(name, 1))) for name in ("alpha", "beta"))
    product = replace(call, name="matmul", function=torch.matmul, args=(first, second), kwargs={})
    product_bound = contraction(product).bound

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        error = beta * term_error(summand, bounds, output)
        if isinstance(first, Input) or isinstance(second, Input):
            error = root_sum_squares([error, alpha * product_bound(x, bounds, output)])
        return error

    return Rule(call.apply, bound)


@line_rule("sum", "mean")
def sum_or_mean(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    axes = call.argument(1, "dim")
    shape = call.shapes[0]
    if axes is None or axes == []:
        axes = list(range(len(shape)))
    axes = [axes] if isinstance(axes, int) else list(axes)
    terms = math.prod(shape[axis] for axis in axes)
    bound = sum_bound(axes, bool(call.argument(2, "keepdim", False)))
    if call.name == "sum":
        return Rule(call.apply, bound)
    return Rule(call.apply, lambda *arguments: bound(*arguments) / max(1, terms))


def sum_bound(axes: list[int], keepdim: bool) -> Bound:
    """Return the bound for sums over the given axes of the first input."""

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        terms = math.prod(x[0].shape[axis] for axis in axes)
        error = torch.hypot(bounds[0].expand_as(x[0]), x[0] * (math.sqrt(terms) / 2))
        return torch.linalg.vector_norm(error, dim=axes, keepdim=keepdim)

    return bound


@line_rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pooling(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    axes = int(call.name[-2])
    kernel = per_axis(call.argument(1, "kernel_size"), axes)
    stride = per_axis(call.argument(2, "stride") or kernel, axes)
    padding = per_axis(call.argument(3, "padding", 0), axes)
    sizes = (call.shapes[0][-axes:], call.shape[-axes:], kernel, stride, padding, [1] * axes)
    met = [int(_taps_on_axis(*axis).sum(1).max()) for axis in zip(*sizes, strict=True)]
    terms = math.prod(met)
    averaged = math.prod(kernel) if call.argument(5, "count_include_pad", True) else terms
    divisor = call.argument(6, "divisor_override") or averaged
    return Rule(call.apply, _average_bound(axes, terms, divisor))


@line_rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pooling(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    axes = int(call.name[-2])
    sizes = zip(call.shapes[0][-axes:], call.shape[-axes:], strict=True)
    terms = math.prod(max(1, n // max(1, m)) for n, m in sizes)
    return Rule(call.apply, _average_bound(axes, terms, terms))


def _average_bound(axes: int, terms: int, divisor: int) -> Bound:
    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        values = x[0]
        error = bounds[0]
        if values.ndim == axes + 1:  # Without a channel axis.
            values = values[:, None]
            error = error[:, None]
        squares, size = channel_squares(values, error, 1, terms)
        errors = squares.sqrt_().mul_(size * (math.sqrt(terms) / abs(divisor)))
        return errors.reshape(*errors.shape, *(1,) * (output.ndim - 2))

    return bound


@line_rule("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
@line_rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def interpolation(call: RecordedCall) -> Rule:
    """Create the rule for interpolation, whose (cubic) weights have a 2-norm of at most 1.3."""
    check_only_first_traced(call)

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        positions = list(range(2, x[0].ndim))
        size = peak_over(x[0], positions)
        error = torch.hypot(bounds[0].amax(positions).expand_as(size), size)
        return 1.3 * error.reshape(*size.shape, *(1,) * len(positions))

    return Rule(call.apply, bound)


@line_rule("cumsum")
def running_sum(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    axis = inner_axis(call, 1)
    return Rule(call.apply, _product_sum_bound(call.apply, call.shape[axis], 1.0))


@line_rule("col2im")
def folding(call: RecordedCall) -> Rule:
    """Create the rule for ``fold``: each position is a sum over the windows that contain it."""
    check_only_first_traced(call)
    return Rule(
        call.apply, _product_sum_bound(call.apply, math.prod(call.argument(2, "kernel_size")), 1.0)
    )


not_affine(
    "native_layer_norm", "layer_norm", "group_norm", "native_group_norm", "instance_norm",
    "rms_norm", "_fused_rms_norm", "cosine_similarity", "cdist", "_cdist_forward", "var",
    "var_mean", "std", "std_mean", "prod", "cumprod", "logsumexp", "logcumsumexp",
    "scaled_dot_product_attention", "multi_head_attention_forward",
    "_native_multi_head_attention", "lstm", "lstm_cell", "gru",
    "gru_cell", "rnn_tanh", "rnn_tanh_cell", "_transformer_encoder_layer_fwd", "_softmax",
    "_log_softmax", "log_softmax", "local_response_norm", "grid_sampler", "grid_sampler_2d",
)  # fmt: skip
