"""Maps of removed activations are folded where that is exact, and exported for PyTorch alone."""

import itertools
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nlbench.cli.app import main
from nlbench.models.removal import export
from nlbench.models.removal.export import export_program, fold_activations
from nlbench.models.removal.network import AffineActivation

IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def affine(channels, axis=1):
    layer = AffineActivation(channels, axis)
    nn.init.uniform_(layer.weight, -2, 2)
    nn.init.normal_(layer.bias)
    return layer


def trained_norm(channels):
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.normal_(norm.bias)
    return norm


def check(network, inputs, folded):
    network = network.eval()
    twin, *counts = fold_activations(network, inputs)
    assert counts == [folded, sum(isinstance(m, AffineActivation) for m in network.modules())]
    torch.testing.assert_close(twin(inputs), network(inputs), rtol=1e-5, atol=1e-5)
    return twin


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "groups", "mode", "bias"),
    [
        (1, 0, 1, 1, "zeros", True),
        (3, 1, 1, 3, "zeros", False),
        (5, 2, 2, 1, "reflect", False),
        (2, 1, 3, 1, "circular", True),
    ],
)
def test_map_after_a_convolution_folds(bias, kernel, padding, stride, groups, mode):
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, kernel, stride, padding, groups=groups, bias=bias, padding_mode=mode)
    network = nn.Sequential(first, affine(6), nn.Conv2d(6, 2, 3, padding=1))
    twin = check(network, IMAGES, folded=1)
    assert not any(isinstance(module, AffineActivation) for module in twin.modules())


def test_map_after_a_batch_norm_folds():
    torch.manual_seed(0)
    check(nn.Sequential(nn.Conv2d(3, 4, 3), trained_norm(4), affine(4)), IMAGES, folded=1)


@pytest.mark.parametrize("axis", [2, -1])
def test_map_after_a_linear_layer_folds(axis):
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(9, 5), affine(5, axis)), IMAGES[:, 0], folded=1)


class TwoReaders(nn.Module):
    """Adds the convolution's output to that of the map."""

    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3, bias=False), affine(4)

    def forward(self, x):
        y = self.conv(x)
        return y + self.act(y)


class TwoCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 3, 3, padding=1), affine(3)

    def forward(self, x):
        return self.conv(self.act(self.conv(x)))


@pytest.mark.parametrize("kind", [TwoReaders, TwoCalls])
def test_other_readers_prevent_a_fold(kind):
    torch.manual_seed(0)
    network = kind().eval()
    twin = check(network, IMAGES, folded=0)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], tensor)


def test_layer_before_a_residual_branch_is_not_merged():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            self.f, self.g = affine(16), affine(16)

        def forward(self, x):
            hidden = self.f(self.a(x))
            return self.c(hidden + self.g(self.b(hidden)))

    torch.manual_seed(0)
    check(Residual(), torch.randn(8, 5), folded=2)


def test_plain_batch_norm_keeps_its_map():
    torch.manual_seed(0)
    check(nn.Sequential(nn.BatchNorm2d(3, affine=False), affine(3)), IMAGES, folded=0)


class Padded(nn.Module):
    """A map between a sum, which can't hold it, and a convolution."""

    def __init__(self, **settings):
        super().__init__()
        self.act, self.conv = affine(3), nn.Conv2d(3, 6, **settings)

    def forward(self, x):
        return self.conv(self.act(x + 1))


SETTINGS = [(3, 0, 1, 1, True), (3, 1, 1, 3, False), (1, 1, 2, 1, True), (5, "same", 1, 1, True)]


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "groups", "bias", "mode", "has_intercept"),
    [
        *((*settings, "zeros", has) for settings in SETTINGS for has in (True, False)),
        (*SETTINGS[1], "reflect", True),
        (*SETTINGS[2], "replicate", True),
        (*SETTINGS[3], "circular", True),
    ],
)
def test_map_before_a_convolution_folds_unless_zeros_are_padded(
    kernel, padding, stride, groups, bias, mode, has_intercept
):
    torch.manual_seed(0)
    network = Padded(kernel_size=kernel, padding=padding, stride=stride, groups=groups, bias=bias,
                     padding_mode=mode)  # fmt: skip
    if not has_intercept:
        nn.init.zeros_(network.act.bias)
    is_exact = padding == 0 or not has_intercept or mode != "zeros"
    check(network, IMAGES, folded=int(is_exact))


