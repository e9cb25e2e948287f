"""Any state of a model that affects its output is part of its hash."""

import warnings

import pytest
import torch
from torch import nn

import nlbench
from nlbench.serialization.hashing import state_hash


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def quantised(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(network(seed), {nn.Linear}, torch.qint8)


class Extra(nn.Linear):
    def __init__(self, state):
        super().__init__(1, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.state = state

    def get_extra_state(self):
        return {"power": self.state}


def with_buffer(tensor):
    model = nn.Identity()
    model.register_buffer("adjacency", tensor)
    return model


def with_attribute(value):
    model = nn.Identity()
    model.constants = value
    return model


def matrix(seed):
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.where(values > 0, values, 0.0)


def per_channel(seed):
    scales, zeros = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4)
    return torch.quantize_per_channel(matrix(seed), scales, zeros, 0, torch.qint8)


KINDS = {
    "packed": quantised,
    "extra state": lambda seed: Extra(seed),
    "coo": lambda seed: with_buffer(matrix(seed).to_sparse()),
    "csr": lambda seed: with_buffer(matrix(seed).to_sparse_csr()),
    "csc": lambda seed: with_buffer(matrix(seed).to_sparse_csc()),
    "bsr": lambda seed: with_buffer(matrix(seed).to_sparse_bsr((2, 2))),
    "per tensor": lambda s: with_buffer(torch.quantize_per_tensor(matrix(s), 0.1, 3, torch.qint8)),
    "per channel": lambda seed: with_buffer(per_channel(seed)),
    "mkldnn": lambda seed: with_buffer(matrix(seed).to_mkldnn()),
    "complex": lambda seed: with_buffer(torch.complex(matrix(seed), matrix(seed + 5))),
    "bfloat16": lambda seed: with_buffer(matrix(seed).bfloat16()),
    "attribute": lambda seed: with_attribute(matrix(seed)),
    "list": lambda seed: with_attribute([matrix(seed), {"deep": matrix(seed)}]),
    "nested": lambda s: with_attribute(torch.nested.nested_tensor([matrix(s), matrix(s + 1)[:2]])),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_state_hash_identifies_the_state(kind):
    first, again, other = (state_hash(KINDS[kind](seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first != state_hash(nn.Identity())


def test_unreadable_state_is_never_that_of_another_model():
    first = with_buffer(torch.zeros(2, device="meta"))
    assert state_hash(first) != state_hash(first)


def test_scale_of_quantised_values_is_hashed():
    values = torch.randn(3)
    hashes = {
        state_hash(with_buffer(torch.quantize_per_tensor(values * scale, scale, 0, torch.qint8)))
        for scale in (0.5, 0.25)
    }
    assert len(hashes) == 2


def test_a_sparse_buffer_ends_no_evaluation():
    model = network(0)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    run = nlbench.evaluate(model, torch.randn(16, 4), ["affinity", "norm"])
    assert set(run.scores.status) == {"ok"}
