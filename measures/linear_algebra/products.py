"""Matrix products and decompositions by NumPy and SciPy, where one core is faster than PyTorch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import blas
from torch import Tensor

from nlbench.introspection.autodiff import is_differentiated
from nlbench.introspection.threads import single_blas_thread

# Sizes up to which a second core gains nothing.
MAX_SERIAL_FEATURES = 512
MAX_SERIAL_ENTRIES = 2**21

# Number of columns up to which PyTorch's general product is faster than a symmetric one.
MAX_GENERAL_COLUMNS = 128

# A triangle is copied in tiles of this many rows, so that each tile stays in the cache.
TILE_ROWS = 64


def uses_one_core(values: Tensor) -> bool:
    """Return True if NumPy and SciPy should compute with a tensor (n, d), on one thread.

    With several threads, they would compete with PyTorch's threads for the same cores.
    """
    if values.device.type != "cpu":
        return False
    is_small = values.shape[-1] <= MAX_SERIAL_FEATURES and values.numel() <= MAX_SERIAL_ENTRIES
    return is_small or torch.get_num_threads() == 1


def gram(data: Tensor) -> Tensor:
    """Compute the inner products (r, r) of the columns of data (n, r), float64."""
    if data.shape[1] <= MAX_GENERAL_COLUMNS or not uses_one_core(data):
        return data.T @ data
    return _Gram.apply(data) if is_differentiated(data) else _Gram.forward(data)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute the matrix product of a and b, both float64."""
    if is_differentiated(a, b) or not uses_one_core(a):
        return a @ b
    with single_blas_thread():
        return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


def outer_products(a: Tensor, b: Tensor) -> Tensor:
    """Compute the inner products (n, m) of the rows of a (n, d) and b (m, d), detached.

    The products have the dtype of a and b, even under autocast.
    """
    if uses_one_core(a):
        with single_blas_thread():
            return torch.from_numpy(a.detach().numpy() @ b.detach().numpy().T)
    with torch.autocast(a.device.type, enabled=False):
        return a.detach() @ b.detach().T


def singular_value_decomposition(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute U (n, r), singular values (r,), decreasing, and Vᵀ (r, d) of a matrix, float64.

    The smallest singular values determine the rank. On a GPU, PyTorch's default is the Jacobi
    method, which it recommends only for well-conditioned matrices, so QR iterations are used.
    """
    driver = "gesvd" if matrix.is_cuda else None
    left, singular_values, right = torch.linalg.svd(matrix, full_matrices=False, driver=driver)
    return left, singular_values, right


def has_exact_float32_products(values: Tensor) -> bool:
    """Return True if float32 products are rounded to float32, not to TF32 or bfloat16."""
    if uses_one_core(values):
        return True
    if any(os.environ.get(name, usual) != usual for name, usual in _ROUNDING_MODES.items()):
        return False
    backend = torch.backends.cuda if values.device.type == "cuda" else torch.backends.mkldnn
    # PyTorch 2.9 added this setting; once it is set, the older query raises.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is not None:
        return precision in ("none", "ieee")
    if torch.get_float32_matmul_precision() != "highest":
        return False
    return values.device.type != "cuda" or not torch.backends.cuda.matmul.allow_tf32


# Environment variables that set the rounding of oneDNN and cuBLAS, and their values for float32.
_ROUNDING_MODES = {
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "DNNL_DEFAULT_FPMATH_MODE": "STRICT",
    "NVIDIA_TF32_OVERRIDE": "0",
}


class _Gram(torch.autograd.Function):
    """XᵀX by a symmetric product, which does half the work of a general one."""

    @staticmethod
    def forward(data: Tensor) -> Tensor:
        with single_blas_thread():
            return torch.from_numpy(_gram_of_array(data.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (data,) = ctx.saved_tensors
        return data @ (gradient + gradient.T)


def _gram_of_array(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # BLAS copies arrays that are not in Fortran order; either the array or its transpose is.
    if array.flags.c_contiguous:
        lower = blas.dsyrk(1.0, array.T, lower=1)
    else:
        lower = blas.dsyrk(1.0, array, trans=1, lower=1)
    full: npt.NDArray[np.float64] = lower.T
    for start in range(0, len(full), TILE_ROWS):
        end = start + TILE_ROWS
        full[start:end, :start] = full[:start, start:end].T
        corner = full[start:end, start:end]
        corner += np.triu(corner, 1).T
    return full
