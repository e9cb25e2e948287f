"""Site measures from ``torchmetrics.Metric`` objects.

torchmetrics is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nlbench.citation import Source
from nlbench.errors import NotFinite, PluginError, RequestError, Undefined, one_line

from .pooled import Accumulator, PooledMeasure

if TYPE_CHECKING:
    from torch import Tensor


class MetricMeasure(PooledMeasure):
    """A site measure that passes a site's input and output to a metric. See `metric_measure`."""

    metric: ClassVar[Any]

    def accumulator(self) -> Accumulator:
        """Create the metric for one site."""
        return _SiteMetric(self.metric)


def metric_measure(metric: Any, name: str | None = None) -> type[MetricMeasure]:
    """Create a site measure from a ``torchmetrics.Metric`` of two tensors.

    Each site has its own copy of the metric, updated with every batch as ``metric.update(x, y)``:
    the input is torchmetrics' ``preds``, the output its ``target``. Both are converted to float64.
    A metric with ``num_outputs=1`` that rejects a matrix is computed per column, and the value is
    the mean over columns. Columns whose metric is NaN, such as constant columns, are excluded and
    counted in the remark. The name is by default the class name in lower case.

    No bounds are declared, since those of torchmetrics are only plot limits, and no direction,
    since a similarity of input and output is not linearity.

    Examples
    --------
    >>> import torch, torchmetrics
    >>> r2 = metric_measure(torchmetrics.R2Score())
    >>> r2.name, r2.version.partition(",")[0] == f"torchmetrics {torchmetrics.__version__}"
    ('r2score', True)
    """
    kind = type(metric)
    name = name or kind.__name__.lower()
    attributes = {
        "__doc__": f"{kind.__name__} from torchmetrics, between a site's input and output.",
        "__module__": kind.__module__,
        "name": name,
        "version": _metric_version(metric),
        "source": Source(f"torchmetrics, {kind.__name__}"),
        "metric": metric,
    }
    return type(name, (MetricMeasure,), attributes)


def _metric_version(metric: Any) -> str:
    """Return torchmetrics' version and the metric's configuration."""
    import torchmetrics

    class EmptyMetric(torchmetrics.Metric):
        def update(self) -> None: ...
        def compute(self) -> None: ...

    known = {*vars(EmptyMetric()), *metric._defaults}
    plain = (bool, int, float, str, type(None), tuple)
    settings = [
        f", {name}={value!r}"
        for name, value in sorted(vars(metric).items())
        if name not in known and isinstance(value, plain)
    ]
    return f"torchmetrics {torchmetrics.__version__}{''.join(settings)}"


class _SiteMetric(Accumulator):
    """The metric for one site: one instance for all columns, or one per column."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._metrics: list[Any] = []
        self._is_per_column = False
        self._defined = self._columns = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Update the metric with one batch."""
        x, y = (_to_finite_float64(values, role) for values, role in ((x, "input"), (y, "output")))
        try:
            if not self._metrics:
                self._create_metrics(x, y)
            if not self._is_per_column:
                self._metrics[0].update(x, y)
            else:
                for metric, column, target in zip(self._metrics, x.T, y.T, strict=True):
                    metric.update(column, target)
        except (ValueError, RuntimeError, IndexError) as error:
            raise RequestError(f"{self._kind}: {one_line(error)}") from error

    def _create_metrics(self, x: Tensor, y: Tensor) -> None:
        try:
            self._clone(x).update(x, y)
        except (ValueError, RuntimeError):
            if getattr(self._metric, "num_outputs", None) != 1 or x.shape != y.shape:
                raise
            self._is_per_column = True
        self._metrics = [self._clone(x) for _ in range(x.shape[1] if self._is_per_column else 1)]

    def _clone(self, like: Tensor) -> Any:
        metric = self._metric.clone()
        metric.reset()
        return metric.set_dtype(like.dtype).to(like.device)

    @property
    def _kind(self) -> str:
        return type(self._metric).__name__

    def statistics(self) -> Mapping[str, float]:
        """Return the metric's value, or the mean of its values if there are several."""
        import torch

        try:
            scores = [metric.compute() for metric in self._metrics]
        except (ValueError, RuntimeError) as error:
            raise RequestError(f"{self._kind}: {one_line(error)}") from error
        if not all(isinstance(score, torch.Tensor) for score in scores):
            raise PluginError(
                f"{self._kind} returns a {type(scores[0]).__name__}, expected a tensor"
            )
        numbers = torch.cat([score.double().flatten() for score in scores])
        defined = numbers[~numbers.isnan()]
        self._defined, self._columns = len(defined), len(numbers)
        if not len(defined):
            raise Undefined(f"{self._kind} is NaN")
        return {"value": float(defined.mean())}

    def remark(self) -> str:
        """Return the number of columns with a value, if some have none."""
        if self._defined == self._columns:
            return ""
        return f"mean of {self._defined} of {self._columns} columns; the others are NaN"


def _to_finite_float64(values: Tensor, role: str) -> Tensor:
    import torch

    values = values.detach()
    values = (values.cpu() if values.device.type == "mps" else values).to(torch.float64)
    if not torch.isfinite(values).all():
        raise NotFinite(f"the {role} has entries that are not finite")
    return values
