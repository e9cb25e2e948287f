import gc
import random
import sys
from importlib import import_module
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


def test_an_import_leaves_the_random_state(tmp_path, monkeypatch):
    package = tmp_path / "drawing_package"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from nlbench.lazy import lazy_imports\n"
        "if TYPE_CHECKING:\n"
        "    from .drawing import DRAWN as DRAWN\n"
        "__getattr__, __dir__, __all__ = lazy_imports(__name__)\n"
    )
    package.joinpath("drawing.py").write_text("import random\nDRAWN = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    assert import_module("drawing_package").DRAWN
    assert random.getstate() == before
