import pytest
import torchvision
from torch import nn

from nlbench.models.sparsified.prelu import sparsify
from nlbench.models.sparsified.surgery import other_activations


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mobilenet_v2", {"relu6": 35}),
        ("mobilenet_v3_small", {"hardswish": 19, "hardsigmoid": 9}),
        ("resnet18", {}),
    ],
)
def test_other_activations_than_relu_are_counted_by_kind(name, counts):
    assert other_activations(torchvision.models.get_model(name, weights=None)) == counts


def test_slopes_are_no_other_activations():
    network = sparsify(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sigmoid()))
    assert other_activations(network) == {"sigmoid": 1}
