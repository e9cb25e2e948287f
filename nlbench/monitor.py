"""Measurements during training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.evaluation import combine, evaluate
from nlbench.measure import Measure
from nlbench.options import Settings
from nlbench.store.run import Run

MAX_TIME_FRACTION = 0.05
"""Maximum fraction of the time spent on measuring, with the default spacing."""


class Monitor:
    """Measure a model at intervals in its training loop.

    The model's weights, mode and gradients and the random state stay unchanged, so training
    is not affected.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : tensor, tuple, mapping, dataset or loader
        The samples to measure on; see `nlbench.evaluate`.
    measures : sequence of str or Measure class
    every : int, optional
        Number of steps between measurements. By default, they are spaced so that measuring takes
        at most 5 % of the time.
    labels, settings, name : optional
        See `nlbench.evaluate`.

    Attributes
    ----------
    steps : int
        Number of calls to `step`.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> monitor = Monitor(model, torch.randn(64, 4), ["r2"], every=2)
    >>> for _ in range(4):
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     optimizer.step()
    ...     _ = monitor.step()
    >>> monitor.run.scores["weights"].unique().tolist()
    ['step 2', 'step 4']
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Any],
        measures: str | Sequence[str | type[Measure]],
        *,
        every: int | None = None,
        labels: Tensor | bool | str | None = None,
        settings: Settings | None = None,
        name: str | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise RequestError(f"every={every}, expected at least 1")
        if isinstance(inputs, Iterator):
            raise RequestError(
                "inputs: an iterator can be read only once, expected a loader or tensor"
            )
        self.steps = 0
        self._model, self._inputs, self._measures = model, inputs, measures
        self._options = {"labels": labels, "settings": settings, "name": name}
        self._every = every
        self._runs: list[Run] = []
        self._next_time = 0.0

    def step(self) -> Run | None:
        """Count a training step; if a measurement is due, measure the model and return the run."""
        self.steps += 1
        if self._every is not None:
            return self.measure() if self.steps % self._every == 0 else None
        return self.measure() if time.perf_counter() >= self._next_time else None

    def measure(self) -> Run:
        """Measure the model now and return the run for this step."""
        start = time.perf_counter()
        models = {f"step {self.steps}": self._model}
        run = evaluate(models, self._inputs, self._measures, **self._options)  # type: ignore[arg-type]
        end = time.perf_counter()
        self._next_time = end + (end - start) * (1 / MAX_TIME_FRACTION - 1)
        if self._runs and self._runs[-1].records[0].subject.weights == f"step {self.steps}":
            self._runs.pop()
        self._runs.append(run)
        return run

    @property
    def run(self) -> Run:
        """All measured steps as one run.

        Raises
        ------
        nlbench.RequestError
            If no step has been measured.
        """
        if not self._runs:
            raise RequestError("no step has been measured; call step() in the training loop")
        return combine(self._runs)
