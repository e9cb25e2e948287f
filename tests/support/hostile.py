"""A plugin whose measures and models fail in various ways, as a distribution."""

import sys
from pathlib import Path

from distributions import METADATA, write_distribution

from nlbench.request import Request

CODE = '''
import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn

import nlbench


@nlbench.site_measure()
def plain(x, y):
    """Mean change."""
    return (y - x).abs().mean()


@nlbench.site_measure()
def drawing(x, y):
    """Depends on all three global generators."""
    return torch.rand(()).item() + np.random.rand() + random.random()


def _hang():
    """Write the process ID to a file next to this module, and hang."""
    with open(os.path.join(os.path.dirname(__file__), "hanging"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


@nlbench.site_measure()
def sleepy(x, y):
    """Never returns."""
    _hang()
    return 0.0


@nlbench.site_measure()
def raising(x, y):
    """Raises an error."""
    raise ValueError("no number")


@nlbench.site_measure()
def slow(x, y):
    """Takes 20 s of its worker's clock in each update."""
    from types import SimpleNamespace

    from nlbench.execution import worker

    clock = worker.time.monotonic
    worker.time = SimpleNamespace(monotonic=lambda: clock() + 20.0)
    return 0.0


@nlbench.site_measure()
def patient(x, y):
    """Waits in mini until `choosy` has killed its process in mini2."""
    while x.shape[1] == 4 and not os.path.exists(os.environ["NLBENCH_TEST_MARK"]):
        time.sleep(0.01)
    return 0.0


@nlbench.site_measure()
def waiting(x, y):
    """Waits in mini2 until the file `gate` exists next to this module."""
    gate = os.path.join(os.path.dirname(__file__), "gate")
    while x.shape[1] == 8 and not os.path.exists(gate):
        time.sleep(0.01)
    return 0.0


@nlbench.site_measure()
def exiting(x, y):
    """Ends the process."""
    os._exit(3)
    return 0.0


@nlbench.site_measure()
def killed(x, y):
    """Is killed with SIGKILL, as when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


@nlbench.site_measure()
def choosy(x, y):
    """Kills its process if there are eight channels."""
    if x.shape[1] == 8:
        open(os.environ["NLBENCH_TEST_MARK"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@nlbench.site_measure()
def once(x, y):
    """Kills its process the first time only."""
    mark = os.environ["NLBENCH_TEST_MARK"]
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@nlbench.site_measure()
def chatty(x, y):
    """Prints to standard output and reads from standard input."""
    print("hello on standard output")
    os.write(1, b"hello below it\\n")
    import sys
    return float(len(sys.stdin.read()))


def mini(in_channels=3, num_classes=10):
    """A convolution, a ReLU, a linear layer."""
    return _network(in_channels, 4, num_classes)


def mini2(in_channels=3, num_classes=10):
    """Like mini, with eight channels."""
    return _network(in_channels, 8, num_classes)


def _network(in_channels, channels, num_classes):
    convolution = nn.Conv2d(in_channels, channels, 3, stride=4)
    pooling = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(
        convolution, nn.ReLU(), pooling, nn.Flatten(), nn.Linear(channels, num_classes)
    )


def deadly(in_channels=3, num_classes=10):
    """Ends the process while it is built."""
    os._exit(7)


def endless(in_channels=3, num_classes=10):
    """Hangs while it is built."""
    _hang()
'''

MEASURES = ("plain", "drawing", "sleepy", "raising", "slow", "patient", "waiting", "exiting",
            "killed", "choosy", "once", "chatty")  # fmt: skip
MODELS = ("mini", "mini2", "deadly", "endless")


def write_plugin(folder, code=CODE, measures=MEASURES, models=MODELS, name="hostile"):
    """Write the distribution to a folder, which must be on the Python path."""
    folder = Path(folder)
    module = f"nlbench_{name}"
    # Other tests of this process may have imported it from another folder.
    sys.modules.pop(module, None)
    (folder / f"{module}.py").write_text(code)
    groups = {"measures": measures, "models": models}
    lines = {group: [f"{n} = {module}:{n}" for n in names] for group, names in groups.items()}
    write_distribution(folder, module, lines, METADATA.replace("{}", f"nlbench-{name}"))
    return folder


def install_plugin(tmp_path, monkeypatch):
    """Write the distribution to a folder that is on the Python path for the rest of a test."""
    folder = tmp_path / "plugin"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(write_plugin(folder)))
    return folder


def request(measures="plain", models="mini", **changes):
    """Ask for measures and models of the distribution, named as on the command line."""
    defaults = {"samples": 16, "weights": "init", "data": ("digits",)}
    return Request(tuple(measures.split(",")), tuple(models.split(",")), **(defaults | changes))
