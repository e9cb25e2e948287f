"""nlbench: how nonlinear a neural network is, by every measure the field has proposed.

Importing this package is quick; PyTorch is imported on first use.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

# In a checkout, measures/, models/ and other subpackages lie next to this folder. If Python is
# started there, it imports this folder first; extend_path adds the path of the installed package,
# which contains them.
__path__ = extend_path(__path__, __name__)

from .lazy import lazy_imports

if TYPE_CHECKING:
    from .citation import Source as Source
    from .errors import NlbenchError as NlbenchError
    from .errors import NotFinite as NotFinite
    from .errors import PluginError as PluginError
    from .errors import RequestError as RequestError
    from .errors import Undefined as Undefined
    from .errors import UnsupportedOperation as UnsupportedOperation
    from .evaluation import evaluate as evaluate
    from .introspection.operations import register_op as register_op
    from .measure import Accumulator as Accumulator
    from .measure import Measure as Measure
    from .measure import PooledMeasure as PooledMeasure
    from .measure import Result as Result
    from .measure import Value as Value
    from .measure import site_measure as site_measure
    from .monitor import Monitor as Monitor
    from .options import Option as Option
    from .request import Request as Request
    from .runner import run as run
    from .store.run import Run as Run
    from .store.run import compare as compare
    from .store.run import load_run as load_run
    from .store.signature import Signature as Signature
    from .store.signature import module_of as module_of
    from .subjects.data import Dataset as Dataset
    from .subjects.inputs import Arguments as Arguments

__getattr__, __dir__, __all__ = lazy_imports(__name__)
