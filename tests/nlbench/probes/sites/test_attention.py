import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlbench.introspection.axes import softmax_axis
from nlbench.introspection.function_calls import FunctionCall
from nlbench.probes.sites.sites_observation import list_sites, observe_sites


class Attention(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.qkv, self.function = nn.Linear(8, 24), function

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.function(q, k, v)


def by_hand(q, k, v, mask=None):
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    return logits if mask is None else logits + mask


MASK = torch.linspace(-1, 1, 25).reshape(5, 5)
WAYS = {
    "by hand": lambda q, k, v: F.softmax(by_hand(q, k, v), -1) @ v,
    "by a method": lambda q, k, v: by_hand(q, k, v).softmax(dim=-1) @ v,
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
}


@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_softmax_of_attention_is_site_on_request_only(function):
    model, x = Attention(function), torch.randn(3, 5, 8)
    assert list_sites(model, x) == []
    observations = []
    observe_sites(model, [x], observations.append, attention=True)
    (observation,) = observations
    assert (observation.place, observation.site.kind, observation.site.role) == (
        "softmax",
        "softmax",
        "attention",
    )
    assert (observation.site.shape, observation.site.channel_axis) == ((2, 5, 5), 3)
    with torch.no_grad():
        model.function = by_hand
        logits = model(x)
    torch.testing.assert_close(observation.x, logits.mean((1, 2)))
    torch.testing.assert_close(observation.y, logits.softmax(-1).mean((1, 2)))


def test_fused_attention_mask_enters_the_softmax():
    model = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK))
    observations, x = [], torch.randn(3, 5, 8)
    observe_sites(model, [x], observations.append, attention=True)
    model.function = lambda q, k, v: by_hand(q, k, v, MASK)
    with torch.no_grad():
        logits = model(x)
    torch.testing.assert_close(observations[0].x, logits.mean((1, 2)))
    torch.testing.assert_close(observations[0].y, logits.softmax(-1).mean((1, 2)))


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_softmax_inside_multi_head_attention_is_seen(need_weights):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[0]

    model, x = Model().eval(), torch.randn(3, 5, 8)
    observations = []
    observe_sites(model, [x], observations.append, attention=True)
    with torch.no_grad():
        weights = model.attention(x, x, x, average_attn_weights=False)[1]
    (observation,) = observations
    assert observation.place == "attention/softmax"
    rows = observation.y.reshape(3, -1, 5).mean(1)
    torch.testing.assert_close(rows, weights.mean((1, 2)))


def test_looking_at_attention_leaves_output_bit_for_bit():
    model, x = Attention(WAYS["fused"]), torch.randn(3, 5, 8)
    outputs = []
    with torch.no_grad():
        before = model(x)
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    observe_sites(model, [x], lambda observation: None, attention=True)
    assert torch.equal(outputs[0], before)


def test_softmax_over_row_of_logits_is_not_attention():
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    (site,) = list_sites(model, torch.randn(2, 4), attention=True)
    assert (site.name, site.kind, site.role) == ("1", "softmax", "activation")


@pytest.mark.parametrize(("rank", "axis"), [(1, 0), (2, 1), (3, 0), (4, 1)])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_softmax_without_axis_takes_one_that_pytorch_takes(rank, axis):
    x = torch.randn(2, 3, 4, 5)[(0,) * (4 - rank)]
    assert softmax_axis(FunctionCall(F.softmax, (x,))) == axis
    torch.testing.assert_close(F.softmax(x), x.softmax(axis))


def test_softmax_of_images_without_axis_uses_channels():
    class Model(nn.Module):
        def forward(self, x):
            return F.softmax(x, _stacklevel=5)

    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        (site,) = list_sites(Model(), torch.randn(2, 3, 4, 5), attention=True)
    assert site.channel_axis == 1
