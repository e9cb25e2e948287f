"""What decides a number beside the request: a device, and where random numbers come from."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.conformance.pretend_cuda import PretendCuda
from nlbench.execution import numerics
from nlbench.execution.numerics import Stream, describe_environment, untouched
from nlbench.introspection.background import overlap_pays
from nlbench.introspection.precision import exact_arithmetic

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        assert describe_environment(CPU)["tf32"] is True
        with exact_arithmetic():
            assert describe_environment(CPU)["tf32"] is False
    finally:
        matmul.fp32_precision = before


def test_nothing_overlaps_on_apples_gpu():
    assert not overlap_pays(torch.device("mps"))
    assert overlap_pays(CUDA)


def test_a_clock_waits_for_apples_gpu_too(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    numerics.wait_for(torch.device("mps"))
    assert waited == ["mps"]


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002


def seed_all():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_what_a_stream_gives_does_not_depend_on_the_others_between(order):
    straight = {}
    for name in "abc":
        with Stream(name).drawn():
            straight[name] = [draw() for _ in range(12)]
    streams = {name: Stream(name) for name in "abc"}
    mixed = {name: [] for name in "abc"}
    for name in order:
        with streams[name].drawn():
            mixed[name].append(draw())
        draw()
    for name, drawn in mixed.items():
        assert drawn == straight[name][: len(drawn)]


def test_the_callers_generators_go_on_where_they_were():
    seed_all()
    expected = [draw(), draw()]
    seed_all()
    first = draw()
    with Stream("x").drawn():
        draw()
        seed_all()
    assert [first, draw()] == expected


def test_different_names_give_different_numbers():
    drawn = set()
    for number in range(50):
        with Stream(f"cell {number}").drawn():
            drawn.add(draw()[2])
    assert len(drawn) == 50


def test_a_stream_without_a_name_leaves_everything_alone():
    torch.manual_seed(1)
    before = torch.rand(3)
    torch.manual_seed(1)
    with Stream("").drawn():
        assert torch.equal(torch.rand(3), before)


def test_a_normal_deviate_kept_for_the_next_call_is_kept():
    seed_all()
    expected = np.random.randn(4).tolist()  # noqa: NPY002
    seed_all()
    first = np.random.randn()  # noqa: NPY002
    with untouched(), Stream("x").drawn():
        draw()
    assert [first, *np.random.randn(3).tolist()] == expected  # noqa: NPY002
