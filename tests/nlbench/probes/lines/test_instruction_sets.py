"""Traces don't depend on the order in which a processor's kernels add."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nlbench.probes.lines import trace_segment

HERE = Path(__file__)
# What MKL and PyTorch choose on the oldest processors, which adds in the most different order.
# Others than Intel's ignore the first.
OLDEST = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}


def cancelling_weights():
    """Return weights whose sum is zero up to rounding."""
    rng = np.random.default_rng(5)
    short = [[1.0, -1.0], [0.1, 0.2, -0.3], [0.7, -0.1, -0.6], [0.1] * 10 + [-1.0]]
    drawn = [rng.normal(size=size) for size in (7, 13, 34, 50)]
    return [*short, *([*draw, -draw.sum()] for draw in drawn)]


@pytest.mark.parametrize(
    ("weights", "scale"),
    list(zip(cancelling_weights(), itertools.cycle([1e-20, 1e-6, 1.0, 1e12]))),
)
def test_segments_inside_a_boundary_have_no_breakpoints(weights, scale):
    net = nn.Sequential(nn.Linear(len(weights), 1, bias=False), nn.ReLU()).double()
    with torch.no_grad():
        net[0].weight.copy_(scale * torch.tensor([list(weights)], dtype=torch.float64))
    for a, b in np.random.default_rng(1).uniform(-1, 1, (3, 2)):
        start, end = torch.full((len(weights),), a), torch.full((len(weights),), b)
        assert trace_segment(net, start, end).crossings == 0


def test_the_oldest_instruction_set_gives_the_same_traces():
    files = [HERE, HERE.with_name("test_api.py"), HERE.with_name("test_verification.py")]
    files.append(HERE.parent / "exact" / "test_trace.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # Those that depend on how sums are rounded: ties, boundaries, and traces of whole networks.
    chosen = "inside_a_boundary or tie or bend_where or parts_of or on_boundaries or vgg8_is"
    chosen += " or correct_trace or spurious or within_rounding or traces_are_checked"
    command += ["-p", "no:xdist", "-k", chosen, *map(str, files)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | OLDEST
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
