"""Activation state: the entropy of units' binary states (input above or below the kink)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined
from nlbench.measure import Accumulator, MoreMeans, PooledMeasure, Result
from nlbench.options import Option
from nlbench.probes.sites.site import SiteBatch

from .papers import bibtex
from .path_measure import add_means
from .statistics.prepared import PreparedSamples, Samples, prepare_batch, prepare_samples


def state_entropy(x: Samples, *, kink: float = 0.0) -> Tensor:
    """Compute the entropy of each unit's state, in bits.

    H = -p log₂ p - (1 - p) log₂(1 - p), where p is the fraction of samples for which the unit's
    input is above its kink.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Inputs of an activation, any real type.
    kink : float

    Returns
    -------
    tensor of shape (d,), float64
        In [0, 1]; 0 for a unit whose input is always on the same side of the kink.

    Raises
    ------
    nlbench.Undefined
        If there are fewer than two samples.
    nlbench.NotFinite
        If a value is NaN or infinite.

    References
    ----------
    V. Quétu, Z. Liao and E. Tartaglione, "The Simpler The Better: An Entropy-Based Importance
    Metric To Reduce Neural Networks' Depth", ECML PKDD 2024, section 3.

    Examples
    --------
    >>> state_entropy(torch.tensor([[1.0, 2.0], [-1.0, 3.0], [-2.0, 1.0], [3.0, 5.0]]))
    tensor([1., 0.], dtype=torch.float64)
    """
    on, n = _counts(prepare_samples(x, "x"), kink)
    return _entropy(on, n)


def _counts(x: PreparedSamples, kink: float) -> tuple[Tensor, int]:
    # Converted first, since PyTorch sums booleans slowly.
    return (x.values.detach() > kink).double().sum(0), len(x)


def _entropy(on: Tensor, n: int) -> Tensor:
    if n < 2:
        raise Undefined(f"n = {n}: at least 2 samples are needed")
    fractions = torch.stack([on, n - on]) / n
    return torch.special.entr(fractions).sum(0) / math.log(2)


def states(observation: SiteBatch) -> PreparedSamples:
    """Return a site's inputs with one column per unit.

    The positions of flattened activations are treated as samples of their channel.
    """
    x, _ = observation.shared(prepare_batch)
    site = observation.site
    shape = site.shape
    axis = site.channel_axis
    positions, rest = divmod(x.shape[1], math.prod(shape))
    if positions > 1 and not rest:
        # The network folds positions into the axis of samples, so they are not in the site's shape.
        shape = (positions, *shape)
        axis = max(axis, 1) + 1
    if len(shape) < 2 or x.shape[1] != math.prod(shape):
        return x
    channels_last = x.values.reshape(len(x), *shape).movedim(axis, -1)
    return PreparedSamples(channels_last.flatten(0, -2), x.rounding)


class _StateAccumulator(Accumulator):
    """Number of samples above the kink, for each unit."""

    def __init__(self, kink: float) -> None:
        self._kink = kink
        self._n = 0
        self._on: Tensor | None = None

    def add(self, x: Samples, y: Samples) -> None:
        on, n = _counts(prepare_samples(x, "x"), self._kink)
        if self._on is not None and len(self._on) != len(on):
            raise RequestError(f"a batch has {len(on)} units, earlier ones had {len(self._on)}")
        self._on, self._n = on if self._on is None else self._on + on, self._n + n

    def merged(self, other: _StateAccumulator) -> _StateAccumulator:
        """Return the accumulator of the batches of both."""
        merged = _StateAccumulator(self._kink)
        merged._n = self._n + other._n
        merged._on = other._on if self._on is None else self._on
        if self._on is not None and other._on is not None:
            merged._on = self._on + other._on
        return merged

    def statistics(self) -> Mapping[str, float]:
        if self._on is None:
            raise Undefined("no samples")
        return {
            "value": _entropy(self._on, self._n).mean().item(),
            "dead": (self._on == 0).double().mean().item(),
            "always_on": (self._on == self._n).double().mean().item(),
        }


class ActivationState(PooledMeasure):
    r"""Mean entropy, in bits, of the units' binary states (input above or below the kink).

    ``dead`` and ``always_on`` are the fractions of units that are always below or always above.
    With ``sites.reduction=flatten`` the positions of a channel are treated as samples of one unit.
    By default positions are averaged first, as in EASIER's code, which gives a different value.
    Identity activations also have a positive entropy, so the measure has no direction.

    Definition
    ----------
    .. math::

        \operatorname{mean}_u H(p_u), \qquad H(p) = -p \log_2 p - (1 - p) \log_2 (1 - p),

    over units u, where :math:`p_u` is the fraction of samples with input above ``kink``.

    Units
    -----
    Bits per unit.

    Undefined
    ---------
    Fewer than two samples.

    Cost
    ----
    One forward pass for all sites, O(n d) per site.

    Limits
    ------
    A site with a single kink is affine on the samples if its entropy is 0. A large entropy doesn't
    show that the kink matters for the output. For smooth activations the state is the input's sign.

    Published code
    --------------
    It averages over positions before taking the sign, as the default reduction does here.

    Examples
    --------
    Standard normal inputs, and the same inputs shifted by 1: H(Φ(0)) and H(Φ(1)).

    >>> points = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    >>> x = torch.distributions.Normal(0.0, 1.0).icdf(points)[:, None]
    >>> [round(state_entropy(x + shift).item(), 3) for shift in (0, 1)]
    [1.0, 0.631]
    """

    name: ClassVar[str] = "activation-state"
    version: ClassVar[str] = "2"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    more_means: ClassVar[MoreMeans] = "neither"
    options: ClassVar[Mapping[str, Option]] = {
        "kink": Option(0.0, "input at which a unit's state changes", minimum=-1e6, maximum=1e6)
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        'V. Quétu, Z. Liao, E. Tartaglione, "The Simpler The Better: An Entropy-Based Importance '
        "Metric To Reduce Neural Networks' Depth\", ECML PKDD 2024",
        "section 3, entropy of a neuron's state",
        bibtex("quetu2024simpler"),
    )

    def samples(self, observation: SiteBatch) -> tuple[PreparedSamples, PreparedSamples]:
        """Return the inputs, one column per unit."""
        x = states(observation)
        return x, x

    def accumulator(self) -> Accumulator:
        """Create the accumulator for one site."""
        return _StateAccumulator(float(self.settings["kink"]))

    def compute(self) -> Result:
        """Return the value of each site, and the means over sites."""
        return add_means(super().compute(), ("dead", "always_on"))
