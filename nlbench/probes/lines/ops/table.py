"""Which operations are affine or piecewise affine: one rule each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from . import affine
from . import kinks as bends
from .rule import Call, Input, Rule, carried, kept, measured

__all__ = ["has_rule", "ignores_values", "reads_values", "rule_for"]


Maker = Callable[[Call], Rule]


def ignores_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call takes nothing but shape and kind from its traced tensors.

    `args` and `kwargs` have `Input` in place of traced tensors.
    """
    if name in _MAKES_CONSTANTS:
        return True
    return name in _FOLLOWS_SHAPE and not isinstance(args[0], Input)


def reads_values(name: str) -> bool:
    """Tell whether an operation hands a tensor's values to Python."""
    return name in _READS_VALUES


def has_rule(name: str) -> bool:
    """Tell whether an operation of this name may be affine or piecewise affine."""
    return name in _RULES


def rule_for(call: Call) -> Rule:
    """Give the rule of a call to an operation that has one.

    Raises
    ------
    NotAffine
        If the operation bends smoothly, jumps, or multiplies two traced values.
    """
    return _RULES[call.name](call)


# The last two precede a copy to NumPy or to a list.
_READS_VALUES = frozenset(
    "_local_scalar_dense item is_nonzero equal allclose nonzero resolve_conj resolve_neg".split()  # noqa: SIM905
)
_MAKES_CONSTANTS = frozenset(
    [f"{value}_like" for value in ("zeros", "ones", "full", "empty")]
    + [f"new_{value}" for value in ("zeros", "ones", "full", "empty", "tensor")]
)
_FOLLOWS_SHAPE = frozenset(("expand_as", "view_as", "reshape_as", "type_as"))


def _of_axes(*names: str) -> list[str]:
    return [f"{name}{axes}d" for name in names for axes in (1, 2, 3)]


def _named(names: str | Iterable[str], maker: Maker) -> dict[str, Maker]:
    return dict.fromkeys(names.split() if isinstance(names, str) else names, maker)


_RULES: Mapping[str, Maker] = {
    **_named("neg clone contiguous detach alias lift_fresh to _to_copy", affine.affine(kept)),
    **_named("view reshape _unsafe_view view_as reshape_as", affine.view),
    **_named("expand expand_as", affine.expand),
    **_named("flatten unflatten squeeze unsqueeze permute transpose mT", affine.rearrangement),
    **_named("swapaxes swapdims movedim select slice narrow index", affine.rearrangement),
    **_named("index_select split split_with_sizes chunk tensor_split unbind", affine.rearrangement),
    **_named("roll flip", affine.rearrangement),
    **_named("repeat pixel_shuffle pixel_unshuffle channel_shuffle mean", affine.affine(carried)),
    **_named(_of_axes("avg_pool", "adaptive_avg_pool", "upsample_nearest"), affine.affine(carried)),
    **_named("sum upsample_linear1d", affine.affine(measured)),
    **_named("pad constant_pad_nd", affine.padding),
    **_named("upsample_bilinear2d upsample_bicubic2d", affine.affine(measured)),
    **_named(_of_axes("conv_transpose"), affine.affine(measured)),
    **_named(["linear", *_of_axes("conv")], affine.convolution),
    **_named("matmul mm bmm addmm einsum", affine.contraction),
    **_named("add sub rsub subtract", affine.sum_of_two),
    **_named("mul multiply div divide true_divide", affine.scaling),
    **_named("cat concat concatenate stack", affine.concatenation),
    **_named("dropout feature_dropout alpha_dropout feature_alpha_dropout", affine.dropout),
    **_named("batch_norm", affine.batch_norm),
    **_named("relu", bends.relu),
    **_named("abs absolute", partial(bends.kinked, (0.0,))),
    **_named("leaky_relu", bends.leaky_relu),
    **_named("rrelu", bends.rrelu),
    **_named("prelu", bends.prelu),
    **_named("hardtanh", bends.hardtanh),
    **_named("clamp clip clamp_min", bends.clamp),
    **_named("clamp_max", bends.clamp_max),
    **_named("threshold", bends.threshold),
    **_named("hardsigmoid", bends.hardsigmoid),
    **_named("softshrink", bends.softshrink),
    **_named("maximum minimum max min", bends.larger_of_two),
    **_named(_of_axes("max_pool", "adaptive_max_pool"), bends.max_pool),
}
