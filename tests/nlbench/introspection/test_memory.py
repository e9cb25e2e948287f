"""What is carried stays within the memory given, and traces don't depend on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import RequestError
from nlbench.introspection.memory import (
    LiveBytes,
    _container_memory,
    available_memory,
    bytes_per_sample,
    is_out_of_memory,
    microbatch_sizes,
)
from nlbench.introspection.model_state import double_copy
from nlbench.probes.lines.probe import trace_segment
from nlbench.probes.lines.published import CARRIED
from nlbench.probes.lines.recording.agreement import record_checked_program
from nlbench.probes.lines.recording.point_memory import PointMemory, measure_point_memory, share_out
from nlbench.probes.lines.recording.recorder import record_program

from segments import mlp, networks, small_residual

CPU = torch.device("cpu")


def load(net, x):
    return measure_point_memory(record_checked_program(double_copy(net), x), x)


def test_a_point_takes_what_is_alive_at_once():
    x = torch.zeros(2, 4, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(4, 10, bias=False), nn.ReLU())
    found = load(net, x)
    # Input and output of the ReLU, with a bound for each unit of either.
    assert found.width == 8 * 2 * (10 + 10)
    assert found.waiting == 8 * (10 + 10)
    assert found.step > found.width


def test_deeper_networks_keep_more_points_waiting():
    x = torch.zeros(1, 3, dtype=torch.float64)
    shallow, deep = (load(mlp(0, widths=(3, *[8] * n, 2)), x) for n in (2, 6))
    assert deep.waiting == pytest.approx(3 * shallow.waiting)
    assert deep.width == shallow.width


@settings(max_examples=8, deadline=None)
@given(networks(), st.sampled_from(["exact", "adaptive", "sampling"]))
def test_the_memory_changes_nothing(drawn, method):
    net, start, end = drawn
    options = {"method": method, "resolution": 50}
    plenty = trace_segment(net, start, end, **options)
    needed = load(net, torch.stack([start, end]).double())
    carried = CARRIED if method == "adaptive" else 1
    weights = sum(8 * tensor.numel() for tensor in net.state_dict().values())
    little = 2 * carried * (4 * (needed.step + needed.waiting) + needed.reserve) + 4 * weights
    tight = trace_segment(net, start, end, memory=little, **options)
    assert tight.regions == plenty.regions
    torch.testing.assert_close(tight.t, plenty.t, rtol=0, atol=1e-11)
    torch.testing.assert_close(tight.values, plenty.values, rtol=1e-9, atol=1e-9)


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x):
        return torch.relu(x * self.weight + 0.1)


def layers_of(units, depth):
    torch.manual_seed(0)
    net = nn.Sequential(*(Scaled(units) for _ in range(depth)), nn.Linear(units, 2)).double()
    start = torch.randn(units, dtype=torch.float64)
    return net, start, torch.lerp(start, -start, 0.1), 8 * units * (depth + 3)


def test_recording_holds_no_more_than_running_does():
    net, start, _, model = layers_of(256, 10)
    with torch.inference_mode(), LiveBytes() as running:
        net(start[None].clone())
    with LiveBytes() as recording:
        program = record_program(net, start[None].clone())
    assert len(program.steps) == 31
    # What rules keep is of the size of the weights.
    assert recording.peak - recording.now <= running.peak < 5 * 8 * 256
    assert recording.now <= model


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_recording_checking_and_tracing_stay_within_the_memory(method):
    net, start, end, model = layers_of(256, 10)
    options = {"method": method, "resolution": 20, "sensitivity": 1e-2}
    found = load(net, torch.stack([start, end]))
    carried = CARRIED if method == "adaptive" else 1
    waiting = found.waiting if method == "exact" else 0
    memory = 2 * (2 * model + carried * 4 * (found.step + waiting))
    with LiveBytes() as live:
        trace = trace_segment(net, start, end, memory=memory, **options)
    assert trace.crossings > 0
    # All values of the pass are 31 times 2 KiB. The model is copied.
    assert live.peak <= memory / 2 + model
    with pytest.raises(RequestError, match="takes"), LiveBytes() as live:
        trace_segment(net, start, end, memory=16 * 2**10, **options)
    # The copy of the model, what rules keep of it, and a pass of one point.
    assert live.peak < 2 * model + 5 * 8 * 256


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_too_little_memory_is_one_clear_line(method):
    ends = torch.randn(2, 2, 4, 4)
    message = r"^memory: 1000 bytes are too few to trace this network on a segment, which takes"
    with pytest.raises(RequestError, match=message) as caught:
        trace_segment(small_residual(), *ends, method=method, memory=1000)
    assert "\n" not in str(caught.value)


def test_memory_that_is_not_positive_is_refused():
    with pytest.raises(RequestError, match="memory of 0 bytes"):
        trace_segment(mlp(0), *torch.randn(2, 3), memory=0)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 10**10))
def test_what_is_shared_out_fits(step, reserve, threads, memory):
    one = PointMemory(step, step, 2 * step, reserve)
    usable = memory - min(32 * 2**20, memory / 2)
    if usable < reserve + 2 * 3 * step:
        with pytest.raises(RequestError):
            share_out(one, CPU, memory, 128, threads=threads, least=8, needed=2, waiting=True)
        return
    count, points = share_out(
        one, CPU, memory, 128, threads=threads, least=8, needed=2, waiting=True
    )
    assert 1 <= count <= threads
    assert 2 <= points <= 128
    assert count * (reserve + points * 3 * step) <= usable
    assert count == 1 or points >= 8


def test_some_memory_is_free():
    assert 2**20 < available_memory(CPU) < 2**50


def test_files_that_a_container_has_merely_read_do_not_count_as_used(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 600\nactive_file 50\n")
    assert _container_memory(tmp_path) == 700


@pytest.mark.parametrize("limit", ["max", None])
def test_a_container_without_a_limit_leaves_all(tmp_path, limit):
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("900")
    (tmp_path / "memory.stat").write_text("inactive_file 600")
    assert _container_memory(tmp_path) > 2**60


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_a_network_that_does_nothing_is_one_region(method):
    options = {"resolution": 10} if method == "sampling" else {}
    trace = trace_segment(nn.Identity(), torch.zeros(3), torch.ones(3), method=method, **options)
    assert trace.regions == 1
    assert trace.values.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_only_an_error_of_memory_is_taken_for_one():
    errors = (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    )
    assert all(is_out_of_memory(error) for error in errors)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@given(st.integers(1, 300), st.integers(1, 300))
def test_parts_hold_all_samples_fit_and_differ_in_size(samples, most):
    sizes = microbatch_sizes(samples, most)
    assert sum(sizes) == samples
    assert len(sizes) <= -(-samples // most) + 1
    assert max(sizes) <= most
    assert min(sizes) > 0
    assert len(sizes) == 1 or most == 1 or len(set(sizes)) > 1


def test_what_a_sample_takes_grows_with_what_the_layers_make():
    wide, narrow = (nn.Sequential(nn.Linear(4, n), nn.Tanh()) for n in (4000, 40))
    ratio = bytes_per_sample(wide, torch.zeros(1, 4)) / bytes_per_sample(narrow, torch.zeros(1, 4))
    assert 50 < ratio < 110


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        (
            "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling "
            "`cusolverDnCreate(handle)`",
            True,
        ),
        ("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm(handle)`", False),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("Unable to find an engine to execute this computation", True),
        ("MPS backend out of memory (MPS allocated: 1.00 GB)", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", False),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", False),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if", False),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_what_the_libraries_of_a_gpu_say_of_memory_is_told_from_what_else_they_say(text, is_memory):
    assert is_out_of_memory(RuntimeError(text)) is is_memory
