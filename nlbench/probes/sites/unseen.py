"""Notice what bends in a network and is no site, so that it can be said.

An activation that is written out inside a larger module, ``h * sigmoid(h)`` or
``h.clamp(min=0)``, has no call of its own to be caught: at most one of its operations is a site.
What is noticed is an operation on numbers one by one that is not affine, or a product of two
tensors that are made of one, number by number, where its result goes on at full size: that only
an average is taken of it, or that it scales something larger, makes it a part of a normalisation
or a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.probes.axes import tensors_in
from nlbench.probes.ops import known, operation_name
from nlbench.probes.site_names import acts_of, bends

__all__ = ["Unseen"]


# Statistics of a tensor, beside what reduces its axes.
_NORMS = {"linalg_norm", "linalg_vector_norm", "norm", "std_mean", "var_mean", "vector_norm"}

Remark = tuple[str, str]
"""Place and operation."""


class Unseen:
    """Follows, in one forward pass, what bends outside of sites.

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
        func: Any,
        given: Sequence[Tensor],
        output: object,
        place: str,
        *,
        is_site: bool,
    ) -> None:
        """Note an operation, at a place, on tensors that come from the model's input."""
        outputs = list(tensors_in((output,)))
        if not outputs or not given:
            return
        operands = [t for t in given if t not in self._constants] if self._constants else given
        name = operation_name(func)
        if not operands or name.startswith("new_") or name.endswith("_like"):
            self._constants.update(dict.fromkeys(outputs))
            return
        self._used(name, operands, outputs)
        acts = acts_of(func)
        roots = {id(root): root for root in map(self._root, operands)}
        is_elementwise = is_site or bool(acts)
        made = outputs[0]
        same = is_elementwise and len(roots) == 1 and isinstance(output, Tensor)
        same = same and all(t.shape == made.shape for t in operands)
        for tensor in outputs:
            self._roots[tensor] = next(iter(roots.values())) if same else object()
        # A product of two tensors bends if both are made of one; a maximum of any two does.
        is_bent = bends(func, len(operands)) if same else acts == "bends"
        is_whole = isinstance(output, Tensor) and made.shape == operands[0].shape
        if is_bent and is_whole and made.is_floating_point() and not is_site:
            self._open[made] = (place, name)

    def _root(self, tensor: Tensor) -> object:
        return self._roots.setdefault(tensor, object())

    def _used(self, name: str, operands: Iterable[Tensor], outputs: Sequence[Tensor]) -> None:
        for tensor in operands if self._open else ():
            remark = self._open.get(tensor)
            if remark is None or name in _NORMS or not outputs[0].is_floating_point():
                continue
            found = known(name)
            arranges = found.arranges if found else ""
            if arranges == "reduces":
                continue
            if arranges:
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
