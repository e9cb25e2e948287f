"""Affine maps and polynomials from a place's input to its output, fitted by least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import NotFinite, Undefined

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
    """A polynomial for each channel, applied at every position."""

    coefficients: Tensor  # (d, degree + 1), float64: of Legendre polynomials on the channel's range
    # middle, radius: (d,), float64: the range is from middle - radius to middle + radius
    middle: Tensor
    radius: Tensor

    def __call__(self, x: Tensor, channel_axis: int) -> Tensor:
        """Apply the map to a tensor of any layout. It is computed in float64.

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
        """Add rows x and y of shape (n, d)."""
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
        size = max(1, CHUNK_ENTRIES // max(1, d))
        for part, target in zip(torch.split(x, size), torch.split(y, size), strict=True):
            basis = legendre((part - middle) / radius, self.degree)
            self._gram += torch.einsum("nci,ncj->cij", basis, basis)
            self._cross += torch.einsum("nci,nc->ci", basis, target)

    def polynomial(self, degree: int) -> PolynomialMap:
        """Return the best polynomials of a degree."""
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
    """Return the middle and the radius (d,) of each channel's range. A constant's radius is 1."""
    n = len(x)
    # Quantiles of the first batch's inputs that bound the range of a channel.
    low, high = (
        x.kthvalue(min(n, max(1, round(q * (n - 1)) + 1)), dim=0).values for q in (0.005, 0.995)
    )
    radius = (high - low) / 2
    return (low + high) / 2, torch.where(radius > 0, radius, 1.0)


MIN_ROWS_PER_COEFFICIENT = 4
"""Minimum number of rows per coefficient of an output for fitting a full map."""

FEW_ROWS_PER_COEFFICIENT = 16
"""Number of rows per coefficient below which a full map may cost more than skipping the place."""


def copy_to_rows(tensor: Tensor, channel_axis: int) -> Tensor:
    """Copy a tensor into one row per position and one column per channel.

    Examples
    --------
    >>> copy_to_rows(torch.zeros(8, 3, 5, 5), 1).shape
    torch.Size([200, 3])
    """
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.detach().movedim(channel_axis, -1).clone().flatten(0, -2)


@dataclass(frozen=True)
class AffineMap:
    """An affine map of the channels, applied at every position."""

    weight: Tensor  # (d,) or (d, k): one slope per channel, or a full matrix from d to k channels
    bias: Tensor  # (k,)

    def __call__(self, x: Tensor, channel_axis: int = -1) -> Tensor:
        """Apply the map to a tensor of any layout, in the tensor's dtype.

        Examples
        --------
        >>> swap = AffineMap(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.zeros(2))
        >>> swap(torch.tensor([[1.0, 2.0]]), 1)
        tensor([[2., 1.]])
        """
        weight = self.weight.to(x)
        bias = self.bias.to(x)
        moved = x.movedim(channel_axis, -1)
        mapped = moved @ weight + bias if weight.ndim == 2 else moved * weight + bias
        return mapped.movedim(-1, channel_axis)


class AffineFit:
    """Moments of a place's input and output, from which affine maps are fitted.

    `is_full` keeps the moments of all pairs of channels, which `full` requires, and a degree above
    1 those of polynomials.

    Notes
    -----
    Sums are computed in float64 and relative to the first batch's means, so that a large offset
    doesn't reduce precision.

    Examples
    --------
    >>> fit = AffineFit()
    >>> x = torch.tensor([[-1.0], [0.0], [1.0]])
    >>> fit.add(x, 2 * x + 3)
    >>> fit.per_channel().weight, fit.per_channel().bias
    (tensor([2.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """

    def __init__(self, is_full: bool = False, degree: int = 1) -> None:
        self.is_full = is_full
        self.rows = 0
        self._eps = 0.0
        self._polynomials = PolynomialFit(degree) if degree > 1 else None
        self._shift: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows x of shape (n, d) and y of shape (n, k)."""
        self._eps = max(self._eps, torch.finfo(x.dtype).eps)
        if self._polynomials is not None and x.shape == y.shape:
            self._polynomials.add(x, y)
        x, y = x.double(), y.double()
        if self._shift is None:
            self._shift = x.mean(0), y.mean(0)
            (d,), (k,) = self._shift[0].shape, self._shift[1].shape
            self._sums = [x.new_zeros(d), x.new_zeros(k)]
            # Either XᵀX and XᵀY for all pairs, or Σx² and Σxy per channel.
            paired: list[tuple[int, ...]] = [(d, d), (d, k)] if self.is_full else [(d,), (d,)]
            self._products = [x.new_zeros(shape) for shape in paired]
        x, y = x - self._shift[0], y - self._shift[1]
        self.rows += len(x)
        for total, values in zip(self._sums, (x, y), strict=True):
            total += values.sum(0)
        for total, values in zip(self._products, (x, y), strict=True):
            if self.is_full:
                total += x.T @ values
            elif self.keeps_channels:
                total += (x * values).sum(0)
        if not all(torch.isfinite(total).all() for total in (*self._sums, *self._products)):
            raise NotFinite("an input or an output is not finite")

    @property
    def keeps_channels(self) -> bool:
        """True if the output has as many channels as the input."""
        return self._shift is not None and self._shift[0].shape == self._shift[1].shape

    def per_channel(self) -> AffineMap:
        """Return the best slope and intercept of each channel. A constant channel has slope 0."""
        (mean_x, mean_y), (centre_x, centre_y) = self._means()
        if not self.keeps_channels:
            raise Undefined(
                f"the input has {len(mean_x)} channels and the output {len(mean_y)}, so there is "
                "no map per channel"
            )
        squares, products = (p.diagonal() if self.is_full else p for p in self._products)
        variance = squares / self.rows - centre_x.square()
        covariance = products / self.rows - centre_x * centre_y
        # Variation below the spacing of floats in the inputs' dtype is rounding error.
        floor = (self._eps * mean_x).square() + torch.finfo(torch.float64).tiny
        slope = torch.where(variance > floor, covariance / variance.clamp(min=floor), 0.0)
        return AffineMap(slope, mean_y - slope * mean_x)

    def polynomial(self, degree: int) -> PolynomialMap:
        """Return the best polynomial of each channel."""
        if self._polynomials is None or degree > self._polynomials.degree:
            raise Undefined(f"there are no moments of polynomials of degree {degree}")
        return self._polynomials.polynomial(degree)

    @property
    def min_rows(self) -> int:
        """Minimum number of rows for `full`: four per coefficient of an output."""
        channels = 0 if self._shift is None else len(self._shift[0])
        return MIN_ROWS_PER_COEFFICIENT * (channels + 1)

    @property
    def rows_per_coefficient(self) -> float:
        """Number of rows for each coefficient of an output of `full`."""
        return MIN_ROWS_PER_COEFFICIENT * self.rows / self.min_rows

    def full(self) -> AffineMap | None:
        """Return the best full affine map.

        Return None if `is_full` is False or there are too few rows.
        """
        if not self.is_full or self.rows < self.min_rows:
            return None
        (mean_x, mean_y), (centre_x, centre_y) = self._means()
        covariance = self._products[0] / self.rows - torch.outer(centre_x, centre_x)
        cross = self._products[1] / self.rows - torch.outer(centre_x, centre_y)
        # This is the minimum-norm solution if channels are linearly dependent.
        weight = torch.linalg.pinv(covariance, hermitian=True, rtol=1e-10) @ cross
        return AffineMap(weight, mean_y - mean_x @ weight)

    def mean(self) -> AffineMap:
        """Return the constant map to the output's mean."""
        (mean_x, mean_y), _ = self._means()
        weight = mean_x.new_zeros(len(mean_x), len(mean_y))
        return AffineMap(weight if len(mean_x) != len(mean_y) else weight[0], mean_y)

    def _means(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the means of x and y, and those relative to the shift."""
        if self._shift is None:
            raise Undefined("there are no samples to fit a map on")
        x, y = (total / self.rows for total in self._sums)
        return (x + self._shift[0], y + self._shift[1]), (x, y)
