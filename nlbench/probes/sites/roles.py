"""Modules that are one activation written out in several operations.

Such a module has no children, and at most parameters of one number a channel. It calls
nothing but operations on its input's numbers one by one, at least one of them not affine,
and its output has its input's shape: ``x * torch.sigmoid(1.702 * x)`` in a module of its own
is one activation, named after the module.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from nlbench.probes.ops import (
    AFFINE,
    BENT,
    NAMED_MODULES,
    PLUMBING,
    SUMS,
    activation_kind,
    operation_name,
)

from .axis_tracking import Layouts, tensors_in
from .calls import Begun, Call

__all__ = ["Handwritten", "Writing"]


_ELEMENTWISE = PLUMBING | AFFINE | BENT
# What only asks how a tensor is made.
_QUESTIONS = {
    "device", "dim", "dtype", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_cpu", "is_cuda", "is_floating_point", "is_meta", "is_mps", "layout", "len",
    "nelement", "ndim", "ndimension", "numel", "shape", "size", "stride",
}  # fmt: skip


class Writing:
    """One call of a module that may be a handwritten activation, while it runs.

    Parameters
    ----------
    module : torch.nn.Module
    given : tensor
        Its input.
    begin : callable
        Takes what is kept of the input, before the first operation can overwrite it.
    """

    def __init__(self, module: nn.Module, given: Tensor, begin: Callable[[], Begun]) -> None:
        self.module, self.given = module, given
        self.calls: list[Call] = []
        self.begun: Begun | None = None
        self.possible = True
        self._shape = given.shape
        self._begin = begin
        # The input and what was made of it.
        self._own = [weakref.ref(given)]
        # What it has called: operations that are not affine, and how many that are.
        self._bent: list[str] = []
        self._affine = 0

    def before(self, func: Any, sources: Sequence[Tensor], layouts: Layouts) -> bool:
        """Get ready for an operation; say whether it works on data that came in."""
        sampled = [source for source in sources if layouts.is_sampled(source)]
        if not self.possible or not sampled or operation_name(func) in _QUESTIONS:
            return False
        # Data that came in another way, such as an attribute, is a second input.
        is_function_of_input = all(map(self._is_own, sampled))
        if operation_name(func) not in _ELEMENTWISE or not is_function_of_input:
            self.possible = False
        elif self.begun is None:
            self.begun = self._begin()
        return True

    def after(self, func: Any, sampled: int, output: object) -> None:
        """Note an operation on `sampled` tensors that came in."""
        outputs = list(tensors_in((output,)))
        if not outputs:
            return
        if not isinstance(output, Tensor) or output.shape != self._shape:
            self.possible = False
        self._own += [weakref.ref(tensor) for tensor in outputs]
        name = operation_name(func)
        if name in BENT or (name not in SUMS and sampled > 1):
            self._bent.append(name)
        else:
            self._affine += 1

    def _is_own(self, tensor: Tensor) -> bool:
        return any(reference() is tensor for reference in self._own)

    @property
    def kind(self) -> str:
        """The one activation function that the module calls, else its class, in lower case."""
        function = activation_kind(self._bent[0]) if len(self._bent) == 1 else None
        return function or type(self.module).__name__.lower()

    @property
    def only_call(self) -> Call | None:
        """The one call of an activation function, if the module does nothing else."""
        return (
            self.calls[0] if (len(self._bent), self._affine, len(self.calls)) == (1, 0, 1) else None
        )

    def is_activation(self, output: object) -> bool:
        """Whether the module, which has given `output`, is one activation."""
        same = isinstance(output, Tensor) and output.shape == self._shape
        return self.possible and same and bool(self._bent) and self.begun is not None

    def is_decided(self, output: object) -> bool:
        """Whether that holds for other calls too.

        Not where the call ended in an error, without an output, nor where the module did
        nothing to data that came in, as far as was seen.
        """
        return not self.possible or (self.begun is not None and output is not None)


class Handwritten:
    """Knows which modules of a model may be one activation, and which turned out not to be.

    Parameters
    ----------
    model : torch.nn.Module
        Itself never one: it has no name that a site could bear.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._verdicts: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def input_of(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Give the input of a call that may be a handwritten activation's, else None."""
        if module not in self._verdicts:
            self._verdicts[module] = module is not self._model and _may_be(module)
        given = list(itertools.chain(args, kwargs.values()))
        if not self._verdicts[module] or len(given) != 1 or not isinstance(given[0], Tensor):
            return None
        return given[0]

    def remember(self, module: nn.Module, is_activation: bool) -> None:
        """Note what a call came to; a module that was none is not tried again."""
        self._verdicts[module] = is_activation


def _may_be(module: nn.Module) -> bool:
    if any(True for _ in module.children()) or isinstance(module, nn.Dropout | nn.Identity):
        return False
    # PyTorch's own activation modules are known, and the rest of its modules are none.
    if type(module) in NAMED_MODULES or type(module).__module__.startswith("torch.nn."):
        return False
    return all(_is_per_channel(parameter) for parameter in module.parameters())


def _is_per_channel(parameter: Tensor) -> bool:
    return parameter.numel() == max(parameter.shape, default=1)
