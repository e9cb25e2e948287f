"""Measurements during training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.evaluation import combine, compare_weights, evaluate, read_parameters
from nlbench.measure import Measure
from nlbench.options import Settings
from nlbench.store.run import Run
from nlbench.weight_linearity import check_since, comparison_row

if TYPE_CHECKING:
    import pandas as pd

    from nlbench.subjects.facts import SubjectFacts

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
    weight_linearity : {"previous", "first"}, optional
        Compare the model with its linearisation in the weights at the previous measurement, or at
        the beginning, whose weights are kept. Its time counts as measuring.

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
        weight_linearity: str | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise RequestError(f"every={every}, expected at least 1")
        if isinstance(inputs, Iterator):
            raise RequestError(
                "inputs: an iterator can be read only once, expected a loader or tensor"
            )
        self.steps = 0
        self._model = model
        self._inputs = inputs
        self._measures = measures
        self._options = {"labels": labels, "settings": settings, "name": name}
        self._every = every
        self._runs: list[Run] = []
        self._next_time = 0.0
        self._since = weight_linearity
        self._changes: dict[str, dict[str, Any]] = {}
        if weight_linearity is not None:
            check_since(weight_linearity)
            self._checkpoint = self._copy_weights()

    def step(self) -> Run | None:
        """Count a training step and measure the model if a measurement is due.

        Return the run, or None if no measurement was due.
        """
        self.steps += 1
        if self._every is not None:
            return self.measure() if self.steps % self._every == 0 else None
        return self.measure() if time.perf_counter() >= self._next_time else None

    def measure(self) -> Run:
        """Measure the model now and return the run for this step."""
        start = time.perf_counter()
        models = {f"step {self.steps}": self._model}
        run = evaluate(models, self._inputs, self._measures, **self._options)  # type: ignore[arg-type]
        if self._since is not None:
            self._compare_weights(run.records[0].subject)
        end = time.perf_counter()
        self._next_time = end + (end - start) * (1 / MAX_TIME_FRACTION - 1)
        if self._runs and self._runs[-1].records[0].subject.weights == f"step {self.steps}":
            self._runs.pop()
        self._runs.append(run)
        return run

    def _copy_weights(self) -> tuple[str, dict[str, Tensor]]:
        weights = read_parameters(self._model)
        return f"step {self.steps}", {name: value.clone() for name, value in weights.items()}

    def _compare_weights(self, now: SubjectFacts) -> None:
        label, weights = self._checkpoint
        if label == now.weights:
            return
        options: dict[str, Any] = {n: self._options[n] for n in ("labels", "settings")}
        compare = partial(compare_weights, weights, self._model, self._inputs, **options)
        self._changes[now.weights] = comparison_row(label, now, compare)
        if self._since == "previous":
            self._checkpoint = self._copy_weights()

    def weight_linearity(self) -> pd.DataFrame:
        """Return the comparisons in the weights. See `nlbench.weight_linearity.WeightLinearity`.

        One row per measured step. In the first, the model is compared with its weights when the
        monitor was created.

        Raises
        ------
        nlbench.RequestError
            If no step has been compared.
        """
        import pandas as pd

        if self._since is None:
            raise RequestError('pass weight_linearity="previous" or "first" to nlbench.Monitor')
        if not self._changes:
            raise RequestError("no step has been measured; call step() in the training loop")
        return pd.DataFrame(list(self._changes.values()))

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
