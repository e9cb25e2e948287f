"""Polynomials from each channel's input to its output, fitted by least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import NotFinite, Undefined

QUANTILES = (0.005, 0.995)
"""Quantiles of the first batch's inputs that bound the range of a channel."""

CHUNK_ENTRIES = 2**20
"""Maximum number of inputs whose polynomials are in memory at once."""


def legendre(t: Tensor, degree: int) -> Tensor:
    """Compute the Legendre polynomials of degree 0 to `degree`, in a new last axis.

    Examples
    --------
    >>> legendre(torch.tensor([0.5]), 2)
    tensor([[ 1.0000,  0.5000, -0.1250]])
    """
    values = [torch.ones_like(t), t]
    for k in range(1, degree):
        values.append(((2 * k + 1) * t * values[k] - k * values[k - 1]) / (k + 1))
    return torch.stack(values[: degree + 1], dim=-1)


@dataclass(frozen=True)
class PolynomialMap:
    """A polynomial for each channel, applied at every position.

    Parameters
    ----------
    coefficients : tensor of shape (d, degree + 1), float64
        Of Legendre polynomials on the channel's range.
    middle, radius : tensor of shape (d,), float64
        The range is from middle - radius to middle + radius.
    """

    coefficients: Tensor
    middle: Tensor
    radius: Tensor

    def __call__(self, x: Tensor, channel_axis: int) -> Tensor:
        """Apply the map to a tensor of any layout.

        It is computed in float64.

        Examples
        --------
        >>> square = PolynomialMap(torch.tensor([[1 / 3, 0, 2 / 3]]), torch.zeros(1), torch.ones(1))
        >>> square(torch.tensor([[0.5]]), 1)
        tensor([[0.2500]])
        """
        t = self._scaled(x, channel_axis)
        basis = legendre(t, self.coefficients.shape[1] - 1)
        mapped = (basis * self.coefficients.to(t)).sum(-1)
        return mapped.movedim(-1, channel_axis).to(x.dtype)

    def is_outside(self, x: Tensor, channel_axis: int) -> Tensor:
        """Return a mask (..., d) of the inputs outside their channel's range, channels last."""
        return self._scaled(x, channel_axis).abs() > 1

    def _scaled(self, x: Tensor, channel_axis: int) -> Tensor:
        moved = x.movedim(channel_axis, -1).double()
        return (moved - self.middle.to(moved)) / self.radius.to(moved)


class PolynomialFit:
    """Moments of a place's input and output, from which polynomials per channel are fitted.

    Parameters
    ----------
    degree : int
        Maximum degree.

    Examples
    --------
    >>> fit = PolynomialFit(2)
    >>> x = torch.linspace(-1, 1, 9)[:, None]
    >>> fit.add(x, x.square())
    >>> round(fit.polynomial(2)(torch.tensor([[3.0]]), 1).item(), 4)
    9.0
    """

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._range: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows x and y of shape (n, d).

        Raises
        ------
        nlbench.NotFinite
        """
        x = x.double()
        y = y.double()
        if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
            raise NotFinite("an input or an output is not finite")
        d = x.shape[1]
        if self._range is None:
            self._range = _range(x)
            self._gram = x.new_zeros(d, self.degree + 1, self.degree + 1)
            self._cross = x.new_zeros(d, self.degree + 1)
        middle, radius = self._range
        for part, target in zip(
            *(torch.split(rows, _chunk_rows(d)) for rows in (x, y)), strict=True
        ):
            basis = legendre((part - middle) / radius, self.degree)
            self._gram += torch.einsum("nci,ncj->cij", basis, basis)
            self._cross += torch.einsum("nci,nc->ci", basis, target)

    def polynomial(self, degree: int) -> PolynomialMap:
        """Return the best polynomials of a degree.

        Raises
        ------
        nlbench.Undefined
            If there are no rows.
        """
        if self._range is None:
            raise Undefined("there are no samples to fit a map on")
        gram = self._gram[:, : degree + 1, : degree + 1]
        cross = self._cross[:, : degree + 1]
        # Far outside the range, polynomials differ by orders of magnitude.
        scale = gram.diagonal(dim1=1, dim2=2).clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
        normalized = gram / scale[:, :, None] / scale[:, None, :]
        inverse = torch.linalg.pinv(normalized, hermitian=True, rtol=1e-12)
        coefficients = (inverse @ (cross / scale)[:, :, None])[:, :, 0] / scale
        return PolynomialMap(coefficients, *self._range)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle and the radius (d,) of each channel's range.

    A constant's radius is 1.
    """
    n = len(x)
    low, high = (
        x.kthvalue(min(n, max(1, round(q * (n - 1)) + 1)), dim=0).values for q in QUANTILES
    )
    radius = (high - low) / 2
    return (low + high) / 2, torch.where(radius > 0, radius, 1.0)


def _chunk_rows(channels: int) -> int:
    return max(1, CHUNK_ENTRIES // max(1, channels))
