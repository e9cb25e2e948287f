"""Infer the roles of activation calls, and detect activations without a call, from data flow.

A gate's output multiplies another tensor and has no other use. A call inside attention takes a
product of two tensors that both depend on the input, and its output enters a softmax or another
product of two tensors. A soft cap is c tanh(x / c), which changes only the largest logits.

An activation written as operations in a larger module, ``h * sigmoid(h)`` or ``h.clamp(min=0)``,
has no call of its own: at most one of the operations is a site. It is detected as an elementwise
operation that is not affine, or as an elementwise product of two tensors computed from the same
tensor, if the result is used at full size. If only the result's mean is used, or if the result
scales a larger tensor, it belongs to a normalisation or a gate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.introspection.function_calls import FunctionCall, tensors_in
from nlbench.introspection.operations import Operation
from nlbench.introspection.pytree import tree_iter


class GateTracker:
    """Tracks how a sigmoid's output is used."""

    def __init__(self, source: Tensor, output: Tensor) -> None:
        # The output and its copies, for as long as they are alive.
        self._live: MutableMapping[Tensor, None] = WeakTensorKeyDictionary({output: None})
        self._source = weakref.ref(source)
        self._multiplies = False
        self._refuted = False

    def use(
        self, operation: Operation, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Track an operation on the gate. Return the outputs that are copies of the gate."""
        others = [tensor for tensor in operands if tensor not in self._live]
        is_scaled = operation.acts in ("affine", "sums") and not others and len(operands) == 1
        is_scaled = is_scaled or _is_masked(operation, operands, others, outputs)
        if operation.arranges or operation.acts == "keeps" or is_scaled:
            self._live.update(dict.fromkeys(outputs))
            return outputs
        if (
            operation.combines == "product"
            and others
            and all(tensor is not self._source() for tensor in others)
        ):
            self._multiplies = True
            # An in-place product overwrites the gate's tensor.
            for tensor in outputs:
                self._live.pop(tensor, None)
        else:
            self._refuted = True
        return []

    @property
    def is_settled(self) -> bool:
        """True if the role is final."""
        return self._refuted or not self._live

    @property
    def role(self) -> str:
        """``gate`` if the output only multiplies tensors other than the sigmoid's input."""
        return "gate" if self._multiplies and not self._refuted else ""


def _is_masked(
    operation: Operation,
    operands: Sequence[Tensor],
    others: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> bool:
    """Return True if a product scales a gate by a smaller tensor, as a mask does."""
    if operation.combines != "product" or not others or len(others) == len(operands):
        return False
    shape = outputs[0].shape
    gates = [t for t in operands if not any(t is other for other in others)]
    return all(gate.shape == shape for gate in gates) and all(
        other.numel() < shape.numel() for other in others
    )


class GateRoles:
    """Tracks the outputs of all sigmoids in a forward pass."""

    def __init__(self) -> None:
        self._trackers: MutableMapping[Tensor, GateTracker] = WeakTensorKeyDictionary()

    def begin(self, source: Tensor, output: Tensor) -> GateTracker:
        """Start tracking a sigmoid's output."""
        tracker = self._trackers[output] = GateTracker(source, output)
        return tracker

    def follow(
        self, call: FunctionCall, outputs: Sequence[Tensor], is_constant: Callable[[Tensor], bool]
    ) -> None:
        """Track an operation. A product with a constant counts as a scaling."""
        if not self._trackers:
            return
        operands = [tensor for tensor in call.tensors if not is_constant(tensor)]
        involved = (t for operand in operands if (t := self._trackers.get(operand)) is not None)
        for tracker in {id(tracker): tracker for tracker in involved}.values():
            copies = tracker.use(call.operation, operands, outputs)
            for tensor in outputs:
                if any(tensor is copy for copy in copies):
                    self._trackers[tensor] = tracker
                else:
                    self._trackers.pop(tensor, None)


class RoleTracker:
    """Tracks the output of a call on logits."""

    def __init__(self, output: Tensor, is_product: bool, divisor: float | None) -> None:
        # The output and its copies, for as long as they are alive.
        self._live: MutableMapping[Tensor, None] = WeakTensorKeyDictionary({output: None})
        self.is_product = is_product
        self._divisor = divisor
        self.role = ""

    def use(self, factor: float | None, outputs: Sequence[Tensor]) -> None:
        """Track a copy, whose factor completes a soft cap if it undoes the division."""
        cap = self._divisor
        if cap is not None and factor is not None and abs(factor - cap) <= 1e-6 * abs(cap):
            self.role = self.role or "softcap"
        self._live.update(dict.fromkeys(outputs))

    @property
    def is_settled(self) -> bool:
        """True if the role is final."""
        return self.role == "attention" or not self._live


class LogitRoles:
    """Tracks products of two tensors, and elementwise operations on them."""

    def __init__(self) -> None:
        self._products: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._divisors: MutableMapping[Tensor, float] = WeakTensorKeyDictionary()
        self._trackers: MutableMapping[Tensor, RoleTracker] = WeakTensorKeyDictionary()

    def begin(self, kind: str, source: Tensor, output: Tensor) -> list[RoleTracker]:
        """Start tracking a call's output if it may be part of attention or a soft cap."""
        is_product = source in self._products and source.ndim > 2
        divisor = self._divisors.get(source) if kind == "tanh" else None
        if not is_product and divisor is None:
            return []
        tracker = self._trackers[output] = RoleTracker(output, is_product, divisor)
        return [tracker]

    def follow(
        self, call: FunctionCall, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Track an operation. `operands` are the arguments that depend on the model's input."""
        name = call.name
        combines = call.operation.combines
        is_active = self._products or self._divisors or self._trackers
        if not operands or not (is_active or combines in ("contraction", "product", "quotient")):
            return
        are_products = any(tensor in self._products for tensor in operands)
        trackers = [t for operand in operands if (t := self._trackers.get(operand)) is not None]
        if name == "softmax" or (combines == "contraction" and len(operands) > 1):
            for tracker in trackers:
                tracker.role = "attention" if tracker.is_product else tracker.role
            # The product of attention weights and values is not a logit.
            if are_products == (name == "softmax"):
                self._products.update(dict.fromkeys(outputs))
            return
        if not call.operation.arranges and not call.operation.acts:
            return
        if are_products:
            self._products.update(dict.fromkeys(outputs))
        factor = _factor(combines, call.args)
        if factor:
            self._divisors[outputs[0]] = 1 / factor
        for tracker in trackers:
            tracker.use(factor, outputs)
            self._trackers.update(dict.fromkeys(outputs, tracker))


def _factor(combines: str, args: Sequence[Any]) -> float | None:
    """Return the number that a tensor is multiplied by, or None for any other operation."""
    if len(args) < 2 or combines not in ("product", "quotient"):
        return None
    numbers = [float(value) for value in args[:2] if isinstance(value, int | float)]
    if len(numbers) != 1 or not numbers[0]:
        return None
    return numbers[0] if combines == "product" else 1 / numbers[0]


PlacedOperation = tuple[str, str]
"""Place and name of the operation."""


class UnseenActivations:
    """Detects nonlinear operations outside sites in one forward pass."""

    def __init__(self) -> None:
        # Maps each tensor to the tensor from which it was computed elementwise.
        self._roots: MutableMapping[Tensor, object] = WeakTensorKeyDictionary()
        # Tensors that depend only on the input's shape.
        self._constants: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # Results of nonlinear operations that have not been used yet.
        self._unused: MutableMapping[Tensor, PlacedOperation] = WeakTensorKeyDictionary()
        self.operations: dict[PlacedOperation, None] = {}  # the operations, in call order

    def follow(
        self,
        operation: Operation,
        sampled: Sequence[Tensor],
        output: object,
        place: str,
        *,
        is_site: bool,
    ) -> None:
        """Track an operation. `sampled` are the arguments that depend on the model's input."""
        name = operation.name
        if name == "setitem" and sampled and output is None:
            # The output is the tensor that is written to. An assignment through a mask computed
            # from this tensor is elementwise.
            output = sampled[0]
            sampled = [output, *(t for t in sampled[1:] if t.dtype == torch.bool)]
        outputs = list(tensors_in((output,)))
        if not outputs or not sampled:
            return
        operands = [t for t in sampled if t not in self._constants] if self._constants else sampled
        if not operands or operation.ignores_values:
            self._constants.update(dict.fromkeys(outputs))
            return
        if any(tensor.is_nested for tensor in (*operands, *outputs)):
            return  # They have no shape.
        self._use(operation, operands, outputs)
        roots = {id(root): root for root in map(self._root, operands)}
        # These are nonlinear in a tensor passed to them twice, the second time as factor or mask.
        is_taken_twice = name in ("einsum", "setitem") and len(operands) > 1
        is_elementwise = is_site or bool(operation.acts) or is_taken_twice
        result = outputs[0]
        same = is_elementwise and len(roots) == 1 and isinstance(output, Tensor)
        same = same and all(t.shape == result.shape for t in operands)
        for tensor in outputs:
            self._roots[tensor] = next(iter(roots.values())) if same else object()
        # A product is nonlinear if both factors come from the same tensor; a maximum always is.
        data = len(operands) if same else 1
        is_nonlinear = (same and is_taken_twice) or operation.is_nonlinear(data)
        is_full_size = isinstance(output, Tensor) and result.shape == operands[0].shape
        if is_nonlinear and is_full_size and result.is_floating_point() and not is_site:
            self._unused[result] = (place, name)

    def _root(self, tensor: Tensor) -> object:
        return self._roots.setdefault(tensor, object())

    def _use(
        self, operation: Operation, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        # A layer may have more outputs than inputs.
        is_layer = operation.channels in ("second", "last", "product") and len(operands) == 1
        for tensor in operands if self._unused else ():
            origin = self._unused.get(tensor)
            if origin is None or operation.reduces or not outputs[0].is_floating_point():
                continue
            if operation.rearranges:
                for output in outputs:
                    self._unused[output] = origin
            elif is_layer or outputs[0].numel() <= tensor.numel():
                self.operations[origin] = None
            # An in-place operation has overwritten the result.
            if any(tensor is output for output in outputs):
                del self._unused[tensor]

    def end(self, output: object) -> None:
        """Count unused results that are part of the model's output as used."""
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor in self._unused:
                self.operations[self._unused[tensor]] = None

    def forget(self, since: int, place: str, output: object) -> None:
        """Drop the operations inside a handwritten activation, which is a site.

        Those before it, the first `since`, are kept if the activation uses their results.
        """
        for origin in list(self.operations)[since:]:
            if origin[0] == place:
                del self.operations[origin]
        if isinstance(output, Tensor):
            self._unused.pop(output, None)

    def descriptions(self) -> Iterator[str]:
        """Describe the operations at each place.

        Examples
        --------
        >>> unseen = UnseenActivations()
        >>> unseen.operations = {("mlp", "erf"): None, ("mlp", "mul"): None}
        >>> list(unseen.descriptions())
        ['erf and mul of mlp']
        """
        places: dict[str, list[str]] = {}
        for place, name in self.operations:
            places.setdefault(place, []).append(name)
        for place, names in places.items():
            yield f"{' and '.join(names)} of {place}"
