"""nlbench: how nonlinear a neural network is, by every measure the field has proposed.

Importing this package is quick; PyTorch is imported when something needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nlbench.citation import Source as Source
    from nlbench.errors import NlbenchError as NlbenchError
    from nlbench.errors import NotFinite as NotFinite
    from nlbench.errors import PluginError as PluginError
    from nlbench.errors import RequestError as RequestError
    from nlbench.errors import Undefined as Undefined
    from nlbench.errors import UnsupportedOperation as UnsupportedOperation
    from nlbench.evaluation import evaluate as evaluate
    from nlbench.introspection.operations import register_op as register_op
    from nlbench.measure import Accumulator as Accumulator
    from nlbench.measure import Measure as Measure
    from nlbench.measure import PooledMeasure as PooledMeasure
    from nlbench.measure import Result as Result
    from nlbench.measure import Value as Value
    from nlbench.measure import site_measure as site_measure
    from nlbench.options import Option as Option
    from nlbench.request import Request as Request
    from nlbench.runner import run as run
    from nlbench.store.run_folder import Run as Run
    from nlbench.store.run_folder import load_run as load_run
    from nlbench.store.signature import Signature as Signature
    from nlbench.store.signature import module_of as module_of
    from nlbench.subjects.data import Dataset as Dataset

# measures/, models/ and reports/ lie beside this folder in a checkout, not in it. Python
# started there finds this folder first; the installed package's path has the rest.
__path__ = extend_path(__path__, __name__)

_HOMES = {
    "Accumulator": "measure",
    "Dataset": "subjects.data",
    "Measure": "measure",
    "NlbenchError": "errors",
    "NotFinite": "errors",
    "Option": "options",
    "PluginError": "errors",
    "PooledMeasure": "measure",
    "Result": "measure",
    "Request": "request",
    "RequestError": "errors",
    "Run": "store.run_folder",
    "Signature": "store.signature",
    "Source": "citation",
    "Undefined": "errors",
    "UnsupportedOperation": "errors",
    "Value": "measure",
    "evaluate": "evaluation",
    "load_run": "store.run_folder",
    "module_of": "store.signature",
    "register_op": "introspection.operations",
    "run": "runner",
    "site_measure": "measure",
}

__all__ = sorted(_HOMES)


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` that imports a name's module when it is asked for.

    Parameters
    ----------
    package : str
    homes : mapping of str to str
        From names to the modules of the package that define them.

    Examples
    --------
    >>> lazy_exports("nlbench", {"Option": "options"})("Option").__name__
    'Option'
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find


__getattr__ = lazy_exports(__name__, _HOMES)
