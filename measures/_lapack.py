"""LAPACK's and BLAS's routines on one core, called without Python's lock.

SciPy's functions of the same names hold the lock while they compute, so that threads would wait
for each other. These call the same routines of the same library, through what SciPy has for
Cython, with the same workspaces: to the last bit the numbers are SciPy's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.linalg import blas, cython_blas, cython_lapack, lapack

__all__ = ["cholesky", "eigenpairs_of", "reduced_pencil", "row_products", "solved_transposed"]

Array: TypeAlias = npt.NDArray[np.float64]
Routine: TypeAlias = Callable[..., None]


@cache
def _routine(name: str) -> Routine | None:
    """A routine by pointer; none where SciPy's integers are not those of C."""
    module = cython_blas if name in cython_blas.__pyx_capi__ else cython_lapack
    capsule = module.__pyx_capi__[name]
    signature = ctypes.pythonapi.PyCapsule_GetName
    signature.restype, signature.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    declared = signature(capsule)
    kinds = declared.decode().removeprefix("void (").removesuffix(")").split(", ")
    if not all(kind in ("char *", "int *") or kind.endswith("_d *") for kind in kinds):
        return None
    # What is called by such a prototype runs without the lock.
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(kinds))
    call = prototype(pointer(capsule, declared))

    def called(*given: Any) -> None:
        held = [_held(one) for one in given]
        call(*(one if isinstance(one, int) else ctypes.addressof(one) for one in held))

    return called


def _held(given: Any) -> Any:
    """What a routine is given the address of; of an array that address."""
    if isinstance(given, np.ndarray):
        return given.ctypes.data
    if isinstance(given, str):
        return ctypes.c_char(given.encode())
    return ctypes.c_double(given) if isinstance(given, float) else ctypes.c_int(given)


def row_products(array: Array) -> Array:
    """Inner products (m, m) of the rows of an array (m, k): the lower triangle, zeros above.

    Parameters
    ----------
    array : array of shape (m, k)
        In either order.
    """
    dsyrk = _routine("dsyrk")
    is_flat = array.flags.f_contiguous or array.flags.c_contiguous
    if dsyrk is None or not is_flat or 0 in array.shape:
        # Whichever of both is in Fortran's order isn't copied.
        if array.flags.f_contiguous:
            return np.asarray(blas.dsyrk(1.0, array, lower=1))
        return np.asarray(blas.dsyrk(1.0, array.T, trans=1, lower=1))
    m, k = array.shape
    products = np.zeros((m, m), order="F")
    trans, leading = ("N", m) if array.flags.f_contiguous else ("T", k)
    dsyrk("L", trans, m, k, 1.0, array, leading, 0.0, products, m)
    return products


def cholesky(matrix: Array) -> tuple[Array, int]:
    """Factor L of a symmetric matrix (r, r) whose lower triangle is read, and LAPACK's status."""
    dpotrf = _routine("dpotrf")
    if dpotrf is None:
        factor, failed = lapack.dpotrf(matrix, lower=1, clean=1)
        return factor, int(failed)
    factor = np.array(matrix, order="F")
    status = np.zeros(1, np.intc)
    dpotrf("L", len(factor), factor, len(factor), status)
    return np.triu(factor.T).T, int(status[0])


def reduced_pencil(matrix: Array, factor: Array) -> Array:
    """Lᵀ M L of a symmetric M (r, r) in its lower triangle."""
    dsygst = _routine("dsygst")
    if dsygst is None:
        return np.asarray(lapack.dsygst(matrix, factor, itype=2, lower=1)[0])
    reduced = np.array(matrix, order="F")
    status = np.zeros(1, np.intc)
    dsygst(2, "L", len(reduced), reduced, len(reduced), factor, len(factor), status)
    return reduced


def eigenpairs_of(matrix: Array) -> tuple[Array, Array, int]:
    """Eigenvalues (r,), vectors (r, r) and LAPACK's status.

    Parameters
    ----------
    matrix : array of shape (r, r), in Fortran's order
        Its lower triangle is read; it is overwritten.
    """
    dsyevd = _routine("dsyevd")
    if dsyevd is None:
        values, vectors, failed = lapack.dsyevd(matrix, lower=1, overwrite_a=1)
        return values, vectors, int(failed)
    r = len(matrix)
    values, work = np.empty(r), np.empty(1 + 6 * r + 2 * r * r)
    whole, status = np.empty(3 + 5 * r, np.intc), np.zeros(1, np.intc)
    dsyevd("V", "L", r, matrix, r, values, work, len(work), whole, len(whole), status)
    return values, matrix, int(status[0])


def solved_transposed(factor: Array, right: Array) -> Array:
    """L⁻ᵀ B of a lower triangular L (r, r) and B (r, k)."""
    dtrsm = _routine("dtrsm")
    if dtrsm is None or right.size == 0:
        return np.asarray(blas.dtrsm(1.0, factor, right, lower=1, trans_a=1))
    solved = np.array(right, order="F")
    r, k = solved.shape
    dtrsm("L", "L", "T", "N", r, k, 1.0, factor, len(factor), solved, r)
    return solved
