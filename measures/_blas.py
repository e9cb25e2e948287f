"""Where NumPy's and SciPy's linear algebra is quicker than PyTorch's: on one core."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import blas
from torch import Tensor

from nlbench.introspection.threads import single_blas_thread

__all__ = [
    "gram",
    "has_single_products",
    "is_differentiated",
    "on_one_core",
    "outer_products",
    "product",
    "singular_value_decomposition",
]

# Up to here a second core gains nothing: features, and numbers in all.
FEW_FEATURES, FEW_NUMBERS = 512, 2**21

# What a triangle is copied by: few enough numbers to stay in the cache.
TILE = 64


def on_one_core(values: Tensor) -> bool:
    """Whether NumPy's and SciPy's routines are to work on a tensor (n, d), with one thread.

    On several cores their threads and PyTorch's would wait for each other.
    """
    if values.device.type != "cpu":
        return False
    is_small = values.shape[-1] <= FEW_FEATURES and values.numel() <= FEW_NUMBERS
    return is_small or torch.get_num_threads() == 1


def is_differentiated(*values: Tensor) -> bool:
    """Whether derivatives are taken, so that an operation has to be one of PyTorch's."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in values):
        return True
    # Within torch.func.grad no tensor has storage, not even one without a derivative.
    is_transformed = getattr(torch._C, "_are_functorch_transforms_active", None)
    return is_transformed is not None and bool(is_transformed())


def gram(data: Tensor) -> Tensor:
    """Inner products (r, r) of the columns of data (n, r), float64."""
    if not on_one_core(data):
        return data.T @ data
    products: Tensor = _Gram.apply(data) if is_differentiated(data) else _Gram.forward(data)
    return products


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of a and b, both float64."""
    if is_differentiated(a, b) or not on_one_core(a):
        return a @ b
    with single_blas_thread():
        return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


def outer_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (n, m) of the rows of a (n, d) with those of b (m, d), without gradient.

    In the type of a and b, also where autocast would take a shorter one.
    """
    if on_one_core(a):
        with single_blas_thread():
            return torch.from_numpy(a.detach().numpy() @ b.detach().numpy().T)
    with torch.autocast(a.device.type, enabled=False):
        return a.detach() @ b.detach().T


def singular_value_decomposition(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (n, r), singular values (r,), decreasing, and Vᵀ (r, d) of a matrix (n, d), float64.

    The smallest ones decide what is taken for rank. On a GPU PyTorch would find them by Jacobi's
    method, which it recommends for well-conditioned matrices only; so by QR iterations there.
    """
    driver = "gesvd" if matrix.is_cuda else None
    left, strengths, right = torch.linalg.svd(matrix, full_matrices=False, driver=driver)
    return left, strengths, right


def has_single_products(values: Tensor) -> bool:
    """Whether float32 products have float32's digits: a user may have allowed fewer."""
    if on_one_core(values):
        return True
    if any(os.environ.get(name, usual) != usual for name, usual in _ROUNDING_MODES.items()):
        return False
    backend = torch.backends.cuda if values.device.type == "cuda" else torch.backends.mkldnn
    # PyTorch from 2.9 on; it refuses the older question where the newer setting was used.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is not None:
        return precision in ("none", "ieee")
    if torch.get_float32_matmul_precision() != "highest":
        return False
    return values.device.type != "cuda" or not torch.backends.cuda.matmul.allow_tf32


# By which the libraries below PyTorch are told to round, and what leaves float32 alone.
_ROUNDING_MODES = {
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "DNNL_DEFAULT_FPMATH_MODE": "STRICT",
    "NVIDIA_TF32_OVERRIDE": "0",
}


class _Gram(torch.autograd.Function):
    """XᵀX by a symmetric product, which does half the work of a general one."""

    @staticmethod
    def forward(data: Tensor) -> Tensor:
        """Multiply."""
        with single_blas_thread():
            return torch.from_numpy(_gram_of_array(data.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep X."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """X (G + Gᵀ)."""
        (data,) = ctx.saved_tensors
        of_data: Tensor = data @ (gradient + gradient.T)
        return of_data


def _gram_of_array(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # Whichever of both is in Fortran's order isn't copied.
    if array.flags.c_contiguous:
        lower = blas.dsyrk(1.0, array.T, lower=1)
    else:
        lower = blas.dsyrk(1.0, array, trans=1, lower=1)
    full: npt.NDArray[np.float64] = lower.T
    for start in range(0, len(full), TILE):
        end = start + TILE
        full[start:end, :start] = full[:start, start:end].T
        corner = full[start:end, start:end]
        corner += np.triu(corner, 1).T
    return full
