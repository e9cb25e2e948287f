import functools
import gc
import importlib
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# No example is too slow on a busy machine, and the same examples are drawn every time, so that a
# failure is about the change at hand. `pytest --hypothesis-profile=random` draws others, and more
# where a test doesn't set their number.
settings.register_profile(
    "nlbench",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "random", settings.get_profile("nlbench"), derandomize=False, max_examples=100
)
settings.load_profile("nlbench")

# Tests started in the background would ignore Ctrl-C, and under nohup the end of the terminal, and
# so would what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is collected never becomes garbage. Looking for some in it takes a third of the collection,
# and a part of every test.
gc.disable()

# The developer's settings would change what commands print, and where data are found.
for variable in (
    "COLUMNS", "FORCE_COLOR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GITHUB_ACTIONS",
    "NLBENCH_DATA", "NLBENCH_TRACEBACK", "NO_COLOR", "PY_COLORS", "PYTHONIOENCODING",
    "PYTHONWARNINGS", "TERMINAL_WIDTH",
):  # fmt: skip
    os.environ.pop(variable, None)


# Files that take longest, the longest first, of which most is in processes that they start and
# wait for. They come before the others: each is done by one worker, and one begun last would keep
# the others waiting.
LONG = (
    "nlbench/probes/sites/test_networks.py",
    "nlbench/conformance/test_conformance.py",
    "models/removal/test_export.py",
    "support/test_pretend_cuda.py",
    "nlbench/execution/test_executors.py",
    "nlbench/probes/lines/test_instruction_sets.py",
    "reports/test_browser.py",
    "nlbench/probes/lines/test_families.py",
    "nlbench/cli/test_cli.py",
    "nlbench/probes/lines/estimation/test_estimator.py",
    "studies/shared/test_single_functions.py",
    "studies/test_measures.py",
    "models/training/test_linearise.py",
    "nlbench/probes/lines/rules/test_operations.py",
    "studies/framework/test_study.py",
    "nlbench/probes/sites/test_float64.py",
    "models/networks/test_hugging_face.py",
    "nlbench/measure/test_left_out.py",
    "test_plugin.py",
    "studies/test_trained_ladders.py",
    "studies/shared/test_linear_regions.py",
    "nlbench/execution/test_supervisor.py",
    "models/networks/test_torchvision.py",
    "models/removal/test_removal_curve.py",
    "models/removal/test_folding.py",
    "stress/test_kills.py",
    "stress/test_malformed.py",
)


@pytest.fixture(autouse=True)
def seeded(request):
    """A test draws the same numbers, whichever tests were before it."""
    import torch

    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True, scope="session")
def one_tree_of_commands():
    """Build it once, which takes longer than most commands that tests call."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def all_compared_modules():
    """Compare the modules that tests change with those before each measurement, and not all.

    All of them take a third of a small evaluation. Return the function that lists all.
    """
    from nlbench.introspection import process_state

    names = ("random", "numpy", "torch", "torch.nn", "torch.nn.functional", "torch.nn.init")
    list_all = process_state._modules
    with pytest.MonkeyPatch.context() as patch:
        # Without listing the thousands of others.
        patch.setattr(
            process_state, "_modules", lambda: {name: sys.modules[name] for name in names}
        )
        yield list_all


@pytest.fixture(autouse=True, scope="session")
def digits_read_once():
    """Read and enlarge them once, which takes a tenth of a second of every small run."""
    from nlbench.models.datasets import digits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "digits", functools.cache(digits.digits))
        yield


class CommandResult(NamedTuple):
    """What a command returned and printed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_command(tmp_path, monkeypatch, capfd):
    """Run ``nlbench ARGUMENTS`` in an empty folder, without a process of its own."""

    def run(*arguments):
        from nlbench.cli.app import main

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["nlbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return CommandResult(done.value.code, *capfd.readouterr())

    return run


# Libraries are imported here and not above: the process that only distributes tests needs none.
def pytest_collection_modifyitems(items):
    import torch

    gc.freeze()
    gc.enable()
    # Without a cache of fonts Matplotlib builds one, and prints so to standard error if it takes
    # long.
    importlib.import_module("matplotlib.font_manager")
    tests = Path(__file__).parent
    place = {tests / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
