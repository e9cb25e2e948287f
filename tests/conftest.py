import os
import signal

import pytest
import torch
from hypothesis import settings

# No example is too slow on a busy machine; and CI draws the same examples every time, so
# that what it finds is about the change at hand.
settings.register_profile("nlbench", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("nlbench")

# Of tests that are started in the background Ctrl-C is ignored, and of what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
