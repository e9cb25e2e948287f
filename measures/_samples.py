"""What every site measure asks of its input: two axes, finite numbers, a common n."""

from __future__ import annotations

import math
from collections.abc import Sized

import torch
from torch import Tensor

from nlbench.errors import NotFinite, RequestError, Undefined

__all__ = [
    "EPSILON",
    "as_samples",
    "centered",
    "check_count",
    "power_of_two",
    "rounding_norms",
    "unit_scaled",
    "varying",
    "varying_columns",
]

EPSILON = torch.finfo(torch.float64).eps

# How many roundings an activation may be off, its own and those of the layer that made it. Those
# of linear layers of 8 to 512 inputs, with and without offsets, come to about 2.
ROUNDINGS = 8


def as_samples(values: Tensor, name: str) -> Tensor:
    """Bring samples to float64, on the caller's device.

    Parameters
    ----------
    values : tensor of shape (n, d)
        Of any real type. Where the device has no float64 (MPS) the result is on the CPU.
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
    if not isinstance(values, Tensor):
        raise RequestError(f"{name} is a {type(values).__name__}, expected a tensor (n, d)")
    if values.dim() != 2 or values.is_complex():
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise RequestError(f"{name} is {got}, expected real numbers of shape (n, d)")
    if values.shape[1] == 0:
        raise Undefined(f"{name} has no columns")
    if values.device.type == "mps":
        values = values.cpu()
    values = values.to(torch.float64)
    # A finite sum has finite terms, and is found much sooner than all of them are looked at.
    if not torch.isfinite(values.detach().sum()):
        finite = torch.isfinite(values)
        if finite.all():
            return values
        raise NotFinite(
            f"{name}: {(~finite).sum().item()} of {values.numel()} entries are not finite"
        )
    return values


def check_count(x: Sized, y: Sized, *, at_least: int = 2) -> int:
    """Check that x (n, d) and y (n, k) have as many samples, and enough; return n.

    Raises
    ------
    nlbench.RequestError
        If the numbers of samples differ.
    nlbench.Undefined
        If there are too few.
    """
    n = len(x)
    if n != len(y):
        raise RequestError(f"x has {n} samples and y has {len(y)}, expected as many")
    if n < at_least:
        raise Undefined(f"n = {n}: at least {at_least} samples are needed")
    return n


def centered(samples: Tensor) -> Tensor:
    """Subtract the mean of each column of an (n, d) tensor.

    The first sample is subtracted beforehand: the mean is then rounded at the scale of
    the data's spread, not of its offset, and a constant column becomes exactly zero.
    """
    shifted = samples - samples[0].detach()
    return shifted.sub_(shifted.mean(0))


def unit_scaled(values: Tensor) -> Tensor:
    """Divide by the power of two that brings the largest magnitude into [1, 2).

    Exact, so a score that doesn't depend on units stays the same to the last bit when
    the units change by a power of two, and no square under- or overflows. The scale
    carries no gradient: it is only right for functions that don't depend on it.
    """
    return values / power_of_two(values)


def power_of_two(values: Tensor) -> float:
    """Give the largest power of two up to the largest magnitude; 1/2 where all are zero.

    Raises
    ------
    nlbench.NotFinite
        For an infinity, which a difference of finite values may be.
    """
    low, high = torch.aminmax(values.detach())
    peak = torch.maximum(-low, high).item()
    if not math.isfinite(peak):
        raise NotFinite("the range of the values is too large for float64")
    return float(2.0 ** (math.frexp(peak)[1] - 1))


def rounding_norms(peaks: Tensor, n: int, rounding: float) -> Tensor:
    """Norms (d,) that errors by rounding may have in columns of n samples.

    Samples are what a network has computed in a type of few digits: what depends on other
    columns exactly then differs from them by rounding, and is no direction of its own.

    Parameters
    ----------
    peaks : tensor of shape (d,)
        Largest magnitude of each column, offset included.
    n : int
    rounding : float
        See `Prepared`.
    """
    return ROUNDINGS * rounding * math.sqrt(n) * peaks


def varying(low: Tensor, high: Tensor) -> Tensor:
    """Which columns vary by more than float64's rounding of their own magnitude.

    Parameters
    ----------
    low, high : tensor of shape (d,)
        Smallest and largest value of each column.
    """
    return high - low > 8 * EPSILON * torch.maximum(low.abs(), high.abs())


def varying_columns(samples: Tensor) -> Tensor:
    """Which columns of an (n, d) tensor vary; see `varying`."""
    return varying(samples.detach().amin(0), samples.detach().amax(0))
