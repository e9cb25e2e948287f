"""Operations that the channel graph follows, and those that it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlbench.errors import Undefined, UnsupportedOperation
from nlbench.probes.graph.channel_graph import counted_lengths, walked_length
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.sites.sites_observation import list_sites


class Calls(nn.Module):
    """A network whose forward is a function, with layers to call."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def lengths(model, *shape):
    graph = channel_graph(model, torch.zeros(1, *shape))
    return walked_length(graph), counted_lengths(graph).mean


def test_gate_is_parallel_to_what_it_multiplies():
    gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))
    model = Calls(lambda self, x: x * torch.sigmoid(self.gate(x)), gate=gate)
    # One way straight on, and 8 = 4 * 2 ways through the gate with two units.
    assert lengths(model, 4, 3, 3) == (1.0, pytest.approx(16 / 9))


def test_constants_add_no_branch():
    model = Calls(
        lambda self, x: self.act(x) + self.position,
        act=nn.Tanh(),
        position=nn.Parameter(torch.zeros(1, 4, 3, 3)),
    )
    assert lengths(model, 4, 3, 3) == (1.0, 1.0)


def test_scaled_sum_merges_its_inputs():
    scale = nn.Parameter(torch.ones(4))
    alone = Calls(lambda self, x: torch.addcmul(self.scale, self.scale, self.act(x)), scale=scale)
    beside = Calls(lambda self, x: torch.addcmul(x, self.act(x), self.scale), scale=scale)
    alone.act, beside.act = nn.Tanh(), nn.Tanh()
    assert lengths(alone, 4) == (1.0, 1.0)
    assert lengths(beside, 4) == (0.5, 0.5)


@pytest.mark.parametrize("weight", [0.3, torch.full((4,), 0.3)])
def test_an_interpolation_merges_what_depends_on_the_input(weight):
    constant = torch.ones(4)
    for function, expected in [
        (lambda self, x: torch.lerp(self.act(x), constant, weight), 1.0),
        (lambda self, x: torch.lerp(constant, self.act(x), weight), 1.0),
        (lambda self, x: self.act(x).lerp(end=constant, weight=weight), 1.0),
        (lambda self, x: self.act(x).lerp_(constant, weight), 1.0),
        (lambda self, x: torch.lerp(x, self.act(x), weight), 0.5),
    ]:
        assert lengths(Calls(function, act=nn.Tanh()), 4) == (expected, expected)


def test_interpolation_whose_weight_depends_on_input_is_refused():
    model = Calls(lambda self, x: torch.lerp(x, torch.ones(4), x))
    with pytest.raises(UnsupportedOperation):
        lengths(model, 4)


def test_channels_padded_with_zeros_have_only_other_branch():
    # The shortcut without parameters: half of the channels have no way around the unit.
    model = Calls(
        lambda self, x: self.act(self.conv(x)) + F.pad(x[..., ::2, ::2], (0, 0, 0, 0, 1, 1)),
        act=nn.ReLU(),
        conv=nn.Conv2d(2, 4, 3, stride=2, padding=1),
    )
    walked, counted = lengths(model, 2, 4, 4)
    assert walked == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    assert counted == pytest.approx(8 / 10)


def test_padded_positions_belong_to_their_channel():
    model = Calls(lambda self, x: self.act(F.pad(x, (1, 1, 2, 2))), act=nn.ReLU())
    graph = channel_graph(model, torch.zeros(1, 3, 2, 2))
    assert [unit.size for unit in graph.units] == [3]


def test_class_token_shares_channels_of_other_tokens():
    model = Calls(
        lambda self, x: self.act(torch.cat([self.token, self.embed(x)], 1))[:, 0],
        embed=nn.Linear(3, 5),
        token=nn.Parameter(torch.zeros(1, 1, 5)),
        act=nn.GELU(),
    )
    graph = channel_graph(model, torch.zeros(1, 4, 3))
    assert [unit.size for unit in graph.units] == [5]
    assert counted_lengths(graph).mean == 1.0


def test_positions_of_channel_are_one_node_when_flattened():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 9, 4))
    graph = channel_graph(model, torch.zeros(1, 1, 3, 3))
    assert counted_lengths(graph).log10_paths == pytest.approx(torch.tensor(8.0).log10().item())


def test_gated_linear_unit_has_its_unit_on_gate():
    assert lengths(nn.GLU(1), 6) == (0.5, 0.5)


def attended(heads):
    """Attention written out, over one input, after a unit on the queries alone."""

    def forward(self, x):
        q, k, v = self.act(self.q(x)), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    return forward


def fused(heads):
    def forward(self, x):
        q, k, v = self.act(self.q(x)), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return forward


def summed(heads):
    def forward(self, x):
        q, k, v = self.act(self.q(x)), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)

    return forward


@pytest.mark.parametrize("form", [attended, fused, summed])
def test_attention_merges_queries_keys_and_values(form):
    layers = {name: nn.Linear(3, 4) for name in ("q", "k", "v")}
    model = Calls(form(2), act=nn.ReLU(), **layers)
    # Values: 3 ways a channel. Weights: 2 queries with a unit and 2 keys, 3 ways each.
    assert lengths(model, 5, 3) == (0.25, pytest.approx(6 / 15))


