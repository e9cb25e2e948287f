"""Norm: the Frobenius norm of an activation's output minus its input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined, nearest
from nlbench.measure import Accumulator, MoreMeans
from nlbench.options import Option, OptionValue

from .papers import affinity_paper
from .statistics.moments import PairsMeasure
from .statistics.prepared import Samples, prepare_pair
from .statistics.samples import check_count, power_of_two

KINDS = ("relative", "absolute")


def change_norm(x: Samples, y: Samples, *, kind: str = "relative") -> Tensor:
    """Compute the Frobenius norm of the change an activation makes to its input.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        Input and output of an activation, any real type. Computed in float64.
    kind : {"relative", "absolute"}
        ‖x - y‖ / ‖x‖, which doesn't depend on n or on a common rescaling of x and y, or ‖x - y‖.

    Returns
    -------
    tensor, scalar, float64
        At least 0.

    Raises
    ------
    nlbench.Undefined
        If there are no samples or, with ``kind="relative"``, if the input is zero.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.RequestError
        If the shapes differ, or the kind is unknown.

    References
    ----------
    Q. Bouniot et al., "From Alexnet to Transformers: Measuring the Non-linearity of Deep
    Neural Networks with Affine Optimal Transport", CVPR 2025, appendix E.

    Examples
    --------
    >>> import torch
    >>> change_norm(torch.tensor([[3.0, -4.0]]), torch.tensor([[3.0, 0.0]])).item()
    0.8
    """
    if kind not in KINDS:
        raise RequestError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
    x, y = prepare_pair(x, y)
    check_count(x, y, at_least=1)
    change = _norm(x.values - y.values)
    if kind == "absolute":
        return change
    size = _norm(x.values)
    if size == 0:
        raise Undefined("zero input: the relative norm is not defined")
    return change / size


def _norm(values: Tensor) -> Tensor:
    """Compute the Frobenius norm without underflow or overflow when squaring."""
    unit = power_of_two(values) if values.numel() else 1.0
    return torch.linalg.vector_norm(values / unit) * unit


class _NormAccumulator(Accumulator):
    """Both norms, accumulated over all batches of a site in O(1) memory."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._n = 0
        self._change = 0.0
        self._size = 0.0

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        x, y = prepare_pair(x, y)
        self._n += len(x)
        self._change = math.hypot(self._change, _norm(x.values - y.values).item())
        self._size = math.hypot(self._size, _norm(x.values).item())

    def merged(self, other: _NormAccumulator) -> _NormAccumulator:
        """Return the accumulator of the batches of both."""
        merged = _NormAccumulator(self._kind)
        merged._n = self._n + other._n
        merged._change = math.hypot(self._change, other._change)
        merged._size = math.hypot(self._size, other._size)
        return merged

    def statistics(self) -> dict[str, float]:
        if self._n == 0:
            raise Undefined("no samples")
        absolute = self._change
        if self._size == 0:
            if self._kind == "relative":
                raise Undefined("zero input: the relative norm is not defined")
            return {"value": absolute}
        relative = absolute / self._size
        if self._kind == "relative":
            return {"value": relative, "absolute": absolute}
        return {"value": absolute, "relative": relative}


class Norm(PairsMeasure):
    r"""Frobenius norm of the difference between a site's output and input.

    All samples of the run form one matrix. By default the norm is relative to the input's, so that
    sites and models can be compared; the statistic ``absolute`` scales with the units of the
    activation and with the square root of the number of samples. Only the identity has norm 0: a
    scaling also has a nonzero norm, so a larger norm does not mean a more nonlinear activation.

    Definition
    ----------
    .. math::

        \frac{\|x - y\|_F}{\|x\|_F} \quad\text{or, with kind=absolute,}\quad \|x - y\|_F .

    Units
    -----
    None; those of the activation with ``kind=absolute``.

    Undefined
    ---------
    No samples, or a zero input.

    Cost
    ----
    One forward pass for all sites, O(n d) per site.

    Limits
    ------
    y = 2x has a norm of 1, so it measures change, not nonlinearity.

    Published code
    --------------
    The affinity paper uses the absolute norm, which scales with the units and with √n.
    """

    name: ClassVar[str] = "norm"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "2"
    options: ClassVar[Mapping[str, Option]] = {
        "kind": Option("relative", "norm relative to the input's norm, or absolute", choices=KINDS)
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("appendix E")

    @classmethod
    def scale_note(cls, options: Mapping[str, OptionValue]) -> str:
        """Describe how the value depends on units."""
        return "grows with the activations" if options.get("kind") == "absolute" else ""

    def accumulator(self) -> _NormAccumulator:
        """Create the accumulator for one site."""
        return _NormAccumulator(str(self.settings["kind"]))
