"""Samples in double precision, validated and centred once for all measures.

A pass shares them between the site measures: ``batch.shared(prepare)`` is the pair of input and
output. Formulas accept them in place of tensors.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from nlbench.errors import RequestError

from .samples import (
    EPSILON,
    as_samples,
    centered,
    constant_side,
    power_of_two,
    varying_columns,
)

if TYPE_CHECKING:
    from nlbench.probes.sites.shared import Pair


class Prepared:
    """Finite samples in double precision, with cached statistics.

    Parameters
    ----------
    values : tensor of shape (n, d), float64
        Finite. Neither it nor a cached statistic may be modified.
    rounding : float
        Relative error of the samples: the spacing of their original dtype.

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
        """Shape (n, d)."""
        return self.values.shape

    @cached_property
    def varying(self) -> Tensor:
        """True for columns (d,) that vary by more than the rounding of the samples."""
        return varying_columns(self.values, self.rounding)

    def check_varies(self, role: str) -> None:
        """Raise `nlbench.Undefined` if no column varies; see `constant_side`."""
        if not self.varying.any():
            equal = bool((self.values == self.values[:1]).all())
            raise constant_side(role, self.rounding, equal=equal)

    @cached_property
    def centered(self) -> Tensor:
        """Samples (n, d) minus the mean of each column."""
        return centered(self.values)

    @cached_property
    def unit(self) -> float:
        """Largest power of two up to the largest magnitude of the centred samples."""
        return power_of_two(self.centered)

    @cached_property
    def scaled(self) -> Tensor:
        """Centred samples (n, d) divided by `unit`."""
        return self.centered / self.unit


Samples: TypeAlias = Tensor | Prepared
"""A tensor of shape (n, d) of any real type, or prepared samples."""


def prepared(samples: Samples, name: str) -> Prepared:
    """Prepare samples, or return prepared ones unchanged; see `as_samples`."""
    if isinstance(samples, Prepared):
        return samples
    return Prepared(as_samples(samples, name), _rounding(samples.dtype))


def prepared_pair(x: Samples, y: Samples) -> tuple[Prepared, Prepared]:
    """Prepare samples of one shape (n, d), or raise `nlbench.RequestError`."""
    x, y = prepared(x, "x"), prepared(y, "y")
    if x.shape != y.shape:
        raise RequestError(f"x is {tuple(x.shape)} and y is {tuple(y.shape)}, expected one shape")
    return x, y


def _rounding(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return EPSILON
    # Types shorter than float32 get the spacing of float32: means over positions are that precise.
    # `prepare` uses the batch's own rounding where it is larger, as for means over few positions.
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
    x, y = prepared(batch.x.detach(), "x"), prepared(batch.y.detach(), "y")
    roundings = getattr(batch, "rounding", (0.0, 0.0))
    x.rounding, y.rounding = max(x.rounding, roundings[0]), max(y.rounding, roundings[1])
    return x, y
