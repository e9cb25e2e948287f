"""NASWOT: how distinct a network's activation patterns are for different samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, Undefined
from nlbench.measure import Measure, MoreMeans, Result, Value
from nlbench.options import Option
from nlbench.probes.sites.site import SiteBatch

from .linear_algebra.products import outer_products
from .papers import bibtex
from .statistics.prepared import PreparedSamples, Samples, prepare_batch
from .statistics.samples import check_samples

SAMPLES = 128

# Number of units up to which a sum of signs is exact in float32, and small enough for the cache.
MAX_EXACT_UNITS = 2**14


def pattern_kernel(x: Samples) -> Tensor:
    """Count, for each pair of samples, the units that have the same state.

    A unit's state is the sign of its input. The kernels of a network's activations add up to the
    kernel of all its units.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Inputs of an activation, any real type.

    Returns
    -------
    tensor of shape (n, n), float64
        d minus the Hamming distances between the samples' patterns of states.

    Raises
    ------
    nlbench.NotFinite
        If a value is NaN or infinite.

    References
    ----------
    J. Mellor, J. Turner, A. Storkey and E. J. Crowley, "Neural Architecture Search without
    Training", ICML 2021, equation 2.

    Examples
    --------
    >>> pattern_kernel(torch.tensor([[1.0, 2.0, -1.0], [1.0, -2.0, -3.0]]))
    tensor([[3., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    if isinstance(x, PreparedSamples):
        return _kernel(x.values.detach() > 0)
    check_samples(x, "x")
    return _kernel(x.detach() > 0)


def _kernel(on: Tensor) -> Tensor:
    on = on.cpu() if on.device.type == "mps" else on  # MPS has no double precision.
    kernel = torch.zeros(len(on), len(on), dtype=torch.float64, device=on.device)
    for part in torch.split(on, MAX_EXACT_UNITS, 1):
        signs = part.to(torch.float32).mul_(2).sub_(1)
        kernel += outer_products(signs, signs)
    return (kernel + on.shape[1]) / 2


def naswot_score(kernel: Tensor) -> Tensor:
    """Compute log |det K| of a pattern kernel K.

    Parameters
    ----------
    kernel : tensor of shape (n, n)
        See `pattern_kernel`.

    Returns
    -------
    tensor, scalar, float64

    Raises
    ------
    nlbench.Undefined
        If there are fewer than two samples, or the kernel is singular, as it is if two samples
        have the same pattern.

    Examples
    --------
    >>> round(naswot_score(torch.tensor([[3.0, 2.0], [2.0, 3.0]])).exp().item(), 9)
    5.0
    """
    n = len(kernel)
    if n < 2:
        raise Undefined(f"n = {n}: at least 2 samples are needed")
    is_repeated = torch.tril(kernel == kernel.diagonal()[:, None], -1).any(1)
    if is_repeated.any():
        distinct = n - int(is_repeated.sum())
        raise Undefined(f"n = {n} samples, but different patterns: {distinct}")
    eigenvalues = torch.linalg.eigvalsh(kernel.double())
    if eigenvalues[0] <= n * torch.finfo(torch.float64).eps * eigenvalues[-1]:
        raise Undefined(f"the kernel of {n} samples is singular: there are too few units")
    return eigenvalues.log().sum()


class Naswot(Measure):
    r"""Logarithm of the determinant of the kernel of activation patterns.

    The kernel counts the units whose inputs have the same sign for two samples: over all observed
    sites for the summary, at one site for the value of a place. Scores depend on the numbers of
    samples and of units, so only scores for the same number of samples are comparable; the first
    ``naswot.samples`` are used. The score is undefined if two samples have the same pattern; the
    reason then states the number of distinct patterns.

    Definition
    ----------
    .. math::

        \log |\det K|, \qquad K_{ij} = N - d_H(c_i, c_j),

    where :math:`c_i` are the signs of the inputs of all N units for sample i, and :math:`d_H` is
    the Hamming distance.

    Units
    -----
    Nats.

    Undefined
    ---------
    Samples with the same pattern, or more samples than independent units: the kernel is singular.

    Cost
    ----
    One forward pass for all sites, and memory for the states of the compared samples.

    Limits
    ------
    It grows with the number of units and of samples. It measures how patterns differ, not how
    nonlinear a unit is.

    Published code
    --------------
    It treats every position as a unit (``sites.reduction=flatten`` here), counts only ReLUs, and
    compares the 128 samples of one batch of training data.
    """

    name: ClassVar[str] = "naswot"
    version: ClassVar[str] = "2"
    probe: ClassVar[str] = "sites"
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    options: ClassVar[Mapping[str, Option]] = {
        "samples": Option(SAMPLES, "number of samples, from the first", minimum=2, maximum=10_000)
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "units")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        'J. Mellor, J. Turner, A. Storkey, E. J. Crowley, "Neural Architecture Search without '
        'Training", ICML 2021',
        "equation 2, and the logarithm of the kernel's determinant",
        bibtex("mellor2021neural"),
    )

    def reset(self) -> None:
        """Discard all states."""
        # States (n, d) of the first samples at each site, batch by batch.
        self._sites: dict[str, list[Tensor]] = {}
        self._failed: dict[str, str] = {}

    def update(self, observation: SiteBatch) -> None:
        """Add one batch of one site."""
        place = observation.place
        states = self._sites.setdefault(place, [])
        try:
            x, _ = observation.shared(prepare_batch)
        except NotFinite as error:
            self._failed[place] = str(error)
            return
        remaining = int(self.settings["samples"]) - sum(map(len, states))
        states.append(x.values[:remaining] > 0)

    def compute(self) -> Result:
        """Return the score over all sites, and the score of each site."""
        for place, reason in self._failed.items():
            value = Value.missing(place, "failed", reason)
            return Result.missing("failed", f"{place}: {reason}", (value,))
        kernels = {place: _kernel(torch.cat(states)) for place, states in self._sites.items()}
        if not kernels:
            return Result.missing("undefined", "no place to measure")
        # A value that does not depend on the input has one row per batch.
        n = max(map(len, kernels.values()))
        values = tuple(
            _value(place, kernel)
            if len(kernel) == n
            else Value.missing(place, "undefined", f"it has {len(kernel)} rows, other places {n}")
            for place, kernel in kernels.items()
        )
        whole = _value("", torch.stack([k for k in kernels.values() if len(k) == n]).sum(0))
        return Result(whole.statistics, values, whole.n, whole.status, whole.reason)


def _value(place: str, kernel: Tensor) -> Value:
    try:
        return Value(place, {"value": naswot_score(kernel).item()}, len(kernel))
    except Undefined as error:
        return Value.missing(place, "undefined", str(error), len(kernel))
