"""What decides a number beside the request: TF32 and its like, and what a device is."""

import threading

import pytest
import torch

from nlbench.conformance.pretend_cuda import PretendCuda
from nlbench.execution import numerics
from nlbench.execution.numerics import describe_environment, exact_arithmetic, float32_precision
from nlbench.probes.background import overlap_pays

OPERATIONS = [
    *(("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")),
    ("generic", "all"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has the older settings only"
)


def setting(backend, operation):
    return torch._C._get_fp32_precision_getter(backend, operation)


def older(read):
    try:
        return read()
    except RuntimeError:
        return "contradiction"


def settings():
    """All there is to read, also when what all inherit is something else."""
    found, before = [], torch.backends.fp32_precision
    for general in (before, "ieee", "tf32", "none"):
        torch.backends.fp32_precision = general
        found += [setting(*key) for key in OPERATIONS]
        found += [
            older(torch.get_float32_matmul_precision),
            older(lambda: torch.backends.cuda.matmul.allow_tf32),
            older(lambda: torch.backends.cudnn.allow_tf32),
        ]
    torch.backends.fp32_precision = before
    return found


def set_matmul(value):
    torch.backends.cuda.matmul.allow_tf32 = value


def set_cudnn(value):
    torch.backends.cudnn.allow_tf32 = value


SET = {
    "nothing": lambda: None,
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    "recurrent layers": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "cuDNN": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    "products on the CPU": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older, products": lambda: set_matmul(True),
    "older, convolutions on": lambda: set_cudnn(True),
    "older, convolutions off": lambda: set_cudnn(False),
    "both kinds": lambda: (set_matmul(True), setattr(torch.backends, "fp32_precision", "bf16")),
}


@pytest.fixture(autouse=True)
def _put_back():
    before = {key: setting(*key) for key in OPERATIONS}
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for key, value in before.items():
        torch._C._set_fp32_precision_setter(*key, value)


@pytest.mark.parametrize("precision", ["native", "tf32"])
@pytest.mark.parametrize("name", SET)
def test_tf32_is_off_unless_asked_for_and_all_settings_are_put_back(name, precision):
    SET[name]()
    before = settings()
    with exact_arithmetic(precision):
        short = {"native": "ieee", "tf32": "tf32"}[precision]
        assert set(float32_precision(CUDA).values()) == {short}
        assert set(float32_precision(CPU).values()) == {"ieee"}
        assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
        with exact_arithmetic():
            assert set(float32_precision(CUDA).values()) == {"ieee"}
        assert set(float32_precision(CUDA).values()) == {short}
    assert settings() == before


def test_tf32_stays_off_until_the_last_of_several_threads_is_done():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with exact_arithmetic():
            inside.set()
            leave.wait(60)
            seen.append(torch.backends.cuda.matmul.fp32_precision)

    thread = threading.Thread(target=other)
    with exact_arithmetic():
        thread.start()
        assert inside.wait(60)
    leave.set()
    thread.join()
    assert seen == ["ieee"]
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_record_says_what_a_gpu_is_and_what_its_settings_were(monkeypatch):
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    monkeypatch.setattr(numerics, "_driver", lambda: "580.65.06")
    with PretendCuda(), exact_arithmetic():
        facts = describe_environment(torch.device("cuda:0"))
    assert facts["device_name"] == "Pretended GPU"
    assert (facts["capability"], facts["driver"]) == ("9.0", "580.65.06")
    assert facts["cudnn"] == torch.backends.cudnn.version()
    assert facts["tf32"] is False
    assert facts["float32"] == dict.fromkeys(("matmul", "conv", "rnn"), "ieee")
    assert facts["emulation"] == {"CUBLAS_EMULATE_DOUBLE_PRECISION": "1"}


def test_what_is_recorded_is_what_is_set():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert describe_environment(CPU)["tf32"] is True
    with exact_arithmetic():
        assert describe_environment(CPU)["tf32"] is False


def test_a_measure_computes_without_the_autocast_of_any_device():
    for kind in ("cpu", "mps"):
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert torch.is_autocast_enabled(kind)
            with numerics.without_autocast():
                assert not torch.is_autocast_enabled(kind)


def test_nothing_overlaps_on_apples_gpu():
    assert not overlap_pays(torch.device("mps"))
    assert overlap_pays(CUDA)


def test_a_clock_waits_for_apples_gpu_too(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    numerics.wait_for(torch.device("mps"))
    assert waited == ["mps"]
