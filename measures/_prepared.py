"""An activation's input and output as measures need them: double precision, finite, centred.

Every site measure begins with the same few steps, which a pass makes once for all of them:
``batch.shared(prepare)`` is the pair. Formulas take it in place of tensors.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ._samples import EPSILON, as_samples, centered, power_of_two, varying_columns

if TYPE_CHECKING:
    from nlbench.probes.sites.shared import Pair

__all__ = ["Prepared", "Samples", "prepare", "prepared"]


class Prepared:
    """Samples in double precision, all finite, and what is computed of them first.

    Parameters
    ----------
    values : tensor of shape (n, d), float64
        Finite; not to be written into, like all that is computed of them.
    rounding : float
        How far the samples may be from what they stand for, relative to their magnitude: the
        spacing of the type that they were given in.

    Examples
    --------
    >>> x = Prepared(torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64))
    >>> x.varying
    tensor([ True, False])
    >>> x.centered
    tensor([[-1.,  0.],
            [ 1.,  0.]], dtype=torch.float64)
    """

    def __init__(self, values: Tensor, rounding: float = EPSILON) -> None:
        self.values, self.rounding = values, rounding

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        """(n, d)."""
        return self.values.shape

    @cached_property
    def varying(self) -> Tensor:
        """Which columns (d,) vary by more than double precision's rounding."""
        return varying_columns(self.values)

    @cached_property
    def centered(self) -> Tensor:
        """The samples (n, d) less the mean of each column."""
        return centered(self.values)

    @cached_property
    def unit(self) -> float:
        """The largest power of two up to the largest magnitude of the centred samples."""
        return power_of_two(self.centered)

    @cached_property
    def scaled(self) -> Tensor:
        """The centred samples (n, d) in that unit, as by `unit_scaled`."""
        return self.centered / self.unit


Samples: TypeAlias = Tensor | Prepared
"""What a formula takes: a tensor of shape (n, d) of any real type, or what is prepared of one."""


def prepared(samples: Samples, name: str) -> Prepared:
    """Prepare samples, unless they are; see `as_samples`."""
    if isinstance(samples, Prepared):
        return samples
    return Prepared(as_samples(samples, name), _rounding(samples.dtype))


def _rounding(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return EPSILON
    # Samples of shorter types are taken as they are: means over positions have more digits.
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def prepare(batch: Pair) -> tuple[Prepared, Prepared]:
    """Prepare both sides of a batch, without derivatives.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> x, y = prepare(SimpleNamespace(x=torch.tensor([[1.0]]), y=torch.tensor([[4]])))
    >>> y.values
    tensor([[4.]], dtype=torch.float64)
    """
    return prepared(batch.x.detach(), "x"), prepared(batch.y.detach(), "y")