def test_map_before_a_linear_layer_folds():
    torch.manual_seed(0)
    check(nn.Sequential(nn.ReLU(), affine(9, -1), nn.Linear(9, 4, bias=False)), IMAGES, folded=1)


@pytest.mark.parametrize(
    ("first", "second", "merges"),
    [
        ({"kernel_size": 3, "padding": 1}, {"kernel_size": 1}, True),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, {"kernel_size": 1}, True),
        ({"kernel_size": 3, "stride": 2}, {"kernel_size": 1, "stride": 2, "bias": False}, True),
        ({"kernel_size": 1, "bias": False}, {"kernel_size": 3}, True),
        # Padding of the second convolution doesn't pass the first one.
        ({"kernel_size": 1}, {"kernel_size": 3, "padding": 1}, False),
        ({"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "padding": 1}, False),
        # A larger kernel has more weights.
        ({"kernel_size": 3, "stride": 3}, {"kernel_size": 3}, False),
        ({"kernel_size": 3, "groups": 2}, {"kernel_size": 1}, False),
        ({"kernel_size": 3, "dilation": 2}, {"kernel_size": 1}, False),
    ],
)
def test_convolutions_merge_where_that_is_exact_and_smaller(first, second, merges):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(4, 6, **first), affine(6), nn.Conv2d(6, 5, **second))
    twin = check(network, torch.randn(2, 4, 13, 13), folded=1)
    assert sum(isinstance(module, nn.Conv2d) for module in twin.modules()) == 2 - merges
    count = sum(p.numel() for p in twin.parameters())
    assert count < sum(p.numel() for p in network.parameters())


def test_linear_layers_merge_in_a_chain():
    torch.manual_seed(0)
    widths = (5, 40, 40, 3)
    layers = [[nn.Linear(a, b), affine(b)] for a, b in itertools.pairwise(widths)]
    twin = check(nn.Sequential(*itertools.chain(*layers)), torch.randn(7, 5), folded=3)
    assert sum(p.numel() for p in twin.parameters()) == 5 * 3 + 3


def test_bottleneck_is_not_merged():
    network = nn.Sequential(nn.Linear(40, 2), affine(2), nn.Linear(2, 40))
    twin = check(network, torch.randn(7, 40), folded=1)
    assert sum(isinstance(module, nn.Linear) for module in twin.modules()) == 2


def test_layers_without_a_removed_map_stay():
    network = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 3), affine(3))
    twin = check(network, torch.randn(7, 3), folded=1)
    assert isinstance(twin[0], nn.Linear)


def test_program_loads_without_nlbench(tmp_path):
    torch.manual_seed(0)
    network = TwoReaders().eval()
    assert export_program(network, tmp_path / "out", IMAGES) < 1e-5
    program = torch.export.load(tmp_path / "out" / "network.pt2").module()
    torch.testing.assert_close(program(IMAGES[:1]), network(IMAGES[:1]))
    assert load_file(tmp_path / "out" / "network.safetensors").keys() == program.state_dict().keys()


def test_command_exports_activations(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "plain"
    arguments = [
        *("nlbench", "remove", "--model", "vgg8", "--weights", "init", "--samples", "8"),
        *("--fit-samples", "8", "--by", "depth", "--no-curve", "--out", str(tmp_path / "out")),
        *("--export", str(folder)),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    # Another test loads a program in another process.
    monkeypatch.setattr(export, "_reload", lambda *_: {"difference": 0.0})
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "maps folded into their neighbours" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"network.pt2", "network.safetensors"}
