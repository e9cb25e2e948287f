"""Facts about PyTorch's own operations, and its activations.

See `nlbench.introspection.operations.registry.FACTS` for the meaning of each fact.
"""

from __future__ import annotations

from torch import nn

from .registry import activation, add_dimensions, fact

_MODULES = [value for value in vars(nn).values() if isinstance(value, type)]

activation("glu", modules=(nn.GLU,))
activation("softmax", "softmax", "special_softmax", modules=(nn.Softmax,))
# Activations that act elementwise, each with the module of its name.
_OTHER_NAMES = {
    "logsigmoid": ("log_sigmoid",),
    "sigmoid": ("special_expit",),
    "threshold": ("_threshold",),
}
for _kind in (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "logsigmoid", "mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "sin",
    "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold",
):  # fmt: skip
    _names = (_kind, *_OTHER_NAMES.get(_kind, ()))
    _modules = [m for m in _MODULES if m.__name__.lower() == _kind.replace("_", "")]
    activation(_kind, *_names, modules=_modules, gates=_kind in ("sigmoid", "hardsigmoid"))
    fact("acts", "bends", *_names)

fact(
    "acts", "keeps",
    "alpha_dropout", "bfloat16", "clone", "contiguous", "detach", "double", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "float", "half",
    "positive", "requires_grad", "to", "type", "type_as",
)  # fmt: skip

fact(
    "acts", "affine",
    "addcmul", "div", "divide", "lerp", "masked_fill", "mul", "multiply", "neg", "negative",
    "true_divide", "where",
)  # fmt: skip

fact("acts", "sums", "add", "rsub", "sub", "subtract")

fact(
    "acts", "bends",
    "abs", "absolute", "acos", "acosh", "addcdiv", "and", "arccos", "arcsin", "arcsinh",
    "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "cos", "cosh",
    "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "float_power", "floor", "fmax",
    "fmin", "fmod", "frac", "ge", "greater", "greater_equal", "gt", "heaviside", "hypot", "invert",
    "le", "less", "less_equal", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logit", "lt", "max", "maximum", "min", "minimum",
    "nan_to_num", "ne", "or", "pow", "rdiv", "reciprocal", "remainder", "round", "rpow", "rsqrt",
    "rtruediv", "sgn", "sign", "sinc", "sinh", "special_entr", "special_erf", "special_erfc",
    "special_exp2", "special_expm1", "special_log1p", "special_sinc", "sqrt", "square", "tan",
    "trunc", "xlogy",
)  # fmt: skip

fact("arranges", "splits", "chunk", "split", "tensor_split")
fact("arranges", "resizes", "interpolate")

fact(
    "channels", "second",
    *add_dimensions("conv", "conv_transpose", "max_pool", "avg_pool", "lp_pool"),
    *add_dimensions("adaptive_avg_pool", "adaptive_max_pool"),
    "batch_norm", "group_norm", "instance_norm",
)  # fmt: skip
fact(
    "channels", "last",
    "bilinear", "embedding", "gru", "linear", "lstm", "multi_head_attention_forward", "rnn_relu",
    "rnn_tanh",
)  # fmt: skip
fact("channels", "normalized", "layer_norm")
fact("channels", "product", "matmul", "rmatmul")
fact("channels", "mixed", "baddbmm", "bmm", "einsum", "scaled_dot_product_attention")

fact("combines", "product", "imul", "mul", "multiply", "rmul")
fact(
    "combines", "quotient", "div", "divide", "itruediv", "rtruediv", "true_divide", "truediv"
)  # fmt: skip
fact("combines", "contraction", "addmm", "baddbmm", "bmm", "einsum", "matmul", "mm", "rmatmul")
fact("combines", "layer", "embedding", "linear", *add_dimensions("conv"))
fact("combines", "joins", "cat", "concat", "concatenate", "stack")

fact(
    "hides", "activations",
    "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh",
    "rnn_tanh_cell",
)  # fmt: skip
fact("hides", "softmax", "multi_head_attention_forward", "scaled_dot_product_attention")

fact("reduces", "extreme", "amax", "amin", "max", "min")
fact(
    "reduces", "statistic",
    "all", "any", "linalg_norm", "linalg_vector_norm", "logsumexp", "mean", "median", "nanmean",
    "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean", "vector_norm",
)  # fmt: skip

fact(
    "takes", "nothing",
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros",
)  # fmt: skip
fact(
    "takes", "metadata",
    "device", "dim", "dtype", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_cpu", "is_cuda", "is_floating_point", "is_meta", "is_mps", "layout", "len", "nelement",
    "ndim", "ndimension", "numel", "shape", "size", "stride",
)  # fmt: skip
fact(
    "takes", "shape",
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_tensor", "new_zeros", "ones_like", "zeros_like",
)  # fmt: skip
fact("takes", "noise", "rand_like", "randint_like", "randn_like")
fact("takes", "second shape", "expand_as", "reshape_as", "type_as", "view_as")
fact("takes", "truth", "allclose", "equal", "is_nonzero")
# Python's special methods have entries under their full names: ``float`` is another operation.
fact(
    "takes", "number",
    "__complex__", "__float__", "__index__", "__int__", "_local_scalar_dense", "item",
)  # fmt: skip
# PyTorch dispatches the last two before it copies a tensor to NumPy or to a list.
fact("takes", "values", "nonzero", "resolve_conj", "resolve_neg")
fact(
    "takes", "memory",
    "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "_typed_storage", "data_ptr",
    "numpy", "share_memory", "storage", "tolist", "untyped_storage",
)  # fmt: skip

fact("truth", "comparison", "eq", "ge", "gt", "le", "lt", "ne")
fact(
    "truth", "test",
    "all", "any", "isfinite", "isinf", "isnan", "logical_and", "logical_not", "logical_or",
)  # fmt: skip
