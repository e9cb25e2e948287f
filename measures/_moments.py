"""Centred second moments of input and output samples, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import NotFinite, RequestError

from ._samples import as_samples, check_count, varying

__all__ = ["Moments", "SamplePairs"]


@dataclass(frozen=True)
class Moments:
    """Moments of samples z = (x, y) of d + k numbers each, in float64.

    Each column has its own unit, a power of two, so that no square under- or overflows
    whatever the data's scale, and all digits are those of the data.

    Parameters
    ----------
    n : int
        Number of samples.
    inputs : int
        d: the first d numbers of a sample are x.
    origin : tensor of shape (d + k,)
        What all samples are measured from, so that an offset costs no digits.
    unit : tensor of shape (d + k,)
    mean, low, high : tensor of shape (d + k,)
        Mean and extremes of (z - origin) / unit.
    scatter : tensor of shape (d + k, d + k)
        Sum of (z - mean) (z - mean)ᵀ, in these units.
    """

    n: int
    inputs: int
    origin: Tensor
    unit: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, origin: Tensor) -> Moments:
        """Moments of samples x (n, d) and y (n, k), both float64.

        Raises
        ------
        nlbench.NotFinite
            If a difference of two samples is beyond float64.

        Examples
        --------
        >>> x, y = torch.eye(2).double(), torch.tensor([[1.0], [3.0]]).double()
        >>> moments = Moments.of(x, y, torch.zeros(3).double())
        >>> moments.unit
        tensor([1., 1., 2.], dtype=torch.float64)
        >>> moments.xy
        tensor([[-0.5000],
                [ 0.5000]], dtype=torch.float64)
        """
        z = torch.cat([x, y], 1) - origin
        unit = _units(z)
        z = z / unit
        mean = z.mean(0)
        low, high = z.amin(0), z.amax(0)
        z = z - mean
        return cls(len(z), x.shape[1], origin, unit, mean, low, high, z.T @ z)

    def in_units(self, unit: Tensor) -> Moments:
        """Give the same moments in units (d + k,), powers of two that are no smaller."""
        ratio = self.unit / unit
        scatter = self.scatter * ratio[:, None] * ratio
        sizes = (self.mean * ratio, self.low * ratio, self.high * ratio)
        return Moments(self.n, self.inputs, self.origin, unit, *sizes, scatter)

    def in_common_units(self) -> Moments:
        """Give the same moments with one unit for all of x and one for all of y."""
        x, y = self.unit[: self.inputs], self.unit[self.inputs :]
        return self.in_units(torch.cat([x.amax().expand_as(x), y.amax().expand_as(y)]))

    def merged(self, other: Moments) -> Moments:
        """Moments of both sets of samples together, which share the origin.

        References
        ----------
        T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise
        algorithm for computing sample variances", COMPSTAT 1982.
        """
        n = self.n + other.n
        unit = torch.maximum(self.unit, other.unit)
        first, second = self.in_units(unit), other.in_units(unit)
        step = second.mean - first.mean
        between = torch.outer(step, step) * (self.n * other.n / n)
        return Moments(
            n,
            self.inputs,
            self.origin,
            unit,
            first.mean + step * (other.n / n),
            torch.minimum(first.low, second.low),
            torch.maximum(first.high, second.high),
            first.scatter + second.scatter + between,
        )

    @property
    def xx(self) -> Tensor:
        """Scatter (d, d) of x, in units."""
        return self.scatter[: self.inputs, : self.inputs]

    @property
    def xy(self) -> Tensor:
        """Scatter (d, k) of x against y, in units."""
        return self.scatter[: self.inputs, self.inputs :]

    @property
    def yy(self) -> Tensor:
        """Scatter (k, k) of y, in units."""
        return self.scatter[self.inputs :, self.inputs :]

    @property
    def varying_x(self) -> Tensor:
        """Which columns (d,) of x vary."""
        return self._varying[: self.inputs]

    @property
    def varying_y(self) -> Tensor:
        """Which columns (k,) of y vary."""
        return self._varying[self.inputs :]

    @property
    def _varying(self) -> Tensor:
        return varying(self.low * self.unit + self.origin, self.high * self.unit + self.origin)


def _units(samples: Tensor) -> Tensor:
    """Largest power of two up to each column's largest magnitude, of samples (n, d)."""
    peak = samples.abs().amax(0)
    if not torch.isfinite(peak).all():
        raise NotFinite("the range of the values is too large for float64")
    smallest = torch.full_like(peak, torch.finfo(peak.dtype).tiny)
    peak = torch.maximum(peak, smallest)
    # A quotient that is a power of two is exact; a power by exponential may not be.
    return peak / (2 * torch.frexp(peak).mantissa)


class SamplePairs:
    """Batches of x (n, d) and y (n, k), kept as rows while few and as moments when many.

    Rows are kept up to max(d, k) + 1 samples, moments from there on, so that neither a
    long stream nor very wide features take more than O(n d) and O(d²) memory.
    """

    def __init__(self) -> None:
        self.n = 0
        self.moments: Moments | None = None
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._widths: tuple[int, int] | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in one batch; the tensors are copied.

        Raises
        ------
        nlbench.NotFinite, nlbench.RequestError
            For what can't be taken in; see `as_samples`. A batch whose numbers of columns
            differ from the batches before is a wrong request too.
        """
        x, y = as_samples(x.detach(), "x"), as_samples(y.detach(), "y")
        count = check_count(x, y, at_least=0)
        widths = (x.shape[1], y.shape[1])
        if self._widths not in (None, widths):
            raise RequestError(f"a batch has {widths} columns, the batches before {self._widths}")
        if count == 0:
            return
        self._widths = widths
        self.n += count
        if self.moments is not None:
            self.moments = self.moments.merged(Moments.of(x, y, self.moments.origin))
            return
        # The caller may overwrite its tensors later, as an in-place activation does.
        self._rows.append((x.clone(), y.clone()))
        if self.n > max(widths) + 1:
            x, y = self.rows()
            self._rows.clear()
            self.moments = Moments.of(x, y, torch.cat([x[0], y[0]]))

    def rows(self) -> tuple[Tensor, Tensor]:
        """All samples x (n, d) and y (n, k); only while there are no moments."""
        return torch.cat([x for x, _ in self._rows]), torch.cat([y for _, y in self._rows])
