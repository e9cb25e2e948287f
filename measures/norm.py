"""Norm: how far an activation moves its input, in the Frobenius norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined, nearest
from nlbench.measure import Accumulator, MoreMeans
from nlbench.options import Option

from ._moments import PairsMeasure
from ._prepared import Samples, prepared
from ._samples import check_count, power_of_two
from ._sources import affinity_paper

__all__ = ["Norm", "change_norm"]

KINDS = ("relative", "absolute")


def change_norm(x: Samples, y: Samples, *, kind: str = "relative") -> Tensor:
    """Frobenius norm ‖x - y‖ of what an activation changes, or its ratio to ‖x‖.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        Input and output of an activation, any real type. The work is done in float64.
    kind : {"relative", "absolute"}
        ‖x - y‖ / ‖x‖, which depends neither on n nor on common units, or ‖x - y‖.

    Returns
    -------
    tensor, scalar, float64
        At least 0.

    Raises
    ------
    nlbench.Undefined
        Without samples; relative, for an input that is zero.
    nlbench.NotFinite
        For NaN or infinities.
    nlbench.RequestError
        For shapes that differ, or an unknown kind.

    Examples
    --------
    >>> import torch
    >>> change_norm(torch.tensor([[3.0, -4.0]]), torch.tensor([[3.0, 0.0]])).item()
    0.8
    """
    if kind not in KINDS:
        raise RequestError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
    before, after = _pair(x, y)
    check_count(before, after, at_least=1)
    change = _norm(before - after)
    if kind == "absolute":
        return change
    size = _norm(before)
    if size == 0:
        raise Undefined("zero input: there is nothing to relate the change to")
    return change / size


def _pair(x: Samples, y: Samples) -> tuple[Tensor, Tensor]:
    x, y = prepared(x, "x"), prepared(y, "y")
    if x.shape != y.shape:
        raise RequestError(f"x is {tuple(x.shape)} and y is {tuple(y.shape)}, expected one shape")
    return x.values, y.values


def _norm(values: Tensor) -> Tensor:
    """Frobenius norm whose squares neither under- nor overflow."""
    unit = power_of_two(values) if values.numel() else 1.0
    norm: Tensor = torch.linalg.vector_norm(values / unit) * unit
    return norm


class _NormAccumulator(Accumulator):
    """All batches of a site as one; two numbers of memory."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._n, self._change, self._size = 0, 0.0, 0.0

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        """Take in one batch."""
        before, after = _pair(x, y)
        self._n += len(before)
        self._change = math.hypot(self._change, _norm(before - after).item())
        self._size = math.hypot(self._size, _norm(before).item())

    def statistics(self) -> dict[str, float]:
        """Both norms of all samples together, the chosen one as the value."""
        if self._n == 0:
            raise Undefined("no samples")
        absolute = self._change
        if self._size == 0:
            if self._kind == "relative":
                raise Undefined("zero input: there is nothing to relate the change to")
            return {"value": absolute}
        relative = absolute / self._size
        if self._kind == "relative":
            return {"value": relative, "absolute": absolute}
        return {"value": absolute, "relative": relative}


class Norm(PairsMeasure):
    """Frobenius norm of the difference between a site's output and input.

    Relative to the input's norm by default, which makes sites and models comparable; the
    absolute norm, which grows with units and with the root of the number of samples, is
    the statistic ``absolute`` beside it. Over all samples of the run as one matrix. The
    identity has 0, and so has no other map: a linear map that scales has a norm too, so
    that more of it does not by itself mean more nonlinear.
    """

    name: ClassVar[str] = "norm"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "1"
    options: ClassVar[Mapping[str, Option]] = {
        "kind": Option(
            "relative", "the value: relative to the input's norm, or absolute", choices=KINDS
        )
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("appendix E")

    def accumulator(self) -> _NormAccumulator:
        """Make what takes in the batches of one site."""
        return _NormAccumulator(str(self.settings["kind"]))
