"""Measures and their results.

There are three ways to write a measure: decorate a function of a site's input and output with
`site_measure`; derive a class from `PooledMeasure`, which has one accumulator per site; or derive a
class from `Measure`, for any probe.
"""

from .base import INVARIANCES, Measure, MoreMeans
from .pooled import Accumulator, FunctionMeasure, PooledMeasure, site_measure
from .result import Parts, Result, Status, Value, summarize
from .torchmetrics_adapter import metric_measure

__all__ = [
    "INVARIANCES",
    "Accumulator",
    "FunctionMeasure",
    "Measure",
    "MoreMeans",
    "Parts",
    "PooledMeasure",
    "Result",
    "Status",
    "Value",
    "metric_measure",
    "site_measure",
    "summarize",
]
