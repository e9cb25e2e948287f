"""Sites, and the observations that site measures receive."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.introspection.distinct_rows import RowNumbers
    from nlbench.introspection.module_stack import CallId


T = TypeVar("T")

Pair: TypeAlias = "SiteBatch | SharedBatch"
"""Input and output of an activation, as passed to shared functions."""


class SharedBatch:
    """A batch of one site, with the results that the measures of one package share.

    Its x and y are copied on first access.
    """

    def __init__(self, batch: SiteBatch, clock: Callable[[], float] | None = None) -> None:
        self._batch = batch
        self._clock = clock or time.perf_counter
        self.rounding = batch.rounding
        self.sources = batch.sources
        # The result or error of each function, and the seconds it would take on its own.
        self._results: dict[Callable[[Pair], Any], tuple[Any, float]] = {}
        self.lent = 0.0  # seconds saved so far: the cost of every result that was requested again

    @cached_property
    def x(self) -> Tensor:
        """Copy of the input (n, d)."""
        return self._batch.x.clone()

    @cached_property
    def y(self) -> Tensor:
        """Copy of the output (n, d)."""
        return self._batch.y.clone()

    def shared(self, function: Callable[[Pair], T]) -> T:
        """Return a function's result on the batch, computing it on the first call."""
        if function in self._results:
            self.lent += self._results[function][1]
        else:
            self._results[function] = self._compute(function)
        result: T | Exception = self._results[function][0]
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result

    def _compute(self, function: Callable[[Pair], Any]) -> tuple[Any, float]:
        lent = self.lent
        start = self._clock()
        try:
            result = function(self)
        except Exception as error:
            # Raised again for each caller.
            result = error
        # On its own, the function would also have computed the shared results that it used.
        return result, self._clock() - start + self.lent - lent


@dataclass(frozen=True)
class Site:
    """One call of one activation function in one forward pass.

    Parameters
    ----------
    name : str
        ``layer1.0.relu``, its second call ``layer1.0.relu:1``, a functional call
        ``Mixed_5b.branch1x1/relu``.
    kind : str
        ``relu``, ``gelu``, …; the class name in lower case for a module that computes an unknown
        activation from several operations.
    index : int
        Index in call order, from 0.
    shape : tuple of int
        Shape of one sample's activation, without the batch axis.
    channel_axis : int
        Channel axis after the batch axis is moved to 0.
    assumed : bool
        True if no operation determines the channel axis; it is then the usual one for the shape,
        see `nlbench.introspection.axes.Layouts.of`.
    role : {"activation", "gate", "attention", "softcap", "block", "mlp", "span", "module"}
        ``gate``: a sigmoid whose output only multiplies another tensor, or a gated linear unit.
        ``attention``: a softmax over several rows of logits per sample, or a call on the logits
        that enter one. ``softcap``: c tanh(x / c). For module calls, the role is the kind of
        place, which may also be ``attention``.
    where : str
        File, line and preceding module of a functional call, as ``net.py:11, after conv1``.
    problem : str
        Reason why the place can't be measured; empty if it can.
    """

    name: str
    kind: str
    index: int
    shape: tuple[int, ...]
    channel_axis: int
    assumed: bool = False
    role: str = "activation"
    where: str = ""
    problem: str = ""


