import pytest
import torch

from nlbench.probes.sites.reduce import capture, reduce_site
from nlbench.probes.sites.site import UnreducedResults


@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 600, 700), (7, 4, 9), (7,)])
def test_chunked_activation_equals_the_whole(shape):
    x = torch.randn(shape)
    functions = {"peak": lambda t: t.reshape(len(t), -1).amax(1)}
    side = capture(x, 1, "spatial", functions)
    torch.testing.assert_close(side.reduced, reduce_site(x, 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(side.function_results["peak"], functions["peak"](x))


def test_large_activations_are_reduced_in_chunks():
    sizes = []

    def numbers(t):
        sizes.append(len(t))
        return t.sum((1, 2))

    capture(torch.zeros(8, 2, 2**18), 1, "spatial", {"sum": numbers})
    assert sizes == [2, 2, 2, 2]


def test_results_survive_overwritten_activations():
    x = torch.ones(4, 3)
    side = capture(x, 1, "spatial", {"first": lambda t: t[:, 0]})
    x.zero_()
    assert side.function_results["first"].tolist() == [1, 1, 1, 1]


def test_function_error_is_raised_on_reading():
    def fails(t):
        raise ValueError("mine")

    functions = {"fails": fails, "shape": lambda t: t, "sum": lambda t: t.sum(1)}
    side = capture(torch.ones(4, 3), 1, "spatial", functions)
    unreduced = UnreducedResults({n: (r, r) for n, r in side.function_results.items()})
    with pytest.raises(ValueError, match="mine"):
        unreduced["fails"]
    with pytest.raises(ValueError, match="shape"):
        unreduced["shape"]
    assert unreduced["sum"][0].tolist() == [3, 3, 3, 3]
    with pytest.raises(KeyError):
        unreduced["unknown"]


def test_half_precision_sums_in_float32_without_copying():
    x = torch.full((2, 3, 100, 100), 1.001, dtype=torch.bfloat16)
    reduced = reduce_site(x, 1)
    assert reduced.dtype == torch.float32
    assert torch.equal(reduced, x.float().mean((2, 3)))
