"""nlbench: how nonlinear a neural network is, by every measure the field has proposed.

Importing this package is quick; PyTorch is imported when something needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nlbench.citation import Source
    from nlbench.errors import (
        NlbenchError,
        NotFinite,
        PluginError,
        RequestError,
        Undefined,
        UnsupportedOperation,
    )
    from nlbench.evaluation import evaluate
    from nlbench.measure import Accumulator, Measure, PooledMeasure, Result, Value, site_measure
    from nlbench.options import Option
    from nlbench.plan import Request
    from nlbench.probes.ops import register_op
    from nlbench.runner import run
    from nlbench.store.run_folder import Run, load_run
    from nlbench.store.signature import Signature, module_of
    from nlbench.subjects.data import Dataset

__all__ = [
    "Accumulator",
    "Dataset",
    "Measure",
    "NlbenchError",
    "NotFinite",
    "Option",
    "PluginError",
    "PooledMeasure",
    "Request",
    "RequestError",
    "Result",
    "Run",
    "Signature",
    "Source",
    "Undefined",
    "UnsupportedOperation",
    "Value",
    "evaluate",
    "load_run",
    "module_of",
    "register_op",
    "run",
    "site_measure",
]

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
    "register_op": "probes.ops",
    "run": "runner",
    "site_measure": "measure",
}


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
