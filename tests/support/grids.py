"""A grid of quick cells: a small network and measures that compute almost nothing."""

import sys
from pathlib import Path

from hostile import write_plugin

CODE = '''
from torch import nn

import nlbench


@nlbench.site_measure()
def first(x, y):
    """Mean change."""
    return (y - x).abs().mean()


@nlbench.site_measure()
def second(x, y):
    """Largest change."""
    return (y - x).abs().max()


@nlbench.site_measure()
def third(x, y):
    """Share of changed entries."""
    return (y != x).float().mean()


@nlbench.site_measure()
def fourth(x, y):
    """Mean output."""
    return y.mean()


def small(in_channels=3, num_classes=10):
    """A convolution, a ReLU, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )
'''

QUICK = ("first", "second", "third", "fourth")


def write_grid_plugin(folder):
    """Write the plugin to a folder, and add the folder to the Python path."""
    write_plugin(Path(folder), CODE, QUICK, ("small",), "grid")
    sys.path.insert(0, str(folder))


def quick_request(seeds):
    """Return a request with four cells per seed."""
    from nlbench.request import Request

    return Request(
        QUICK, ("small",), ("digits",), weights="init", seeds=tuple(range(seeds)), samples=8
    )
