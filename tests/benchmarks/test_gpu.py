"""The benchmark of a GPU, as far as it can be tested without one."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from scipy.linalg import polar

from nlbench.measures.transport.gaussian_map import optimal_map

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def matrices(count, size, digits):
    """Random matrices with singular values from 1 down to a power of ten."""
    random = torch.Generator().manual_seed(size)
    drawn = torch.randn(2, count, size, size, dtype=torch.float64, generator=random)
    left, right = torch.linalg.qr(drawn).Q
    return left * torch.logspace(0, -digits, size, dtype=torch.float64) @ right.mT


@pytest.mark.parametrize(("size", "digits"), [(1, 0), (7, 0), (20, 3), (40, 10)])
def test_polar_factor_equals_scipys(gpu, size, digits):
    given = matrices(3, size, digits)
    found = gpu.polar_factor(given)
    for one, factor in zip(given, found, strict=True):
        expected = torch.from_numpy(polar(one.numpy())[0])
        torch.testing.assert_close(factor, expected, rtol=0, atol=1e-13 * 10**digits)
        identity = torch.eye(size, dtype=torch.float64)
        torch.testing.assert_close(factor.T @ factor, identity, rtol=0, atol=1e-13)


def test_polar_and_eigenvalue_maps_agree(gpu):
    x, y = matrices(2, 12, 1)
    source, target = x @ x.T, y @ y.T
    found, expected = gpu.map_by_polar(source, target), optimal_map(source, target)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_failed_part_keeps_its_results(gpu, tmp_path, monkeypatch):
    def part(setting):
        yield {"first": 1}
        raise ValueError("no second")

    monkeypatch.setitem(gpu.PARTS, "broken", part)
    assert gpu.run_part("broken", gpu.Setting("cpu", quick=True), tmp_path / "found.json") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"first": 1, "failed": "ValueError: no second"}


SCRIPT = """
import json, os, sys, time
part, out = sys.argv[2], sys.argv[-1]
with open(out + ".new", "w") as file:
    json.dump({"found": part}, file)
os.replace(out + ".new", out)
if part == "crashes":
    os.abort()
if part == "hangs":
    time.sleep(600)
"""


@pytest.fixture
def scripted(gpu, tmp_path, monkeypatch):
    """Replace the benchmark by a script without PyTorch."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(gpu, "__file__", str(script))
    return argparse.Namespace(device="cpu", quick=True, minutes=1.0)


class ImpatientPopen(subprocess.Popen):
    """A process whose time is over as soon as it hangs."""

    def wait(self, timeout=None):
        if timeout is None or self.args[3] != "hangs":
            return super().wait(timeout)
        while not Path(self.args[-1]).exists():
            assert self.poll() is None
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_crashes_and_timeouts_are_lines_of_the_table(gpu, scripted, monkeypatch):
    monkeypatch.setattr(gpu.subprocess, "Popen", ImpatientPopen)
    names = ("ends", "crashes", "hangs")
    results = {name: gpu.run_in_process(name, scripted, 300.0) for name in names}
    assert [found["found"] for found in results.values()] == list(results)
    assert "failed" not in results["ends"]
    assert results["crashes"]["failed"] == "its process ended with status -6"
    assert results["hangs"]["left_out"] == "no time left to finish"
    rows = [line.split(" | ") for line in gpu.table(results)][4:]
    assert [row[1] for row in rows] == ["ran", "failed", "left out"]


def test_results_are_written_as_json_and_as_table(gpu, scripted, tmp_path):
    sites = {"all": {"a_batch": 0.05, "of_forward": 3.0}, "seconds": 4.0}
    scripted.quick = False  # The targets are for large networks.
    gpu.write({"site_measures": sites}, scripted, tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text())["site_measures"] == sites
    text = (tmp_path / "gpu.md").read_text()
    assert "| site measures (4.0 s) | ran | all a batch 0.05; all of forward 3 |" in text
    assert "seconds per batch of 128: 0.1 | 0.05 | reached |" in text
    assert "in forward passes: 2 | 3 | missed |" in text