class UnreducedResults(dict[str, "tuple[Tensor, Tensor]"]):
    """Results (n,) of functions applied to the unreduced input and output.

    In place of a result there may be the function's error, which is raised on access.
    """

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the results for input and output."""
        pair = super().__getitem__(name)
        for result in pair:
            if isinstance(result, Exception):
                raise result
        return pair

    def map(self, function: Callable[[Tensor], Tensor]) -> UnreducedResults:
        """Apply a function to all results."""
        return UnreducedResults(
            (name, tuple(r if isinstance(r, Exception) else function(r) for r in pair))  # type: ignore[misc]
            for name, pair in self.items()
        )


@dataclass(frozen=True)
class SiteBatch:
    """One batch at one site, as passed to site measures.

    Parameters
    ----------
    site : Site
    batch : int
        Index of the batch, from 0.
    x, y : tensor of shape (n, d)
        Input and output of the activation after reduction, in the type that the model ran in (at
        least float32) and on its device. n is the number of samples in the batch, or of selected
        positions if rows are tokens. For a gated linear unit, x is the gated half.
    unreduced : mapping of str to pair of tensors of shape (n,)
        Results of the functions that the measure declares in ``unreduced``, applied to the
        unreduced input and output. If a function failed, accessing its result raises the error.
    sample_index : tensor of shape (n,), optional
        Sample index within the batch for each row, if rows are tokens.
    samples : int
        Number of samples in the batch; 0 if each row is a sample.
    rounding : tuple of float
        Relative errors of x and y if the network ran in a type narrower than float32, else 0.
    sources : RowNumbers, optional
        Number of each row's sample among the distinct samples of the pass; None if unknown.
    call, last : CallId, optional
        Position of the call in the forward pass. For several consecutive calls, those that receive
        the input and return the output; otherwise, `last` is None.
    argument : int, str or None
        Position or keyword of a module's input; None for activations.
    result : int, str or None
        Position or key of the output in what a module returns; None if it is all of it.
    batch_axis : int or None
        Batch axis of the activation's own layout; None if it is unknown.
    row_order : {"", "contiguous", "interleaved", "reordered"}
        Order of the rows where the batch axis also holds positions; see `row_order`.
        ``reordered`` if the network had reordered the samples. The rows of x and y are in order.
    is_last : bool
        True if it is known that no batch of the site follows.
    borrowed : SharedBatch, optional
        Results shared with other measures during a pass.
    """

    site: Site
    batch: int
    x: Tensor
    y: Tensor
    unreduced: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sample_index: Tensor | None = None
    samples: int = 0
    rounding: tuple[float, float] = (0.0, 0.0)
    sources: RowNumbers | None = field(default=None, repr=False, compare=False)
    call: CallId | None = field(default=None, repr=False, compare=False)
    last: CallId | None = field(default=None, repr=False, compare=False)
    argument: int | str | None = field(default=None, repr=False, compare=False)
    result: int | str | None = field(default=None, repr=False, compare=False)
    batch_axis: int | None = field(default=None, repr=False, compare=False)
    row_order: str = field(default="", repr=False, compare=False)
    is_last: bool = field(default=False, repr=False, compare=False)
    borrowed: SharedBatch | None = field(default=None, repr=False, compare=False)
    _borrowed_seconds: dict[Callable[[Pair], Any], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def place(self) -> str:
        """Name of the site."""
        return self.site.name

    @property
    def count(self) -> int:
        """Number of samples, or of sequences if rows are tokens."""
        return len(self.x) if self.sample_index is None else self.samples

    def select_rows(self, index: Tensor) -> SiteBatch:
        """Return the batch with some of its rows (m,), without shared results.

        If rows are tokens, `index` consists of whole samples.

        Examples
        --------
        >>> import torch
        >>> x = torch.tensor([[-1.0], [2.0], [3.0]])
        >>> batch = SiteBatch(Site("relu", "relu", 0, (1,), 1), 0, x, x.relu())
        >>> batch.select_rows(torch.tensor([0, 2])).y
        tensor([[0.],
                [3.]])
        """
        import torch

        sample_index = self.sample_index
        samples = index if sample_index is None else torch.unique(sample_index[index])
        unreduced = UnreducedResults(self.unreduced.items())
        return replace(
            self,
            x=self.x[index],
            y=self.y[index],
            unreduced=unreduced.map(lambda results: results[samples.to(results.device)]),
            sample_index=None if sample_index is None else sample_index[index],
            samples=len(samples),
            sources=self.sources and self.sources.select_rows(index),
            borrowed=None,
        )

    @property
    def borrowed_seconds(self) -> float:
        """Seconds that other measures spent on results that this measure took from `shared`."""
        return sum(self._borrowed_seconds.values())

    def shared(self, function: Callable[[Pair], T]) -> T:
        """Apply a function to the batch, once for all measures of a package.

        Parameters
        ----------
        function : callable
            Receives an object with x, y and `shared`. It must be deterministic, and either
            defined at module level or a method of an immutable object: a lambda would be a new
            function for each batch.

        Returns
        -------
        object
            The function's result. Measures of one package get the same object and must not
            modify it.

        Raises
        ------
        Exception
            The function's error, raised for every measure that calls it.

        Examples
        --------
        >>> def change(batch):
        ...     return (batch.y - batch.x).abs()
        >>> import torch
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> batch = SiteBatch(Site("relu", "relu", 0, (1,), 1), 0, x, x.relu())
        >>> batch.shared(change).sum()
        tensor(1.)
        """
        if self.borrowed is None:
            return function(self)
        before = self.borrowed.lent
        try:
            return self.borrowed.shared(function)
        finally:
            self._borrowed_seconds.setdefault(function, self.borrowed.lent - before)
