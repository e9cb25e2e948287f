import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from nlbench.errors import Undefined
from nlbench.introspection.axes import Layouts
from nlbench.introspection.function_calls import FunctionCall
from nlbench.probes.sites.reduce import reduce_site
from nlbench.probes.sites.sites_observation import list_sites, observe_sites


def test_spatial_keeps_the_channels_wherever_they_are():
    x = torch.randn(3, 5, 7, 2)
    torch.testing.assert_close(reduce_site(x, 1), x.mean((2, 3)))
    torch.testing.assert_close(reduce_site(x, 3), x.mean((1, 2)))
    tokens = torch.randn(3, 11, 4)
    torch.testing.assert_close(reduce_site(tokens, 2), tokens.mean(1))


def test_flatten_keeps_all_but_the_batch():
    x = torch.randn(3, 5, 7, 2)
    torch.testing.assert_close(reduce_site(x, 1, "flatten"), x.reshape(3, 70))


def test_published_averages_the_last_axes_whatever_they_are():
    x, tokens = torch.randn(3, 5, 7, 2), torch.randn(3, 11, 4)
    torch.testing.assert_close(reduce_site(x, 3, "published"), x.mean((2, 3)))
    torch.testing.assert_close(reduce_site(tokens, 2, "published"), tokens.mean(2))


@pytest.mark.parametrize("reduction", ["spatial", "flatten", "published"])
def test_the_reduction_never_shares_memory_with_the_activation(reduction):
    x = torch.randn(4, 6)
    reduced = reduce_site(x, 1, reduction)
    x.zero_()
    assert reduced.abs().sum() > 0


def test_vector_is_one_feature_and_scalar_none():
    assert reduce_site(torch.randn(4), 0).shape == (4, 1)
    with pytest.raises(Undefined):
        reduce_site(torch.tensor(1.0), 0)


def widths(model, example):
    """Reduced width of each site, beside the width of the layer that made it."""
    found = []
    observe_sites(model, [example], lambda observation: found.append(observation.x.shape[1]))
    return found


@pytest.mark.parametrize(
    ("name", "size", "axis"),
    [("resnet18", 32, 1), ("vit_b_32", 224, 2), ("swin_t", 32, 3), ("convnext_tiny", 32, 3)],
)
def test_channel_axis_is_right_for_each_network_kind(name, size, axis):
    model = torchvision.models.get_model(name, weights=None)
    sites = list_sites(model, torch.randn(2, 3, size, size))
    assert {site.channel_axis for site in sites} == {axis}
    assert not any(site.assumed for site in sites)


def test_a_one_dimensional_convolution_has_its_channels_second():
    model = nn.Sequential(nn.Conv1d(2, 7, 3), nn.BatchNorm1d(7), nn.ReLU())
    assert widths(model, torch.randn(4, 2, 20)) == [7]


def test_linear_layer_on_tokens_has_its_channels_last():
    model = nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.Dropout(), nn.GELU())
    assert widths(model, torch.randn(4, 20, 5)) == [9]


def test_a_permutation_is_followed_there_and_back():
    class Permuting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 6, 1), nn.Linear(6, 10)

        def forward(self, x):
            x = torch.relu(self.conv(x))
            x = torch.relu(x.permute(0, 2, 3, 1) - 0.1)
            x = torch.relu(self.linear(x))
            x = torch.relu(x.transpose(1, 3) - 0.1)
            return torch.relu(x.flatten(2) + 0.1)

    assert widths(Permuting(), torch.randn(4, 3, 8, 8)) == [6, 6, 10, 10, 10]


def test_sum_of_a_skip_branch_keeps_the_axis():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, 5, 3, padding=1)

        def forward(self, x):
            x = self.conv(x)
            return torch.relu(x + self.conv(x))

    assert widths(Residual(), torch.randn(4, 5, 30)) == [5]


