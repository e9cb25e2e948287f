"""Which sigmoids are gates: their output multiplies another tensor and does nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.probes.axes import EXPANSIONS, MOVES, RESHAPES, tensors_in
from nlbench.probes.ops import AFFINE, PLUMBING, operation_name

__all__ = ["GATE_KINDS", "Gate", "Gates"]


GATE_KINDS = {"sigmoid", "hardsigmoid"}

# Operations that leave what a tensor is used for open: they only arrange, copy or scale it.
_ARRANGING = {
    *(operation for operation in MOVES if operation.islower() and operation[0] != "_"),
    *RESHAPES,
    *EXPANSIONS,
    *PLUMBING,
    "chunk", "getitem", "interpolate", "split", "tensor_split", "T", "mT",
}  # fmt: skip
_PRODUCTS = {"mul", "multiply"}


class Gate:
    """What became of a sigmoid's output so far.

    Parameters
    ----------
    given, output : tensor
        The sigmoid's.
    """

    def __init__(self, given: Tensor, output: Tensor) -> None:
        self._given = weakref.ref(given)
        self._live = [weakref.ref(output)]
        self._multiplies = False
        self._refuted = False

    def used(self, name: str, operands: Sequence[Tensor], output: object) -> list[Tensor]:
        """Note an operation on it; return what stands for the gate from now on."""
        others = [tensor for tensor in operands if not self._stands_for(tensor)]
        outputs = list(tensors_in((output,)))
        if not outputs:
            return []
        if name in _ARRANGING or (name in AFFINE and not others and len(operands) == 1):
            self._live += [weakref.ref(tensor) for tensor in outputs]
            return outputs
        if name in _PRODUCTS and others and all(tensor is not self._given() for tensor in others):
            self._multiplies = True
            # In place the product has taken the gate's own tensor.
            self._live = [r for r in self._live if all(r() is not tensor for tensor in outputs)]
        else:
            self._refuted = True
        return []

    def _stands_for(self, tensor: Tensor) -> bool:
        return any(reference() is tensor for reference in self._live)

    @property
    def is_settled(self) -> bool:
        """Whether nothing that can still happen changes the verdict."""
        return self._refuted or all(reference() is None for reference in self._live)

    @property
    def is_gate(self) -> bool:
        """Whether it multiplied another tensor than its own input, and nothing else."""
        return self._multiplies and not self._refuted


class Gates:
    """Follows the outputs of sigmoids from one operation to the next."""

    def __init__(self) -> None:
        self._of: MutableMapping[Tensor, Gate] = WeakTensorKeyDictionary()

    def begin(self, given: Tensor, output: Tensor) -> Gate:
        """Follow a sigmoid's output from here on."""
        gate = self._of[output] = Gate(given, output)
        return gate

    def follow(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: object,
        is_constant: Callable[[Tensor], bool],
    ) -> None:
        """Note an operation, whatever it is on; to multiply by a constant is to scale."""
        if not self._of:
            return
        operands = [t for t in tensors_in((*args, *kwargs.values())) if not is_constant(t)]
        outputs = list(tensors_in((output,)))
        for gate in {id(gate): gate for gate in self._among(operands)}.values():
            standing = gate.used(operation_name(func), operands, output)
            for tensor in outputs:
                if any(tensor is other for other in standing):
                    self._of[tensor] = gate
                else:
                    self._of.pop(tensor, None)

    def _among(self, tensors: Sequence[Tensor]) -> Iterator[Gate]:
        for tensor in tensors:
            if (gate := self._of.get(tensor)) is not None:
                yield gate
