"""A network with a sparse parameter has the values of one with a dense one, or a reason."""

import pytest
import torch
from torch import nn

import nlbench

MEASURES = [
    "affinity", "r2", "norm", "nlc", "affine-residual", "absdev", "density", "pathlength",
    "substitution", "geometric-complexity", "local-linearity", "accuracy", "length-distortion",
]  # fmt: skip


class Network(nn.Module):
    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(8, 4)
        weight[weight.abs() < 0.5] = 0
        self.weight = nn.Parameter(weight.to_sparse(layout=layout), requires_grad=False)
        self.act, self.last = nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.act(self.weight.matmul(x.T).T))


def _results(layout):
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    settings = {"lines.number": 1}
    labels = torch.arange(32) % 3
    return nlbench.evaluate(
        Network(layout), inputs, MEASURES, labels=labels, settings=settings, errors="none"
    )


@pytest.fixture(scope="module")
def dense():
    return _results(torch.strided)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_values_do_not_depend_on_the_layout(layout, dense):
    results = _results(layout)
    assert results["density"].status == "undefined"
    assert "sparse tensor" in results["density"].reason
    for name in MEASURES:
        if name != "density":
            assert results[name].status == "ok", (name, results[name].reason)
            expected = dense[name].summary["value"]
            assert results[name].summary["value"] == pytest.approx(expected, rel=1e-3), name
