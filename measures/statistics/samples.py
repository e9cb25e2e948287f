"""Validation and centring of samples (n, d)."""

from __future__ import annotations

import math
from collections.abc import Sized

import torch
from torch import Tensor

from nlbench.errors import NotFinite, RequestError, Undefined

EPSILON = torch.finfo(torch.float64).eps

# Error bound of an activation, in units of its dtype's spacing, for the rounding of the activation
# and of the layer before it. Linear layers with 8 to 512 inputs reach 2, with or without offsets.
ERROR_IN_ROUNDINGS = 8

# Maximum norm of float64's rounding errors relative to the norm of centred samples. This bounds the
# change in affinity, the most sensitive measure.
MAX_POOLED_NOISE = 3e-4


def as_samples(values: Tensor, name: str) -> Tensor:
    """Convert samples to float64, on the caller's device.

    Parameters
    ----------
    values : tensor of shape (n, d)
        Any real type. On a device without float64 (MPS) the result is on the CPU.
    name : str
        Name used in error messages.

    Raises
    ------
    nlbench.RequestError
        If the input is not a real tensor with two axes.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.Undefined
        If there are no columns.

    Examples
    --------
    >>> as_samples(torch.tensor([[1, 2]]), "x")
    tensor([[1., 2.]], dtype=torch.float64)
    """
    check_samples(values, name)
    return values.cpu().double() if values.device.type == "mps" else values.double()


def check_samples(values: Tensor, name: str) -> None:
    """Validate samples (n, d). See `as_samples` for the errors.

    Examples
    --------
    >>> check_samples(torch.tensor([[1, 2]]), "x")
    """
    if not isinstance(values, Tensor):
        raise RequestError(f"{name} is a {type(values).__name__}, expected a tensor (n, d)")
    if values.dim() != 2 or values.is_complex():
        received = f"{values.dtype} of shape {tuple(values.shape)}"
        raise RequestError(f"{name} is {received}, expected real numbers of shape (n, d)")
    if values.shape[1] == 0:
        raise Undefined(f"{name} has no columns")
    # Cheaper than testing every value: a finite sum has finite terms.
    if torch.isfinite(values.detach().sum()):
        return
    finite = torch.isfinite(values)
    if not finite.all():
        raise NotFinite(
            f"{name}: {(~finite).sum().item()} of {values.numel()} entries are not finite"
        )


def check_count(x: Sized, y: Sized, *, at_least: int = 2) -> int:
    """Validate and return the common number of samples of x (n, d) and y (n, k)."""
    n = len(x)
    if n != len(y):
        raise RequestError(f"x has {n} samples and y has {len(y)}, expected equal numbers")
    if n < at_least:
        raise Undefined(f"n = {n}: at least {at_least} samples are needed")
    return n


def centered(samples: Tensor) -> Tensor:
    """Subtract the mean of each column of an (n, d) tensor.

    The first sample is subtracted first, so that the mean is rounded at the scale of the data's
    spread, not of its offset, and a constant column becomes exactly zero.
    """
    shifted = samples - samples[0].detach()
    return shifted.sub_(shifted.mean(0))


def power_of_two(values: Tensor) -> float:
    """Return the largest power of two up to the largest magnitude, or 1/2 if all are zero.

    Division by it is exact, so a score that is independent of units is bitwise identical if the
    units change by a power of two, and no square underflows or overflows. It carries no gradient,
    which is correct for functions that don't depend on it.

    Examples
    --------
    >>> power_of_two(torch.tensor([[-5.0, 3.0]]))
    4.0
    """
    low, high = torch.aminmax(values.detach())
    peak = torch.maximum(-low, high).item()
    if not math.isfinite(peak):
        raise NotFinite("the range of the values is too large for float64")
    return float(2.0 ** (math.frexp(peak)[1] - 1))


def column_units(samples: Tensor) -> Tensor:
    """Return for each column (d,) the largest power of two up to its largest magnitude.

    Examples
    --------
    >>> column_units(torch.tensor([[-5.0, 0.25], [3.0, 0.375]]))
    tensor([4.0000, 0.2500])
    """
    peak = samples.abs().amax(0)
    if not torch.isfinite(peak).all():
        raise NotFinite("the range of the values is too large for float64")
    smallest = torch.full_like(peak, torch.finfo(peak.dtype).tiny)
    peak = torch.maximum(peak, smallest)
    # A quotient that is a power of two is exact; an exponential may not be.
    return peak / (2 * torch.frexp(peak).mantissa)


def rounding_norms(peaks: Tensor, n: int, rounding: float) -> Tensor:
    """Bound the norms (d,) of rounding errors in columns of n samples.

    Networks compute samples in low precision, so a column that depends linearly on others differs
    from their combination by rounding, which must not count as a direction. The peaks (d,) are the
    largest magnitudes, including offsets; `rounding` is that of `PreparedSamples`.
    """
    return ERROR_IN_ROUNDINGS * rounding * math.sqrt(n) * peaks


def varying(low: Tensor, high: Tensor, rounding: float = EPSILON) -> Tensor:
    """Return a mask (d,) of the columns that vary by more than the rounding of their magnitude."""
    return high - low > ERROR_IN_ROUNDINGS * rounding * torch.maximum(low.abs(), high.abs())


def varying_columns(samples: Tensor, rounding: float = EPSILON) -> Tensor:
    """Return a mask (d,) of the columns of an (n, d) tensor that vary. See `varying`."""
    return varying(samples.detach().amin(0), samples.detach().amax(0), rounding)


def is_resolved(
    low: Tensor, high: Tensor, norms: Tensor, n: int, rounding: float = EPSILON
) -> bool:
    """Return False if the rounding of float64 shows in the spread of samples.

    Samples of narrower types are always resolved: the probe `sites` compares them with float64. The
    norms (d,) are those of the columns after centring.

    Examples
    --------
    >>> x = 1.0 + 1e-14 * torch.arange(8, dtype=torch.float64)
    >>> is_resolved(x[:1], x[-1:], torch.linalg.vector_norm(x - x.mean())[None], 8)
    False
    """
    if rounding > EPSILON:
        return True
    peaks = torch.maximum(low.abs(), high.abs())
    # Rounding errors are uniform, so that their standard deviation is a spacing over √12. Values
    # from p to 2p have the spacing ε p for a power of two p. Equal values have no errors.
    exponents = torch.frexp(peaks).exponent - 1
    spacings = rounding * torch.where(low == high, 0.0, torch.exp2(exponents.to(peaks.dtype)))
    # Relative to the largest, so that no square underflows or overflows.
    unit = torch.maximum(norms.amax(), spacings.amax()).clamp(min=torch.finfo(norms.dtype).tiny)
    noise = math.sqrt(n / 12) * torch.linalg.vector_norm(spacings / unit)
    return bool(noise <= MAX_POOLED_NOISE * torch.linalg.vector_norm(norms / unit))


def unresolved_side(role: str) -> Undefined:
    """Return the error for an input or output whose spread is rounding, see `is_resolved`."""
    return Undefined(f"the spread of the {role} is too close to float64's rounding")


def constant_side(role: str, rounding: float, *, equal: bool) -> Undefined:
    """Return the error for an input or output in which no column varies.

    The samples are equal, or else differ by rounding.
    """
    if equal or rounding <= EPSILON:
        return Undefined(f"constant {role}")
    return Undefined(
        f"constant {role}: its spread is below float32's rounding: try --precision float64"
    )
