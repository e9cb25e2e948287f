"""Which PyTorch functions are activations, and which work element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_MODULES",
    "AFFINE",
    "BENT",
    "FUSED",
    "NAMED_MODULES",
    "PLUMBING",
    "SUMS",
    "activation_kind",
    "operation_name",
]


# Name of a function, without a trailing underscore, to the kind of activation.
ACTIVATIONS = {
    "_threshold": "threshold",
    "celu": "celu",
    "elu": "elu",
    "gelu": "gelu",
    "glu": "glu",
    "hardshrink": "hardshrink",
    "hardsigmoid": "hardsigmoid",
    "hardswish": "hardswish",
    "hardtanh": "hardtanh",
    "leaky_relu": "leaky_relu",
    "log_sigmoid": "logsigmoid",
    "logsigmoid": "logsigmoid",
    "mish": "mish",
    "prelu": "prelu",
    "relu": "relu",
    "relu6": "relu6",
    "rrelu": "rrelu",
    "selu": "selu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "sin": "sin",
    "softmax": "softmax",
    "softplus": "softplus",
    "softshrink": "softshrink",
    "softsign": "softsign",
    "special_expit": "sigmoid",
    "special_softmax": "softmax",
    "tanh": "tanh",
    "tanhshrink": "tanhshrink",
    "threshold": "threshold",
}
# Modules that are one element-wise activation and nothing else.
ACTIVATION_MODULES: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.RReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
# Modules whose site bears the module's own name.
NAMED_MODULES = (*ACTIVATION_MODULES, nn.GLU, nn.Softmax)
# Functions that compute activations inside one kernel.
FUSED = {
    "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh",
    "rnn_tanh_cell",
}  # fmt: skip

# Operations on numbers one by one that change no value.
PLUMBING = {
    "alpha_dropout", "bfloat16", "clone", "contiguous", "detach", "double", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "float", "half",
    "positive", "requires_grad", "to", "type", "type_as",
}  # fmt: skip
# Affine as long as at most one of the operands is data.
AFFINE = {
    "add", "addcmul", "div", "divide", "lerp", "masked_fill", "mul", "multiply", "neg", "negative",
    "rsub", "sub", "subtract", "true_divide", "where",
}  # fmt: skip
# Affine also where both operands are data.
SUMS = {"add", "rsub", "sub", "subtract"}
# Element by element, and not affine.
BENT = {
    "abs", "absolute", "acos", "acosh", "addcdiv", "and", "arccos", "arcsin", "arcsinh",
    "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "cos", "cosh",
    "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "float_power", "floor", "fmax",
    "fmin", "fmod", "frac", "ge", "greater", "greater_equal", "gt", "heaviside", "hypot", "invert",
    "le", "less", "less_equal", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logit", "lt", "max", "maximum", "min", "minimum",
    "nan_to_num", "ne", "or", "pow", "rdiv", "reciprocal", "remainder", "round", "rpow", "rsqrt",
    "rtruediv", "sgn", "sign", "sin", "sinc", "sinh", "special_entr", "special_erf", "special_erfc",
    "special_exp2", "special_expm1", "special_log1p", "special_sinc", "sqrt", "square", "tan",
    "trunc", "xlogy",
} | (ACTIVATIONS.keys() - {"glu", "softmax", "special_softmax"})  # fmt: skip


def operation_name(func: Callable[..., Any]) -> str:
    """Name an operation whichever way it is called: ``mul`` for ``*``, ``*=`` and ``mul_``.

    What reads a property is named after it.

    Examples
    --------
    >>> import torch
    >>> operation_name(torch.Tensor.mul_), operation_name(torch.Tensor.__rsub__)
    ('mul', 'rsub')
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name.startswith("__"):
        return str(name.strip("_"))
    return str(name.removesuffix("_"))


def activation_kind(name: str) -> str | None:
    """Kind of activation that a function of that name is; None if it is none.

    Examples
    --------
    >>> activation_kind("sigmoid_"), activation_kind("linear")
    ('sigmoid', None)
    """
    return ACTIVATIONS.get(name) or ACTIVATIONS.get(name.removesuffix("_"))
