"""Length distortion against closed forms of random networks and finely sampled curves."""

import itertools
import math

import pytest
import torch
from scipy.special import gammaln
from scipy.stats import binom
from torch import nn

import nlbench
from nlbench.measures.length_distortion import image_length
from nlbench.probes.lines import estimate_segment, trace_segment

PAIRS = {"lines.paths": "pairs"}


def result_of(model, x, **settings):
    return nlbench.evaluate(model, x, "length-distortion", settings={**PAIRS, **settings})[
        "length-distortion"
    ]


def mean_norm(fan_in, width):
    """Mean factor of a layer: E √(2/fan_in) χ_B with B ~ Binomial(width, 1/2)."""
    total = 0.0
    for k in range(1, width + 1):
        chi = math.sqrt(2) * math.exp(gammaln((k + 1) / 2) - gammaln(k / 2))
        total += binom.pmf(k, width, 0.5) * math.sqrt(2 / fan_in) * chi
    return total


def test_random_networks_without_biases_have_their_closed_form():
    generator = torch.Generator().manual_seed(0)
    sizes = (6, 5, 8, 4)
    model = nn.Sequential()
    for fan_in, width in itertools.pairwise(sizes):
        model.extend([nn.Linear(fan_in, width, bias=False), nn.ReLU()])
    lengths = []
    for _ in range(25):
        with torch.no_grad():
            for layer in model[::2]:
                layer.weight.normal_(0, math.sqrt(2 / layer.in_features), generator=generator)
        x = torch.randn(2, 6, generator=generator)
        lengths.append(result_of(model, x).values[0].parts["site"])
    expected = 1.0
    for index, (fan_in, width) in enumerate(itertools.pairwise(sizes)):
        expected *= mean_norm(fan_in, width)
        site = torch.tensor([length[str(2 * index + 1)] for length in lengths])
        error = site.std() / math.sqrt(len(site))
        assert abs(site.mean() - expected) < 4 * error
        assert error < 0.2 * expected


@pytest.mark.parametrize("is_site_last", [True, False])
def test_lengths_are_those_of_finely_sampled_curves(is_site_last):
    torch.manual_seed(1)
    last = nn.ReLU() if is_site_last else nn.Linear(5, 3)
    model = nn.Sequential(
        nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 5), nn.LeakyReLU(0.1), last
    ).double()
    x = 3 * torch.randn(4, 3, dtype=torch.float64)
    result = result_of(model, x)
    without_sites = result_of(model, x, **{"length-distortion.sites": False})
    assert without_sites.summary == result.summary
    assert not any(value.parts.get("site") for value in without_sites.values)
    for value, (start, end) in zip(result.values, (x[:2], x[2:]), strict=True):
        t = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:, None]
        curve, own = torch.lerp(start, end, t), (end - start).norm().item()
        expected = {}
        with torch.no_grad():
            for name, layer in model.named_children():
                curve = layer(curve)
                expected[name] = curve.diff(dim=0).norm(dim=1).sum().item() / own
        assert value.statistics["value"] == pytest.approx(expected["4"], rel=1e-5)
        sites = ["1", "3", "4"] if is_site_last else ["1", "3"]
        assert list(value.parts["site"]) == sites
        for site, length in value.parts["site"].items():
            assert length == pytest.approx(expected[site], rel=1e-5)


def test_isometries_keep_lengths_and_constant_path_is_undefined():
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight.copy_(rotation)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert result_of(model, x).summary["value"] == pytest.approx(1, rel=1e-12)
    assert result_of(model, x[:1].repeat(2, 1)).status == "undefined"


def test_smooth_network_has_lower_bound_with_its_error():
    model = nn.Tanh()
    x = torch.tensor([[-3.0, 0.0], [3.0, 1.0]], dtype=torch.float64)
    value = result_of(model, x).values[0].statistics
    t = torch.linspace(0, 1, 200_001, dtype=torch.float64)[:, None]
    exact = torch.lerp(x[0], x[1], t).tanh().diff(dim=0).norm(dim=1).sum().item()
    exact /= math.sqrt(37)
    assert value["value"] <= exact
    assert exact - value["value"] <= value["numerical_error"] < 0.05 * exact


def test_estimates_are_below_traces():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 60), nn.ReLU(), nn.Linear(60, 2)).double()
    ends = torch.randn(2, 3, dtype=torch.float64)
    exact = image_length(trace_segment(model, *ends))
    assert exact * 0.99 < image_length(estimate_segment(model, *ends)) <= exact * (1 + 1e-12)


class Rounded(nn.Module):
    """Rounds its units to quarters, with the gradient of the identity."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        z = self.layer(x)
        return self.head(z + ((4 * z).round() / 4 - z).detach())


@pytest.mark.parametrize("seed", [0, 3])
def test_error_is_not_negative_by_rounding(seed):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    for value in result_of(Rounded(), x).values:
        assert value.statistics.get("numerical_error", 1.0) > 0
