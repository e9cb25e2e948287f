import os
import signal
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# No example is too slow on a busy machine; and CI draws the same examples every time, so
# that what it finds is about the change at hand.
settings.register_profile(
    "nlbench", deadline=None, max_examples=50, derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("nlbench")

# Of tests that are started in the background Ctrl-C is ignored, and of what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest, the longest first, of which most is in processes that they start and
# wait for. They come before the others: each is done by one worker, and one begun last would keep
# the others waiting.
LONG = (
    "nlbench/execution/test_executors.py",
    "reports/test_browser.py",
    "nlbench/cli/test_cli.py",
    "stress/test_kills.py",
    "nlbench/execution/test_supervisor.py",
    "test_plugin.py",
    "models/training/test_linearisation.py",
    "support/test_pretend_cuda.py",
    "stress/test_malformed.py",
    "nlbench/probes/graph/test_graph_families.py",
    "nlbench/probes/lines/exact/test_trace.py",
    "nlbench/probes/lines/rules/test_operations.py",
    "nlbench/probes/lines/estimation/test_estimator.py",
    "measures/test_affinity_gradients.py",
    "models/training/test_loop.py",
)


@pytest.fixture(autouse=True)
def seeded(request):
    """A test draws the same numbers, whichever tests were before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


def pytest_collection_modifyitems(items):
    tests = Path(__file__).parent
    place = {tests / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
