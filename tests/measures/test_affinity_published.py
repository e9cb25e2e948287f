"""With an absolute ridge and the published axes the score is that of the paper's formula.

The formula is written out here with other libraries: scikit-learn's shrinkage, SciPy's matrix
roots, POT's exact transport, and a ridge of 1e-6 whatever the data's scale.
"""

import numpy as np
import ot
import pytest
import torch
from scipy.linalg import inv, sqrtm
from sklearn.covariance import LedoitWolf
from torch import nn

import nlbench
from nlbench.measures.affinity import affinity_score

RIDGE = 1e-6


def published_score(x, y):
    """ρ of x and y, both (n, d), with Σ + 1e-6 I on both sides."""
    x, y = (np.asarray(values, dtype=np.float64) for values in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    sigma_x, sigma_y = (
        LedoitWolf().fit(values).covariance_ + RIDGE * np.eye(values.shape[1]) for values in (x, y)
    )
    root = np.real(sqrtm(sigma_x))
    back = inv(root)
    mapped = x @ (back @ np.real(sqrtm(root @ sigma_y @ root)) @ back)
    cost = ot.dist(mapped, y, metric="sqeuclidean")
    squared = ot.emd2(ot.unif(len(x)), ot.unif(len(y)), cost, numItermax=10**7)
    return 1 - np.sqrt(squared) / np.sqrt(2 * np.trace(sigma_y))


def samples(n, d, scale):
    r = np.random.default_rng(n + d)
    x = torch.tensor(scale * (r.standard_normal((n, d)) @ r.standard_normal((d, d)) / np.sqrt(d)))
    return x, torch.relu(x)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize(("n", "d"), [(60, 8), (24, 12), (12, 30)])
def test_absolute_ridge_matches_published_formula_at_any_scale(n, d, scale):
    x, y = samples(n, d, scale)
    found = affinity_score(x, y, ridge=RIDGE, ridge_unit="absolute").item()
    assert found == pytest.approx(published_score(x, y), abs=1e-6)


def test_only_relative_ridge_is_independent_of_units():
    (x, y), (small_x, small_y) = samples(60, 8, 1.0), samples(60, 8, 1e-4)
    assert affinity_score(small_x, small_y).item() == pytest.approx(
        affinity_score(x, y).item(), abs=1e-9
    )
    absolute = [
        affinity_score(a, b, ridge_unit="absolute").item() for a, b in ((x, y), (small_x, small_y))
    ]
    assert absolute[0] == pytest.approx(affinity_score(x, y).item(), abs=1e-5)
    assert abs(absolute[1] - absolute[0]) > 0.1


class Mixed(nn.Module):
    """A convolution's activation, four axes, and that of tokens, three."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 6, 3), nn.Linear(6, 10)
        self.relu, self.gelu = nn.ReLU(), nn.GELU()

    def forward(self, x):
        tokens = self.relu(self.conv(x)).flatten(2).transpose(1, 2)
        return self.gelu(self.mix(tokens)).mean(1)


def test_published_axes_reproduce_published_scores():
    torch.manual_seed(0)
    model, inputs = Mixed().double(), torch.randn(64, 3, 6, 6, dtype=torch.float64)
    seen = {}

    def hook_of(name):
        def hook(module, given, made):
            seen[name] = given[0], made

        return hook

    for name in ("relu", "gelu"):
        getattr(model, name).register_forward_hook(hook_of(name))
    with torch.no_grad():
        model(inputs)
    axes = {"relu": (-2, -1), "gelu": (-1,)}
    expected = {
        name: published_score(*(values.mean(axes[name]) for values in pair))
        for name, pair in seen.items()
    }
    settings = {
        "affinity.ridge_unit": "absolute",
        "sites.reduction": "published",
        "sites.batch": 64,
    }
    result = nlbench.evaluate(model, inputs, ["affinity"], settings=settings)["affinity"]
    found = {value.place: value.statistics["value"] for value in result.values}
    assert found == pytest.approx(expected, abs=1e-6)


def test_absolute_ridge_that_drowns_the_data_is_refused():
    x, y = samples(20, 3, 1e-160)
    with pytest.raises(nlbench.NotFinite):
        affinity_score(x, y, ridge_unit="absolute")