def test_multi_head_attention_is_followed_like_its_parts():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(torch.relu(x), x, x, need_weights=False)[0]

    # Per channel after the heads: 2 * 4 * 1 of queries, as many of keys, 4 of values.
    assert lengths(Module(), 5, 4) == (0.25, pytest.approx(8 / 20))


def test_transformer_layer_has_half_unit_per_residual():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert lengths(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), 5, 8)[0] == 1.5


def test_two_inputs_are_two_sources():
    model = Calls(
        lambda self, a, b: self.act(self.embed(a)) + self.linear(b),
        embed=nn.Embedding(10, 4),
        act=nn.Tanh(),
        linear=nn.Linear(3, 4),
    )
    graph = channel_graph(model, (torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, 3)))
    assert graph.inputs == 4
    assert walked_length(graph) == 0.5
    assert counted_lengths(graph).mean == 0.25


def test_sites_are_named_as_in_sites_probe():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

        def forward(self, x):
            return F.gelu(self.act(self.layer(self.act(self.layer(x)))))

    graph = channel_graph(Twice(), torch.zeros(2, 3))
    names = [site.name for site in list_sites(Twice(), torch.zeros(2, 3))]
    assert [unit.site for unit in graph.units] == names == ["act", "act:1", "gelu"]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 3)
    given = x.clone()
    channel_graph(model, x)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert torch.equal(x, given)


def test_value_dependent_network_runs_on_the_example():
    model = Calls(lambda self, x: self.act(x) if x.sum() > 0 else x, act=nn.ReLU())
    assert walked_length(channel_graph(model, torch.ones(1, 3))) == 1.0
    assert walked_length(channel_graph(model, torch.zeros(1, 3))) == 0.0


def test_slopes_on_the_meta_device_are_not_known():
    with torch.device("meta"):
        model = nn.PReLU(3)
    with pytest.raises(Undefined):
        channel_graph(model, torch.empty(1, 3, device="meta"))


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda self, x: x.cumsum(1), "cumsum"),
        (lambda self, x: x.sort(1).values, "sort"),
        (lambda self, x: x / (1 + x.mean(1, keepdim=True)), "div"),
        (lambda self, x: x * (x > 1), "gt"),
        (lambda self, x: x.masked_fill(x < 0, 1.0), "lt"),
        (lambda self, x: torch.where(x > 1, x, 0.0), "gt"),
        (lambda self, x: 1 / x, "rdiv"),
        (lambda self, x: x.gather(1, x.max(1, keepdim=True).indices), "max"),
        (lambda self, x: torch.zeros_like(x).index_copy_(1, torch.arange(3), x), "index_copy"),
        (lambda self, x: F.linear(x, x.reshape(1, 3)), "linear"),
        (lambda self, x: torch.maximum(x, -x), "maximum"),
    ],
)
def test_unknown_operations_are_refused_with_place(function, operation):
    model = nn.Sequential(nn.Linear(3, 3), Calls(function))
    with pytest.raises(UnsupportedOperation) as caught:
        channel_graph(model, torch.ones(1, 3))
    assert (caught.value.operation, caught.value.place) == (operation, "1")


def test_input_passed_through_has_no_units():
    assert lengths(nn.Identity(), 3) == (0.0, 0.0)


def test_operation_without_effect_on_output_is_accepted():
    def forward(self, x):
        self.seen = (x.detach().sort().values > 0).double().mean()
        return self.act(x)

    assert lengths(Calls(forward, act=nn.ReLU()), 3) == (1.0, 1.0)


def test_part_overwritten_by_an_unknown_operation_is_refused():
    def forward(self, x):
        y = self.layer(x)
        y[:, :2].cumsum_(1)
        return y

    with pytest.raises(UnsupportedOperation):
        channel_graph(Calls(forward, layer=nn.Linear(3, 3)), torch.zeros(1, 3))


def test_a_tensor_overwritten_under_another_name_is_refused():
    def forward(self, x):
        y = self.layer(x)
        y[:, :2].relu_()
        return y

    model = Calls(forward, layer=nn.Linear(3, 3))
    with pytest.raises(UnsupportedOperation):
        channel_graph(model, torch.zeros(1, 3))


def test_in_place_unit_counts_on_both_branches():
    def forward(self, x):
        y = self.layer(x)
        z = F.relu(y, inplace=True)
        return y + self.layer(z)

    model = Calls(forward, layer=nn.Linear(3, 3))
    assert lengths(model, 3) == (1.0, 1.0)


def test_an_output_without_paths_is_undefined():
    model = Calls(lambda self, x: self.weight * 2, weight=nn.Parameter(torch.ones(1, 3)))
    with pytest.raises(Undefined):
        channel_graph(model, torch.zeros(1, 3))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_convolution_keeps_groups_in_order(kind):
    def forward(self, x):
        parts = [x[:, :2], x[:, 2:4].relu(), x[:, 4:].relu().tanh()]
        return self.layer(torch.cat(parts, 1)).unflatten(1, (3, 4))[:, number]

    for number in range(3):
        model = Calls(forward, layer=kind(6, 12, 1, groups=3))
        assert walked_length(channel_graph(model, torch.zeros(1, 6, 2, 2))) == number
