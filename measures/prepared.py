"""A site's input and output as measures need them: double precision, finite, centred.

Every measure begins with the same few steps. A pass makes them once for all of its measures:
``batch.shared(prepare)`` is the pair. The formulas take what is prepared in place of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ._samples import as_samples, centered, power_of_two, varying_columns

__all__ = ["Prepared", "Samples", "prepare", "prepared"]

Found = TypeVar("Found")


class Prepared:
    """Samples in double precision, all finite, and what is computed of them first.

    Each part is computed when it is first asked for, and once. None can be set, and nobody is to
    write into them.

    Parameters
    ----------
    values : tensor of shape (n, d), float64
        Finite.

    Examples
    --------
    >>> x = Prepared(torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64))
    >>> x.varying
    tensor([ True, False])
    >>> x.centered
    tensor([[-1.,  0.],
            [ 1.,  0.]], dtype=torch.float64)
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._found: dict[str, object] = {}

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shape(self) -> torch.Size:
        """(n, d)."""
        return self._values.shape

    @property
    def values(self) -> Tensor:
        """The samples (n, d), float64."""
        return self._values

    @property
    def varying(self) -> Tensor:
        """Which columns (d,) vary by more than rounding."""
        return self._once("varying", lambda: varying_columns(self._values))

    @property
    def centered(self) -> Tensor:
        """The samples (n, d) less the mean of each column."""
        return self._once("centered", lambda: centered(self._values))

    @property
    def unit(self) -> float:
        """The largest power of two up to the largest magnitude of the centred samples."""
        return self._once("unit", lambda: power_of_two(self.centered))

    @property
    def scaled(self) -> Tensor:
        """The centred samples (n, d) in that unit: the largest magnitude is in [1, 2).

        Exact, so a score that doesn't depend on units stays the same to the last bit when
        the units change by a power of two, and no square under- or overflows. The scale
        carries no gradient: it is only right for functions that don't depend on it.
        """
        return self._once("scaled", lambda: self.centered / self.unit)

    @property
    def shown(self) -> list[object]:
        """What is computed by now, for whoever has to know that nobody writes into it."""
        return [self._values, *self._found.values()]

    def _once(self, name: str, compute: Callable[[], Found]) -> Found:
        if name not in self._found:
            self._found[name] = compute()
        return self._found[name]  # type: ignore[return-value]


Samples = Tensor | Prepared
"""What a formula takes: a tensor of shape (n, d) of any real type, or what is prepared of one."""


def prepared(samples: Samples, name: str) -> Prepared:
    """Prepare samples, unless they are.

    Parameters
    ----------
    samples : tensor of shape (n, d), or Prepared
    name : str
        What to call them in a message.

    Raises
    ------
    nlbench.RequestError
        Unless it is a real tensor with two axes.
    nlbench.NotFinite
        For NaN or an infinity.
    nlbench.Undefined
        If there are no columns.
    """
    return samples if isinstance(samples, Prepared) else Prepared(as_samples(samples, name))


def prepare(x: Tensor, y: Tensor) -> tuple[Prepared, Prepared]:
    """Prepare an activation's input and output, both (n, d).

    Examples
    --------
    >>> x, y = prepare(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [4]]))
    >>> y.values
    tensor([[1.],
            [4.]], dtype=torch.float64)
    """
    return prepared(x, "x"), prepared(y, "y")
