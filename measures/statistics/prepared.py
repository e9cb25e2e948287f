"""Samples in double precision, validated and centred once for all measures.

Within a forward pass, the site measures share them: ``batch.shared(prepare_batch)`` returns the
pair of input and output. The statistics functions accept them in place of tensors.
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
    is_resolved,
    power_of_two,
    unresolved_side,
    varying_columns,
)

if TYPE_CHECKING:
    from nlbench.probes.sites.shared import Pair


class PreparedSamples:
    """Finite samples in double precision, with cached statistics.

    Parameters
    ----------
    values : tensor of shape (n, d), float64
        Finite. Neither it nor a cached statistic may be modified.
    rounding : float
        Relative error of the samples: the spacing of their original dtype.

    Examples
    --------
    >>> x = PreparedSamples(torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64))
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
        """Raise `nlbench.Undefined` if the samples vary by no more than rounding.

        See `constant_side` and `is_resolved`.
        """
        if not self.varying.any():
            equal = bool((self.values == self.values[:1]).all())
            raise constant_side(role, self.rounding, equal=equal)
        low, high = self.values.detach().aminmax(dim=0)
        norms = torch.linalg.vector_norm(self.scaled.detach(), dim=0) * self.unit
        if not is_resolved(low, high, norms, len(self), self.rounding):
            raise unresolved_side(role)

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


Samples: TypeAlias = Tensor | PreparedSamples
"""A tensor of shape (n, d) of any real type, or prepared samples."""


def prepare_samples(samples: Samples, name: str) -> PreparedSamples:
    """Prepare samples, or return prepared ones unchanged; see `as_samples`."""
    if isinstance(samples, PreparedSamples):
        return samples
    return PreparedSamples(as_samples(samples, name), _rounding(samples.dtype))


def prepare_pair(x: Samples, y: Samples) -> tuple[PreparedSamples, PreparedSamples]:
    """Prepare two samples of equal shape (n, d), or raise `nlbench.RequestError`."""
    x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
    if x.shape != y.shape:
        shapes = f"x has shape {tuple(x.shape)} and y has shape {tuple(y.shape)}"
        raise RequestError(f"{shapes}, expected equal shapes")
    return x, y


def _rounding(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return EPSILON
    # Dtypes narrower than float32 get its spacing, since means over positions are that precise.
    # `prepare_batch` uses the batch's own rounding where it is larger, as for means over few
    # positions.
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def prepare_batch(batch: Pair) -> tuple[PreparedSamples, PreparedSamples]:
    """Prepare both sides of a batch, detached from autograd.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> x, y = prepare_batch(SimpleNamespace(x=torch.tensor([[1.0]]), y=torch.tensor([[4]])))
    >>> y.values
    tensor([[4.]], dtype=torch.float64)
    """
    x, y = prepare_samples(batch.x.detach(), "x"), prepare_samples(batch.y.detach(), "y")
    roundings = getattr(batch, "rounding", (0.0, 0.0))
    x.rounding, y.rounding = max(x.rounding, roundings[0]), max(y.rounding, roundings[1])
    return x, y
