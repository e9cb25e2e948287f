"""A network has the same values if samples and tokens share the first axis on the way."""

import functools

import pytest
import torch
from torch import nn

import nlbench

MASK = torch.arange(7) < torch.tensor([7, 4, 6, 3, 7, 5] * 4)[:, None]


class Network(nn.Module):
    """Two layers applied to each token."""

    def __init__(self, fold):
        super().__init__()
        torch.manual_seed(0)
        self.fold = fold
        self.first, self.act, self.second = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)
        self.gelu = nn.GELU()

    def forward(self, x, attention_mask=None):
        if attention_mask is not None:
            assert attention_mask.shape == x.shape[:2]
        n, t, _ = x.shape
        if self.fold == "samples first":
            h = self._layers(x.reshape(-1, 4)).reshape(n, t, 3)
        elif self.fold == "tokens first":
            h = self._layers(x.transpose(0, 1).reshape(-1, 4)).reshape(t, n, 3).transpose(0, 1)
        else:
            h = self._layers(x)
        return h.flatten(1)

    def _layers(self, x):
        return self.gelu(self.second(self.act(self.first(x))))


SITE_MEASURES = ("r2", "linearity", "affinity", "cka", "norm", "sparsity", "naswot", "entropy")
FUNCTION_MEASURES = ("local-complexity",)
FOLDS = ["samples first", "tokens first"]
ROWS = [
    {},
    {"sites.rows": "tokens"},
    {"sites.rows": "last"},
    {"sites.rows": "tokens:2", "sites.skip": 1},
    {"sites.skip": 2},
    {"sites.reduction": "flatten"},
]


@functools.cache
def _summary(fold, measures, settings, masked):
    inputs = torch.randn(24, 7, 4, generator=torch.Generator().manual_seed(1))
    batch = {"x": inputs, "attention_mask": MASK.long()} if masked else inputs
    results = nlbench.evaluate(Network(fold), batch, measures, settings=dict(settings))
    return {name: results[name] for name in measures}


def _assert_same(fold, measures, settings, masked):
    chosen = tuple(settings.items())
    plain = _summary("none", measures, chosen, masked)
    folded = _summary(fold, measures, chosen, masked)
    assert any(result.status == "ok" for result in plain.values())
    for name, expected in plain.items():
        result = folded[name]
        assert (result.status, result.n) == (expected.status, expected.n), name
        assert len(result.values) == len(expected.values), name
        pairs = zip((result, *result.values), (expected, *expected.values), strict=True)
        for value, other in pairs:
            assert value.numbers == pytest.approx(other.numbers, rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    ("fold", "settings", "masked"),
    [(FOLDS[number // 2 % 2], settings, number % 2 == 1) for number, settings in enumerate(ROWS)],
    ids=str,
)
def test_site_measures_do_not_depend_on_a_reshape(fold, settings, masked):
    _assert_same(fold, SITE_MEASURES, settings, masked)


@pytest.mark.parametrize("fold", FOLDS)
def test_local_complexity_does_not_depend_on_a_reshape(fold):
    _assert_same(fold, FUNCTION_MEASURES, {"local-complexity.samples": 4}, False)


@pytest.mark.parametrize("fold", FOLDS)
def test_reshapes_change_no_length_of_a_site(fold):
    _assert_same(fold, ("length-distortion",), {}, False)


LINE_MEASURES = ["density", "absdev", "pathlength", "length-distortion"]


@pytest.mark.parametrize(
    ("fold", "method"),
    [(FOLDS[0], "exact"), (FOLDS[1], "refined"), (FOLDS[1], "adaptive"), (FOLDS[0], "sampling")],
)
def test_line_measures_do_not_depend_on_a_reshape(fold, method):
    settings = {"lines.number": 2, "lines.method": method, "lines.evaluations": 512}
    results = {}
    for way in ("none", fold):
        network = Network(way)
        network.gelu = nn.MaxPool1d(3, 1, 1)
        inputs = 4 * torch.randn(24, 7, 4, generator=torch.Generator().manual_seed(1))
        results[way] = nlbench.evaluate(network, inputs, LINE_MEASURES, settings=settings)
    for name in LINE_MEASURES:
        plain, folded = (results[way][name] for way in ("none", fold))
        assert (folded.status, folded.n) == (plain.status, plain.n), (name, folded.reason)
        assert folded.summary == pytest.approx(plain.summary, rel=1e-3), name
    assert results[fold]["density"].status == "ok"
