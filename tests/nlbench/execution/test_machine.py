"""The machine that measures, as records describe it."""

import pytest
import torch
from pretend_cuda import PretendCuda

from nlbench.execution import machine
from nlbench.execution.machine import describe_environment
from nlbench.introspection.memory import synchronize
from nlbench.introspection.precision import exact_arithmetic

CPU = torch.device("cpu")


def test_environment_describes_gpu_and_settings(monkeypatch):
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    monkeypatch.setattr(machine, "_driver", lambda: "580.65.06")
    with PretendCuda(), exact_arithmetic():
        facts = describe_environment(torch.device("cuda:0"))
    assert facts["device_name"] == "Pretended GPU"
    assert (facts["capability"], facts["driver"]) == ("9.0", "580.65.06")
    assert facts["cudnn"] == torch.backends.cudnn.version()
    assert facts["tf32"] is False
    assert facts["float32"] == dict.fromkeys(("matmul", "conv", "rnn"), "ieee")
    assert facts["emulation"] == {"CUBLAS_EMULATE_DOUBLE_PRECISION": "1"}


@pytest.mark.parametrize(("device", "name"), [("cpu", "CPU"), ("mps", "mps")])
def test_devices_without_cuda_are_described_by_name(device, name):
    facts = describe_environment(torch.device(device))
    assert (facts["device_name"], facts["cuda"]) == (name, None)
    assert not {"capability", "driver", "cudnn"} & set(facts)


def test_recorded_settings_equal_those_set():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        assert describe_environment(CPU)["tf32"] is True
        with exact_arithmetic():
            assert describe_environment(CPU)["tf32"] is False
    finally:
        matmul.fp32_precision = before


def test_a_clock_waits_for_apples_gpu_too(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    synchronize(torch.device("mps"))
    assert waited == ["mps"]
