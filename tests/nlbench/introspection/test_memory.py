"""Memory that is free, that tensors take, and that has run out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nlbench.introspection import memory
from nlbench.introspection.memory import (
    SampleLimit,
    _container_memory,
    available_memory,
    bytes_per_sample,
    is_out_of_memory,
    microbatch_sizes,
)

CPU = torch.device("cpu")


def test_some_memory_is_free():
    assert 2**20 < available_memory(CPU) < 2**50


def test_page_cache_of_a_container_is_free_memory(tmp_path):
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


def test_only_memory_errors_are_out_of_memory():
    errors = (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    )
    assert all(is_out_of_memory(error) for error in errors)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@given(st.integers(1, 300), st.integers(1, 300))
def test_microbatches_fit_memory_and_hold_all_samples(samples, most):
    sizes = microbatch_sizes(samples, most)
    assert sum(sizes) == samples
    assert len(sizes) <= -(-samples // most) + 1
    assert max(sizes) <= most
    assert min(sizes) > 0
    assert len(sizes) == 1 or most == 1 or len(set(sizes)) > 1


def test_bytes_per_sample_grow_with_width_of_layers():
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
def test_errors_of_gpu_libraries_are_classified(text, is_memory):
    assert is_out_of_memory(RuntimeError(text)) is is_memory


class Fixed(nn.Module):
    """Accepts batches of 64 samples only."""

    def forward(self, x):
        return x.reshape(64, -1).relu()


def test_cpu_batch_is_limited_if_it_can_split(monkeypatch):
    model, batch = nn.Sequential(nn.Linear(4, 100), nn.ReLU()), torch.zeros(64, 4)
    assert SampleLimit({}, model, "a pass", batch, None).limit is None
    monkeypatch.setattr(memory, "MIN_LIMITED", 256)
    monkeypatch.setattr(memory, "CPU_BATCH_BYTES", 30 * bytes_per_sample(model, batch[:2]))
    found = {}
    limits = [SampleLimit(found, model, "a pass", batch, None, times=times) for times in (1, 3)]
    assert [limit.limit for limit in limits] == [30, 30]
    assert SampleLimit({}, model, "a pass", batch, None, times=3).limit == 10
    assert not limits[0].is_required
    given = SampleLimit(found, model, "a pass", batch, 20 * bytes_per_sample(model, batch[:2]))
    assert given.limit == 20
    assert given.is_required
    assert SampleLimit(None, model, "a pass", batch, None).limit is None
    assert SampleLimit(found, Fixed(), "a pass", batch, None).limit is None
    with pytest.raises(RuntimeError):
        SampleLimit(found, Fixed(), "a pass", batch, 1000)
