import gc
import sys
from types import ModuleType

import pytest

from nlbench.lazy import fast_imports


@pytest.fixture
def unfrozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_imported_objects_are_not_collected(unfrozen, monkeypatch):
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with fast_imports():
        assert not gc.isenabled()
    assert gc.get_freeze_count()


def test_objects_of_triton_are_freed_at_exit(unfrozen, monkeypatch):
    # Its bindings print a page of warnings about objects that are left.
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with fast_imports():
        pass
    assert not gc.get_freeze_count()
