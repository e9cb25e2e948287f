"""The probe `sites`: inputs and outputs of all activation calls.

`observation` runs the batches, `intercept` intercepts the calls, `roles` determines their roles,
and `reduce` turns an activation into the (n, d) that measures receive.

`nlbench.introspection.operations.table` lists the activation functions, and
`nlbench.introspection.module_stack` recognises modules that compute one from other operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

from .site import Site as Site
from .site import SiteBatch as SiteBatch
from .sites_probe import SITES as SITES

if TYPE_CHECKING:
    # Planning a run must not import PyTorch, which observing requires.
    from .sites_observation import list_sites as list_sites
    from .sites_observation import observe_sites as observe_sites
    from .sites_observation import refuse_undefined as refuse_undefined

__getattr__, __dir__, __all__ = lazy_imports(__name__)
