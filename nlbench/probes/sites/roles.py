"""What a call is there for: which sigmoids are gates, and what belongs to attention.

A gate's output multiplies another tensor and does nothing else. A call inside attention works on
products of two tensors that both come from the input, and its output goes on into a softmax or
another such product. A soft cap is c tanh(x / c), which leaves all but the largest logits as
they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.probes.axes import tensors_in
from nlbench.probes.ops import known, operation_name
from nlbench.probes.site_names import acts_of

__all__ = ["GATE_KINDS", "Fate", "Gate", "Gates", "Logits"]


GATE_KINDS = {"sigmoid", "hardsigmoid"}

# Operations that leave what a tensor is used for open, beside those that copy or scale it.
_PARTS = {"chunk", "interpolate", "split", "tensor_split"}
_PRODUCTS = {"mul", "multiply"}


def _arranges(name: str) -> bool:
    found = known(name)
    return name in _PARTS or (found is not None and found.arranges not in ("", "reduces"))


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

    def used(self, func: Any, operands: Sequence[Tensor], output: object) -> list[Tensor]:
        """Note an operation on it; return what stands for the gate from now on."""
        name, acts = operation_name(func), acts_of(func)
        others = [tensor for tensor in operands if not self._stands_for(tensor)]
        outputs = list(tensors_in((output,)))
        if not outputs:
            return []
        is_scaled = acts in ("affine", "sums") and not others and len(operands) == 1
        if _arranges(name) or acts == "keeps" or is_scaled:
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
            standing = gate.used(func, operands, output)
            for tensor in outputs:
                if any(tensor is other for other in standing):
                    self._of[tensor] = gate
                else:
                    self._of.pop(tensor, None)

    def _among(self, tensors: Sequence[Tensor]) -> Iterator[Gate]:
        for tensor in tensors:
            if (gate := self._of.get(tensor)) is not None:
                yield gate


class Fate:
    """What becomes of the output of a call on logits.

    Parameters
    ----------
    output : tensor
    is_product : bool
        Whether its input comes from a product of two tensors.
    divided_by : float or None
        What its input has been divided by, if it is a tanh.
    """

    def __init__(self, output: Tensor, is_product: bool, divided_by: float | None) -> None:
        self._live = [weakref.ref(output)]
        self._is_product, self._divided_by = is_product, divided_by
        self.role = ""

    def goes_on(self, outputs: Sequence[Tensor]) -> None:
        """Follow it into what is made of it."""
        self._live += [weakref.ref(tensor) for tensor in outputs]

    def multiplied(self, factor: float | None) -> None:
        """Note that it is multiplied by a number."""
        cap = self._divided_by
        if cap is not None and factor is not None and abs(factor - cap) <= 1e-6 * abs(cap):
            self.role = self.role or "softcap"

    def enters_attention(self) -> None:
        """Note that it goes into a softmax or a product of two tensors."""
        if self._is_product:
            self.role = "attention"

    @property
    def is_settled(self) -> bool:
        """Whether nothing that can still happen changes its role."""
        return self.role == "attention" or all(reference() is None for reference in self._live)


class Logits:
    """Follows products of two tensors, and what is computed of them number by number."""

    def __init__(self) -> None:
        self._products: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._divided: MutableMapping[Tensor, float] = WeakTensorKeyDictionary()
        self._fates: MutableMapping[Tensor, Fate] = WeakTensorKeyDictionary()

    def begin(self, kind: str, given: Tensor, output: Tensor) -> Fate | None:
        """Follow the output of a call from here on, if it may have a role of this sort."""
        is_product = given in self._products and given.ndim > 2
        divided_by = self._divided.get(given) if kind == "tanh" else None
        if not is_product and divided_by is None:
            return None
        fate = self._fates[output] = Fate(output, is_product, divided_by)
        return fate

    def follow(
        self,
        func: Any,
        args: Sequence[Any],
        operands: Sequence[Tensor],
        output: object,
    ) -> None:
        """Note an operation on tensors that come from the model's input, among its arguments."""
        name = operation_name(func)
        is_followed = self._products or self._divided or self._fates
        if not operands or not (is_followed or name in _INNER or name in _FACTORS):
            return
        outputs = list(tensors_in((output,)))
        if not outputs:
            return
        are_products = any(tensor in self._products for tensor in operands)
        fates = [fate for t in operands if (fate := self._fates.get(t)) is not None]
        if name == "softmax" or (name in _INNER and len(operands) > 1):
            for fate in fates:
                fate.enters_attention()
            # What the weights of attention are multiplied with is no logit.
            if are_products == (name == "softmax"):
                self._products.update(dict.fromkeys(outputs))
            return
        if not _arranges(name) and not acts_of(func):
            return
        if are_products:
            self._products.update(dict.fromkeys(outputs))
        factor = _factor(name, args)
        if factor:
            self._divided[outputs[0]] = 1 / factor
        for fate in fates:
            fate.multiplied(factor)
            fate.goes_on(outputs)
            self._fates.update(dict.fromkeys(outputs, fate))


_FACTORS = {*_PRODUCTS, "div", "divide", "true_divide", "truediv"}
_INNER = {"matmul", "rmatmul", "bmm", "baddbmm", "einsum"}


def _factor(name: str, args: Sequence[Any]) -> float | None:
    """What number a tensor is multiplied by; None in any other operation."""
    if len(args) < 2 or name not in _FACTORS:
        return None
    numbers = [float(value) for value in args[:2] if isinstance(value, int | float)]
    if len(numbers) != 1 or not numbers[0]:
        return None
    return numbers[0] if name in _PRODUCTS else 1 / numbers[0]