class Given(nn.Module):
    """A network written as one function of a convolution's or linear layer's output."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function
        self.table = nn.Parameter(torch.rand(5, 1) + 0.5)
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        return F.relu(self.function(self, x, self.layer(x)))


def assert_reduced_over(model, x, others):
    """The only site is reduced as the mean over `others` does by hand, and known to be."""
    sites, found = list_sites(model, x), []
    observe_sites(model, [x], lambda observation: found.append((observation.x, observation.y)))
    (site,), ((before, after),) = sites, found
    assert not site.assumed
    with torch.no_grad():
        given = model.function(model, x, model.layer(x))
        expected = [v.mean(others) if others else v for v in (given, given.relu())]
    torch.testing.assert_close(before, expected[0])
    torch.testing.assert_close(after, expected[1])
    kept = [axis for axis in range(1, given.ndim) if axis not in others]
    assert [site.channel_axis] == kept


CONV1D = {
    "the chomp of a causal convolution": (lambda m, x, h: h[:, :, :-2], (2,)),
    "an ellipsis ahead of a slice": (lambda m, x, h: h[..., 2:], (2,)),
    "an index that drops an axis behind": (lambda m, x, h: h[:, :, None, 1], (2,)),
    "an axis put in ahead": (lambda m, x, h: h[:, None], (1, 3)),
    "an index tensor": (lambda m, x, h: h[:, torch.tensor([1, 0, 2])], (2,)),
    "a sum that begins with the input": (lambda m, x, h: x + h, (2,)),
    "a sum that ends with the input": (lambda m, x, h: h + x, (2,)),
    "a number that multiplies": (lambda m, x, h: 2 * h - 1, (2,)),
    "a parameter that multiplies": (lambda m, x, h: m.table * h, (2,)),
    "a concatenation that begins with the input": (lambda m, x, h: torch.cat([x, h], 1), (2,)),
    "a stack": (lambda m, x, h: torch.stack([h, h], 1), (1, 3)),
    "movedim": (lambda m, x, h: h.movedim(1, -1), (1,)),
    "moveaxis by name": (lambda m, x, h: torch.moveaxis(h, source=2, destination=1), (1,)),
    "mT": (lambda m, x, h: h.mT, (1,)),
    "unsqueeze": (lambda m, x, h: h.unsqueeze(1), (1, 3)),
    "unsqueeze and squeeze": (lambda m, x, h: h.unsqueeze(1).squeeze(1), (2,)),
    "a narrowed axis": (lambda m, x, h: h.narrow(2, 0, 4), (2,)),
    "a part": (lambda m, x, h: h.chunk(2, 2)[1], (2,)),
    "a mean that keeps the axis": (lambda m, x, h: h - h.mean(1, keepdim=True), (2,)),
    "an expansion": (lambda m, x, h: h[:, None].expand(-1, 2, -1, -1), (1, 3)),
    "a product with a weight": (lambda m, x, h: h.transpose(1, 2) @ m.weight, (1,)),
}  # fmt: skip
CONV2D = {
    "a mean over rows": (lambda m, x, h: h.mean(2), (2,)),
    "a maximum over the last axis": (lambda m, x, h: h.max(-1).values, (2,)),
    "a sum over both axes": (lambda m, x, h: h.sum(dim=(2, 3)), ()),
    "amax by name": (lambda m, x, h: torch.amax(h, dim=3, keepdim=False), (2,)),
    "one of an unbound axis": (lambda m, x, h: h.unbind(3)[0], (2,)),
    "a selected row": (lambda m, x, h: h.select(2, 0), (2,)),
    "an integer index": (lambda m, x, h: h[:, :, 0], (2,)),
    "tokens of an image": (lambda m, x, h: h.flatten(2).transpose(1, 2), (1,)),
    "channels last": (lambda m, x, h: h.permute(0, 2, 3, 1)[:, 1:], (1, 2)),
    "channels last, a part of them": (lambda m, x, h: h.permute(0, 2, 3, 1)[..., :4], (1, 2)),
    "a product with a weight": (lambda m, x, h: h.permute(0, 2, 3, 1) @ m.weight, (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize(("function", "others"), CONV1D.values(), ids=CONV1D)
def test_channels_of_a_1d_convolution_are_followed(function, others):
    model = Given(nn.Conv1d(5, 5, 3, padding=1), function)
    assert_reduced_over(model, torch.randn(4, 5, 12), others)


@pytest.mark.parametrize(("function", "others"), CONV2D.values(), ids=CONV2D)
def test_the_channels_of_an_image_are_followed_through(function, others):
    model = Given(nn.Conv2d(3, 5, 3), function)
    assert_reduced_over(model, torch.randn(4, 3, 9, 8), others)


def test_transposed_weight_of_product_is_not_an_activation():
    model = Given(nn.Identity(), lambda m, x, h: torch.matmul(h, m.weight.T))
    assert_reduced_over(model, torch.randn(4, 3, 7, 6), (1, 2))


@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 8, 8), 1), ((4, 8, 6), 2)])
def test_an_assumed_channel_axis_is_reported(shape, axis):
    (site,) = list_sites(nn.ReLU(), torch.randn(shape))
    assert (site.channel_axis, site.assumed) == (axis, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, h: h[:, torch.tensor([[0, 1]]), 0],
        lambda m, x, h: torch.einsum("bcl,bkl->bck", h, h),
        lambda m, x, h: h.reshape(4, 10, 6),
        lambda m, x, h: h @ h.mT,
    ],
)
def test_mixed_axes_are_a_reported_guess(function):
    (site,) = list_sites(Given(nn.Conv1d(5, 5, 1), function), torch.randn(4, 5, 12))
    assert site.assumed


def test_a_matrix_leaves_no_choice():
    (site,) = list_sites(nn.ReLU(), torch.randn(4, 3))
    assert not site.assumed


@pytest.mark.parametrize(("layer", "size"), [(F.conv2d, 5), (F.linear, 11)])
@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None), 1),
        (Ellipsis, 0, slice(None)),
        (None, slice(1, None), Ellipsis, None, 2, slice(None)),
        (0,),
        1,
        slice(2),
        (Ellipsis, None),
        (slice(None), slice(None), torch.tensor([0, 2])),
    ],
    ids=str,
)
def test_channels_are_followed_through_an_index(index, layer, size):
    x = torch.empty(3, 5, 7, 11)
    layouts, output = Layouts(1), x[index]
    layouts.follow(FunctionCall(layer, (x,)), x)
    layouts.follow(FunctionCall(torch.Tensor.__getitem__, (x, index)), output)
    channel, assumed = layouts.describe(output)[1:]
    # The first axis of what is left counts as the batch, which is no place for channels.
    if output.shape[0] != size:
        assert (output.shape[channel], assumed) == (size, False)
