"""What a call is there for, and what bends without being a call, by what becomes of the tensors.

A gate's output multiplies another tensor and does nothing else. A call inside attention works on
products of two tensors that both come from the input, and its output goes on into a softmax or
another such product. A soft cap is c tanh(x / c), which leaves all but the largest logits as
they are.

An activation that is written out inside a larger module, ``h * sigmoid(h)`` or
``h.clamp(min=0)``, has no call of its own to be caught: at most one of its operations is a site.
What is noticed is an operation on numbers one by one that is not affine, or a product of two
tensors that are made of one, number by number, where its result goes on at full size: that only
an average is taken of it, or that it scales something larger, makes it a part of a normalisation
or a gate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.introspection.operations import FunctionCall, Operation, tensors_in

__all__ = ["GATE_KINDS", "Fate", "Gate", "Gates", "Logits", "Unseen"]


GATE_KINDS = {"sigmoid", "hardsigmoid"}

# Operations that leave what a tensor is used for open, beside those that copy or scale it.
_PARTS = {"chunk", "interpolate", "split", "tensor_split"}
_PRODUCTS = {"mul", "multiply"}


def _arranges(operation: Operation) -> bool:
    return operation.name in _PARTS or operation.arranges not in ("", "reduces")


class _Followed:
    """The output of a call, and what stands for it, as long as it lives."""

    def __init__(self, output: Tensor) -> None:
        self._live: MutableMapping[Tensor, None] = WeakTensorKeyDictionary({output: None})

    def goes_on(self, outputs: Sequence[Tensor]) -> None:
        """Follow it into what is made of it."""
        self._live.update(dict.fromkeys(outputs))


class Gate(_Followed):
    """What became of a sigmoid's output so far.

    Parameters
    ----------
    given, output : tensor
        The sigmoid's.
    """

    def __init__(self, given: Tensor, output: Tensor) -> None:
        super().__init__(output)
        self._given = weakref.ref(given)
        self._multiplies = False
        self._refuted = False

    def used(
        self, operation: Operation, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Note an operation on it; return what stands for the gate from now on."""
        others = [tensor for tensor in operands if tensor not in self._live]
        is_scaled = operation.acts in ("affine", "sums") and not others and len(operands) == 1
        if _arranges(operation) or operation.acts == "keeps" or is_scaled:
            self.goes_on(outputs)
            return outputs
        if (
            operation.name in _PRODUCTS
            and others
            and all(tensor is not self._given() for tensor in others)
        ):
            self._multiplies = True
            # In place the product has taken the gate's own tensor.
            for tensor in outputs:
                self._live.pop(tensor, None)
        else:
            self._refuted = True
        return []

    @property
    def is_settled(self) -> bool:
        """Whether nothing that can still happen changes the verdict."""
        return self._refuted or not self._live

    @property
    def role(self) -> str:
        """``gate`` if it multiplied another tensor than its own input, and did nothing else."""
        return "gate" if self._multiplies and not self._refuted else ""


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
        call: FunctionCall,
        outputs: Sequence[Tensor],
        is_constant: Callable[[Tensor], bool],
    ) -> None:
        """Note an operation, whatever it is on; to multiply by a constant is to scale."""
        if not self._of:
            return
        operands = [tensor for tensor in call.tensors if not is_constant(tensor)]
        among = (gate for tensor in operands if (gate := self._of.get(tensor)) is not None)
        for gate in {id(gate): gate for gate in among}.values():
            standing = gate.used(call.operation, operands, outputs)
            for tensor in outputs:
                if any(tensor is other for other in standing):
                    self._of[tensor] = gate
                else:
                    self._of.pop(tensor, None)


class Fate(_Followed):
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
        super().__init__(output)
        self._is_product, self._divided_by = is_product, divided_by
        self.role = ""

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
        return self.role == "attention" or not self._live


