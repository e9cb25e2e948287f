"""Samples in double precision, validated and centred once for all measures.

Within a forward pass, the site measures share them: ``batch.shared(prepare_batch)`` returns the
pair of input and output. The statistics functions accept them in place of tensors.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from nlbench.errors import RequestError
from nlbench.probes.sites.site import Pair

from .samples import (
    EPSILON,
    ERROR_IN_ROUNDINGS,
    MAX_POOLED_NOISE,
    as_samples,
    centered,
    constant_side,
    is_resolved,
    power_of_two,
    unresolved_side,
    varying,
)

# Range of samples whose fourth powers, as well as those of small differences and sums of many, are
# normal numbers in float64.
MIN_UNSCALED_RANGE = 2.0**-128
MAX_UNSCALED_RANGE = 2.0**128


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
        self.values = values
        self.rounding = rounding

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        """Shape (n, d)."""
        return self.values.shape

    @cached_property
    def extremes(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of each column, each (d,), detached."""
        values = self.values.detach()
        # Much faster than aminmax, which isn't vectorised over rows.
        return values.amin(0), values.amax(0)

    @cached_property
    def varying(self) -> Tensor:
        """True for columns (d,) that vary by more than the rounding of the samples."""
        return varying(*self.extremes, self.rounding)

    @cached_property
    def varying_values(self) -> Tensor:
        """The columns (n, k) that vary."""
        return self.values if self.varying.all() else self.values[:, self.varying]

    def check_varies(self, role: str) -> None:
        """Raise `nlbench.Undefined` if the samples vary by no more than rounding.

        See `constant_side` and `is_resolved`.
        """
        spread = self._spread
        rounding = self.rounding * self._peak
        # Usually the largest range is far above all rounding, which takes a comparison of numbers.
        if ERROR_IN_ROUNDINGS * rounding < spread < math.inf and (
            self.rounding > EPSILON
            or math.sqrt(self.values.numel() / 6) * rounding <= MAX_POOLED_NOISE * spread
        ):
            return
        if not self.varying.any():
            equal = bool((self.values == self.values[:1]).all())
            raise constant_side(role, self.rounding, equal=equal)
        low, high = self.extremes
        norms = torch.linalg.vector_norm(self.scaled.detach(), dim=0) * self.unit
        if not is_resolved(low, high, norms, len(self), self.rounding):
            raise unresolved_side(role)

    @cached_property
    def _peak(self) -> float:
        low, high = self.extremes
        return max(-low.min().item(), high.max().item())

    @cached_property
    def _spread(self) -> float:
        low, high = self.extremes
        return (high - low).max().item()

    @cached_property
    def centered(self) -> Tensor:
        """Samples (n, d) minus the mean of each column."""
        return centered(self.values)

    @cached_property
    def unit(self) -> float:
        """Power of two by which fourth powers of the centred samples neither over- nor underflow.

        1 for samples of usual magnitude, else the largest one up to the largest magnitude of the
        centred samples.
        """
        if MIN_UNSCALED_RANGE <= self._spread <= MAX_UNSCALED_RANGE:
            return 1.0
        return power_of_two(self.centered)

    @cached_property
    def scaled(self) -> Tensor:
        """Centred samples (n, d) divided by `unit`."""
        return self.centered if self.unit == 1 else self.centered / self.unit


Samples: TypeAlias = Tensor | PreparedSamples
"""A tensor of shape (n, d) of any real type, or prepared samples."""


def prepare_samples(samples: Samples, name: str) -> PreparedSamples:
    """Prepare samples, or return prepared ones unchanged. See `as_samples`."""
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
