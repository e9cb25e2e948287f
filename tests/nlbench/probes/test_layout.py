import pytest
import torch
import torchvision
from torch import nn

from nlbench.errors import Undefined
from nlbench.probes.layout import reduce_site
from nlbench.probes.sites import list_sites, look_at_sites


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


def test_a_batch_of_numbers_is_one_feature_and_a_single_number_is_nothing():
    assert reduce_site(torch.randn(4), 0).shape == (4, 1)
    with pytest.raises(Undefined):
        reduce_site(torch.tensor(1.0), 0)


def widths(model, example):
    """Reduced width of each site, beside the width of the layer that made it."""
    found = []
    look_at_sites(model, [example], lambda look: found.append(look.x.shape[1]))
    return found


@pytest.mark.parametrize(
    ("name", "size", "axis"),
    [("resnet18", 32, 1), ("vit_b_32", 224, 2), ("swin_t", 32, 3), ("convnext_tiny", 32, 3)],
)
def test_the_channel_axis_is_right_on_every_kind_of_network(name, size, axis):
    model = torchvision.models.get_model(name, weights=None)
    sites = list_sites(model, torch.randn(2, 3, size, size))
    assert {site.channel_axis for site in sites} == {axis}


def test_a_one_dimensional_convolution_has_its_channels_second():
    model = nn.Sequential(nn.Conv1d(2, 7, 3), nn.BatchNorm1d(7), nn.ReLU())
    assert widths(model, torch.randn(4, 2, 20)) == [7]


def test_a_linear_layer_on_tokens_has_its_channels_last():
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


def test_the_sum_of_a_skip_branch_keeps_the_axis():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, 5, 3, padding=1)

        def forward(self, x):
            x = self.conv(x)
            return torch.relu(x + self.conv(x))

    assert widths(Residual(), torch.randn(4, 5, 30)) == [5]