class Logits:
    """Follows products of two tensors, and what is computed of them number by number."""

    def __init__(self) -> None:
        self._products: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._divided: MutableMapping[Tensor, float] = WeakTensorKeyDictionary()
        self._fates: MutableMapping[Tensor, Fate] = WeakTensorKeyDictionary()

    def begin(self, kind: str, given: Tensor, output: Tensor) -> list[Fate]:
        """Follow the output of a call from here on, if it may have a role of this sort."""
        is_product = given in self._products and given.ndim > 2
        divided_by = self._divided.get(given) if kind == "tanh" else None
        if not is_product and divided_by is None:
            return []
        fate = self._fates[output] = Fate(output, is_product, divided_by)
        return [fate]

    def follow(
        self, call: FunctionCall, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Note an operation on tensors that come from the model's input, among its arguments."""
        name = call.name
        is_followed = self._products or self._divided or self._fates
        if not operands or not (is_followed or name in _INNER or name in _FACTORS):
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
        if not _arranges(call.operation) and not call.operation.acts:
            return
        if are_products:
            self._products.update(dict.fromkeys(outputs))
        factor = _factor(name, call.args)
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


# Statistics of a tensor, beside what reduces its axes.
_NORMS = {"linalg_norm", "linalg_vector_norm", "norm", "std_mean", "var_mean", "vector_norm"}

Remark = tuple[str, str]
"""Place and operation."""


class Unseen:
    """Follows, in one forward pass, what bends outside of sites, so that it can be said.

    Attributes
    ----------
    found : dict of (place, operation)
        In order of call.
    """

    def __init__(self) -> None:
        # The tensor that each was made of, number by number.
        self._roots: MutableMapping[Tensor, object] = WeakTensorKeyDictionary()
        # Made of the input's shape alone.
        self._constants: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # What bends, while it is not known what becomes of it.
        self._open: MutableMapping[Tensor, Remark] = WeakTensorKeyDictionary()
        self.found: dict[Remark, None] = {}

    def follow(
        self,
        operation: Operation,
        given: Sequence[Tensor],
        output: object,
        place: str,
        *,
        is_site: bool,
    ) -> None:
        """Note an operation, at a place, on tensors that come from the model's input."""
        name = operation.name
        if name == "setitem" and given and output is None:
            # What it writes into is what it gives. Numbers that are chosen by a mask of the same
            # tensor are written number by number.
            output = given[0]
            given = [output, *(t for t in given[1:] if t.dtype == torch.bool)]
        outputs = list(tensors_in((output,)))
        if not outputs or not given:
            return
        operands = [t for t in given if t not in self._constants] if self._constants else given
        if not operands or name.startswith("new_") or name.endswith("_like"):
            self._constants.update(dict.fromkeys(outputs))
            return
        self._used(operation, operands, outputs)
        roots = {id(root): root for root in map(self._root, operands)}
        # Both bend what they are given twice, as it is and in factors or in a mask made of it.
        is_given_twice = name in ("einsum", "setitem") and len(operands) > 1
        is_elementwise = is_site or bool(operation.acts) or is_given_twice
        made = outputs[0]
        same = is_elementwise and len(roots) == 1 and isinstance(output, Tensor)
        same = same and all(t.shape == made.shape for t in operands)
        for tensor in outputs:
            self._roots[tensor] = next(iter(roots.values())) if same else object()
        # A product of two tensors bends if both are made of one; a maximum of any two does.
        is_bent = (same and is_given_twice) or operation.is_bent(len(operands) if same else 1)
        is_whole = isinstance(output, Tensor) and made.shape == operands[0].shape
        if is_bent and is_whole and made.is_floating_point() and not is_site:
            self._open[made] = (place, name)

    def _root(self, tensor: Tensor) -> object:
        return self._roots.setdefault(tensor, object())

    def _used(
        self, operation: Operation, operands: Iterable[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        is_norm = operation.name in _NORMS or operation.arranges == "reduces"
        for tensor in operands if self._open else ():
            remark = self._open.get(tensor)
            if remark is None or is_norm or not outputs[0].is_floating_point():
                continue
            if operation.arranges:
                for made in outputs:
                    self._open[made] = remark
            elif outputs[0].numel() <= tensor.numel():
                self.found[remark] = None
            # In place what was open has been overwritten.
            if any(tensor is made for made in outputs):
                del self._open[tensor]

    def end(self, output: object) -> None:
        """Note what the model returned."""
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor in self._open:
                self.found[self._open[tensor]] = None

    def forget(self, since: int, output: object) -> None:
        """Take back what was found in a handwritten activation, which is a site.

        Parameters
        ----------
        since : int
            How much had been found before.
        output : tensor
            Of the activation.
        """
        for remark in list(self.found)[since:]:
            del self.found[remark]
        if isinstance(output, Tensor):
            self._open.pop(output, None)

    def remarks(self) -> Iterator[str]:
        """Say what was found, place by place.

        Examples
        --------
        >>> unseen = Unseen()
        >>> unseen.found = {("mlp", "erf"): None, ("mlp", "mul"): None}
        >>> list(unseen.remarks())
        ['erf and mul of mlp']
        """
        places: dict[str, list[str]] = {}
        for place, name in self.found:
            places.setdefault(place, []).append(name)
        for place, names in places.items():
            yield f"{' and '.join(names)} of {place}"
