"""Measures and their results.

There are three ways to write a measure: decorate a function of a site's input and output with
`site_measure`; derive a class from `PooledMeasure`, which has one accumulator per site; or derive a
class from `Measure`, for any probe.
"""

from .base import INVARIANCES as INVARIANCES
from .base import Measure as Measure
from .base import MoreMeans as MoreMeans
from .pooled import Accumulator as Accumulator
from .pooled import FunctionMeasure as FunctionMeasure
from .pooled import PooledMeasure as PooledMeasure
from .pooled import site_measure as site_measure
from .result import Parts as Parts
from .result import Result as Result
from .result import Status as Status
from .result import Value as Value
from .result import summarize as summarize
from .torchmetrics_adapter import metric_measure as metric_measure
