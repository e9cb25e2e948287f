"""The symmetric products on one core, and how few threads they start."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch.autograd import gradcheck

from nlbench.introspection.threads import single_blas_thread
from nlbench.measures.affinity import affinity_score
from nlbench.measures.linear_algebra import products
from nlbench.measures.linear_algebra.products import (
    gram,
    has_exact_float32_products,
    outer_products,
    product,
    uses_one_core,
)


@pytest.fixture(params=[True, False], ids=["one core", "several"])
def library(request, monkeypatch):
    monkeypatch.setattr(products, "uses_one_core", lambda values: request.param)


def samples(seed, n, d):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("library")
def test_products_are_those_of_the_definition():
    a, b = samples(0, 9, 4), samples(1, 6, 4)
    torch.testing.assert_close(gram(a), torch.einsum("ni,nj->ij", a, a))
    torch.testing.assert_close(gram(a.T), torch.einsum("in,jn->ij", a, a))
    torch.testing.assert_close(product(a, b.T), torch.einsum("ik,jk->ij", a, b))
    torch.testing.assert_close(outer_products(a, b), torch.einsum("ik,jk->ij", a, b))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("d", [1, 63, 64, 65, 130])
def test_gram_matrix_is_symmetric(d):
    a = samples(5, 7, d)
    torch.testing.assert_close(gram(a), torch.einsum("ni,nj->ij", a, a))


@pytest.mark.usefixtures("library")
def test_a_product_that_is_differentiated_has_its_gradient():
    a, b = samples(6, 4, 3).requires_grad_(), samples(7, 3, 5).requires_grad_()
    assert gradcheck(product, (a, b))


@pytest.mark.usefixtures("library")
def test_gradient_of_gram_matrix_equals_finite_differences():
    weights = samples(2, 3, 3)
    assert gradcheck(lambda a: gram(a) * weights, (samples(3, 5, 3).requires_grad_(),))


def test_small_products_use_one_core():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert uses_one_core(torch.zeros(1))
        assert not uses_one_core(torch.zeros(1, device="meta"))
        assert uses_one_core(torch.zeros(1, 513))
        torch.set_num_threads(2)
        assert uses_one_core(torch.zeros(4096, 512))
        assert not uses_one_core(torch.zeros(1, 513))
        assert not uses_one_core(torch.zeros(4097, 512))
    finally:
        torch.set_num_threads(before)


MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE")


@pytest.fixture
def usual_modes(monkeypatch):
    monkeypatch.setattr(products, "uses_one_core", lambda values: False)
    for name in MODES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("usual_modes")
@pytest.mark.parametrize("name", MODES)
def test_variables_that_round_products_are_noticed(monkeypatch, name):
    values = torch.zeros(2, 3)
    assert has_exact_float32_products(values)
    monkeypatch.setenv(name, "0" if name == "NVIDIA_TF32_OVERRIDE" else "STRICT")
    assert has_exact_float32_products(values)
    monkeypatch.setenv(name, "1")
    assert not has_exact_float32_products(values)
    monkeypatch.setattr(products, "uses_one_core", lambda values: True)
    assert has_exact_float32_products(values)


@pytest.mark.usefixtures("usual_modes")
@pytest.mark.parametrize("kind", ["cuda", "mkldnn"])
def test_settings_that_round_products_are_noticed(monkeypatch, kind):
    values = SimpleNamespace(device=torch.device("cuda" if kind == "cuda" else "cpu"))
    matmul = SimpleNamespace()
    monkeypatch.setattr(torch.backends, kind, SimpleNamespace(matmul=matmul))
    for precision, is_exact in {"none": True, "ieee": True, "tf32": False, "bf16": False}.items():
        matmul.fp32_precision = precision
        assert has_exact_float32_products(values) is is_exact
    # Before PyTorch 2.9.
    del matmul.fp32_precision
    for allowed, precision in itertools.product([True, False], ["highest", "high"]):
        matmul.allow_tf32 = allowed
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda p=precision: p)
        is_exact = precision == "highest" and not (kind == "cuda" and allowed)
        assert has_exact_float32_products(values) is is_exact


def library_threads():
    return [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def two_library_threads():
    """NumPy's and SciPy's default on two cores, set by a thread that has ended."""
    before = library_threads()
    in_a_thread(lambda: threadpool_limits(2, user_api="blas")).join()
    assert set(library_threads()) == {2}
    yield
    in_a_thread(lambda: threadpool_limits(before[0], user_api="blas")).join()


@pytest.mark.usefixtures("two_library_threads")
def test_libraries_use_one_thread_inside_the_block():
    with single_blas_thread():
        assert set(library_threads()) == {1}
        with single_blas_thread():
            assert set(library_threads()) == {1}
        assert set(library_threads()) == {1}
    assert set(library_threads()) == {2}


@pytest.mark.usefixtures("two_library_threads")
def test_nested_blocks_restore_the_threads():
    other_in, first_out = threading.Event(), threading.Event()

    def leaves_last():
        with single_blas_thread():
            other_in.set()
            first_out.wait(60)

    with single_blas_thread():
        other = in_a_thread(leaves_last)
        assert other_in.wait(60)
        assert set(library_threads()) == {1}
    first_out.set()
    other.join()
    assert set(library_threads()) == {2}


@pytest.mark.usefixtures("two_library_threads")
def test_error_inside_leaves_the_libraries_as_they_were():
    with pytest.raises(ZeroDivisionError), single_blas_thread():
        _ = 1 / 0
    assert set(library_threads()) == {2}


@pytest.mark.parametrize(("n", "d"), [(60, 8), (300, 40), (20, 70)])
def test_affinity_and_gradient_agree_between_libraries(n, d):
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            x = samples(4, n, d).requires_grad_()
            score = affinity_score(x, torch.relu(x))
            score.backward()
            found.append((score.detach(), x.grad))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
