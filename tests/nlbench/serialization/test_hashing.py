import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.serialization.hashing import SampleHash, content_key, tensor_hash

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
SCALARS = st.none() | st.booleans() | st.integers() | st.text()
CONTENT = st.dictionaries(st.text(), SCALARS | st.lists(SCALARS), max_size=5)


def hash_of(batches, samples):
    digest = SampleHash(samples)
    for batch in batches:
        digest.update(batch)
    return digest.hexdigest()


@given(CONTENT)
def test_a_key_is_independent_of_the_order(content):
    backwards = dict(reversed(content.items()))
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert content_key(content) == content_key(backwards)
    assert content_key(content) == hashlib.sha256(text.encode()).hexdigest()[:32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_hash_covers_shape_type_and_bytes(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    text = f"(2, 3, 4) {dtype}".encode() + np.ascontiguousarray(tensor.numpy()).tobytes()
    assert tensor_hash(tensor) == hashlib.sha256(text).hexdigest()
    assert tensor_hash(tensor.transpose(0, 2).contiguous().transpose(0, 2)) == tensor_hash(tensor)
    assert tensor_hash(tensor.reshape(6, 4)) != tensor_hash(tensor)


def test_views_and_lazy_signs_hash_alike():
    complex_ = torch.randn(3, 2, dtype=torch.complex64)
    assert tensor_hash(complex_.conj()) == tensor_hash(complex_.conj().resolve_conj())
    leaf = torch.randn(3, requires_grad=True)
    assert tensor_hash(leaf) == tensor_hash(leaf.detach())
    assert tensor_hash(torch.tensor(1.0)) == tensor_hash(torch.tensor(1.0))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(DTYPES))
def test_samples_in_batches_have_hash_of_one_tensor(lengths, dtype):
    samples = torch.arange(3 * sum(lengths)).reshape(-1, 3).to(dtype)
    parts = samples.split(lengths)
    assert hash_of(parts, len(samples)) == tensor_hash(samples)
    assert hash_of(parts, None) == hash_of([samples], None) != tensor_hash(samples)
    assert SampleHash(3).hexdigest() == ""
