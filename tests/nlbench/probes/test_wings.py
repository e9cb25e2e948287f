"""A run of one probe loads the code of no other."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, nlbench
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
nlbench.evaluate(model, torch.randn(16, 4), ["{measure}"])
names = [name.split(".") for name in sys.modules if name.startswith("nlbench.probes.")]
print(*sorted({{name[2] for name in names}}))
"""


@pytest.mark.parametrize(
    ("measure", "absent"),
    [("norm", {"lines", "graph"}), ("pathlength", {"lines"}), ("regions", {"graph"})],
)
def test_a_run_of_one_probe_loads_no_other(measure, absent):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(measure=measure)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not absent & set(done.stdout.split())
