"""What float32 is computed in: TF32 and its like are off behind every door, and all is put back."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nlbench
from nlbench.introspection.precision import (
    exact_arithmetic,
    exact_by_default,
    float32_precision,
    without_autocast,
)
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import vanilla
from nlbench.probes.function import observe_function
from nlbench.probes.graph.activity import unit_activity
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.lines import estimate_segment, plane, trace_segment, trace_segments
from nlbench.probes.lines.quadrature import integrate_along
from nlbench.probes.sites.sites_observation import observe_sites
from nlbench.subjects.data import Dataset

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
def test_tf32_is_off_unless_requested_and_restored(name, precision):
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
        with exact_by_default():
            assert set(float32_precision(CUDA).values()) == {short}
    assert settings() == before
    with exact_by_default():
        assert set(float32_precision(CUDA).values()) == {"ieee"}
    assert settings() == before


@pytest.mark.parametrize("name", ["nothing", "all", "high", "older, convolutions off"])
def test_tf32_is_never_set_during_anothers_pass(name):
    SET[name]()
    before = settings()
    found = []

    def measure(precision):
        with exact_arithmetic(precision):
            time.sleep(0.01)
            found.append((precision, "/".join(sorted(set(float32_precision(CUDA).values())))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(measure, ["tf32", "native", "tf32", "native"]))
    assert set(found) == {("tf32", "tf32"), ("native", "ieee")}
    assert settings() == before


SEEN = []


class Watched(nn.Linear):
    """Notes what float32 is computed in when it is run; copies note it in the same place."""

    def forward(self, x):
        SEEN.append(frozenset(float32_precision(CUDA).values()))
        return super().forward(x)


def network():
    torch.manual_seed(0)
    return nn.Sequential(Watched(4, 6), nn.ReLU(), nn.Linear(6, 3))


def few():
    images, labels = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6)
    return Dataset("few", *[TensorDataset(images, labels % 3)] * 2, (4,), 3, (0.5,), (0.5,), "")


X = torch.linspace(-1, 1, 24).reshape(6, 4)
GRAPH = channel_graph(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), X[:1])
DOORS = {
    "trace_segment": lambda m: trace_segment(m, X[0], X[1]),
    "trace_segment, adaptive": lambda m: trace_segment(m, X[0], X[1], method="adaptive"),
    "estimate_segment": lambda m: estimate_segment(m, X[0], X[1], evaluations=65),
    "integrate_along": lambda m: list(integrate_along(m, X[:1], X[1:2])),
    "plane": lambda m: plane(m, X[:2], size=4),
    "observe_sites": lambda m: observe_sites(m, [X], lambda seen: None),
    "observe_function": lambda m: observe_function(m, [X], lambda seen: seen.function(X)),
    "unit_activity": lambda m: unit_activity(m, GRAPH, [X]),
    "train": lambda m: train(lambda: m, few(), replace(vanilla, epochs=1, batch_size=6)),
    "evaluate": lambda m: nlbench.evaluate(m, X, ["norm", "nlc", "accuracy"], labels=few_labels()),
}


def few_labels():
    return torch.arange(6) % 3


@pytest.mark.parametrize("name", ["nothing", "convolutions", "both kinds"])
def test_every_entry_point_restores_tf32(name):
    SET[name]()
    before = settings()
    for door, go in DOORS.items():
        SEEN.clear()
        go(network())
        assert SEEN, door
        assert set(SEEN) == {frozenset(["ieee"])}, door
        assert settings() == before, door


def test_every_entry_point_uses_requested_precision():
    with exact_arithmetic("tf32"):
        for door, go in DOORS.items():
            if door != "evaluate":  # It is asked itself.
                SEEN.clear()
                go(network())
                assert set(SEEN) == {frozenset(["tf32"])}, door
        with exact_by_default():
            assert set(float32_precision(CUDA).values()) == {"tf32"}


def test_caller_settings_are_restored_between_segments():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for _ in trace_segments(network(), X[:2], X[2:4], dtype=torch.float32):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert set(SEEN[-1:]) == {frozenset(["ieee"])}


def test_measure_computes_without_the_autocast_of_any_device():
    for kind in ("cpu", "mps"):
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert torch.is_autocast_enabled(kind)
            with without_autocast():
                assert not torch.is_autocast_enabled(kind)
