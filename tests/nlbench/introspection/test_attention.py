"""Softmaxes inside PyTorch's fused attention, against attention written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from nlbench.introspection.attention import SoftmaxInterceptor


def heads(seed, count, length, width=4):
    return torch.randn(2, count, length, width, generator=torch.Generator().manual_seed(seed))


def softmaxes(q, k, v, **options):
    """The output of fused attention, and its softmaxes."""
    calls = []
    with torch.no_grad(), SoftmaxInterceptor(lambda x, y, axis: calls.append((x, y, axis))):
        output = F.scaled_dot_product_attention(q, k, v, **options)
    return output, calls


@pytest.mark.parametrize("keys", [5, 7])
def test_a_causal_mask_hides_later_keys_alone(keys):
    q, k, v = heads(0, 3, 5), heads(1, 3, keys), heads(2, 3, keys)
    output, ((x, y, axis),) = softmaxes(q, k, v, is_causal=True)
    later = torch.arange(keys) > torch.arange(5)[:, None]
    logits = (q @ k.mT / 2).masked_fill(later, -math.inf)
    torch.testing.assert_close(x, logits)
    torch.testing.assert_close(y, logits.softmax(-1))
    torch.testing.assert_close(y @ v, output)
    assert axis == 3


def test_grouped_queries_use_their_groups_key():
    q, k, v = heads(3, 6, 5), heads(4, 2, 5), heads(5, 2, 5)
    output, ((x, y, _),) = softmaxes(q, k, v, enable_gqa=True)
    for head in range(6):
        torch.testing.assert_close(x[:, head], q[:, head] @ k[:, head // 3].mT / 2)
        torch.testing.assert_close(y[:, head] @ v[:, head // 3], output[:, head])


def test_boolean_mask_and_scale_enter_the_logits():
    q, k, v = heads(6, 2, 5), heads(7, 2, 5), heads(8, 2, 5)
    mask = torch.arange(25).reshape(5, 5) % 3 > 0
    output, ((x, y, _),) = softmaxes(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(x, (0.3 * q @ k.mT).masked_fill(~mask, -math.inf))
    torch.testing.assert_close(y @ v, output)
