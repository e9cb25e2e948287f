"""Every example in a docstring runs and gives what it says."""

import doctest
import importlib
import pkgutil

import pytest


def modules():
    package = importlib.import_module("nlbench")
    yield "nlbench"
    yield from (info.name for info in pkgutil.walk_packages(package.__path__, "nlbench."))


@pytest.mark.parametrize("name", sorted(set(modules())))
def test_the_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


def test_all_folders_are_walked():
    names = set(modules())
    assert {
        "nlbench.measures.affinity",
        "nlbench.models.networks.vgg",
        "nlbench.reports.page",
    } <= names


def test_exports_exist_and_are_documented():
    for name in sorted(set(modules())):
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            thing = getattr(module, public)
            if callable(thing) and getattr(thing, "__module__", name).startswith("nlbench"):
                assert thing.__doc__, f"{name}.{public}"
