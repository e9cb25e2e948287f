import pytest
import torch
from torch import nn

import nlbench
from nlbench.probes.sites import listeners
from nlbench.probes.sites.listeners import unresolved_sites

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]


def normal(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def values(model, inputs, measures=MEASURES, **settings):
    run = nlbench.evaluate(model, inputs, measures, settings=settings)
    return {record.measure.name: record.result for record in run.records}


class Cancelling(nn.Module):
    """A sigmoid of small differences of large numbers, which are rounded at the large scale."""

    def forward(self, x):
        return torch.sigmoid((1e-4 * x + 1000.0) - 1000.0)


@pytest.mark.parametrize(
    ("model", "scale"), [(nn.Sigmoid(), 1e-7), (Cancelling(), 1.0)], ids=["output", "earlier"]
)
def test_spread_below_rounding_is_measured_in_float64(model, scale):
    results = values(model, scale * normal(512, 8))
    for name in ("affinity", "cka", "r2"):
        assert results[name].summary["value"] == pytest.approx(1, abs=1e-6)
        assert results[name].reason == (
            "measured in float64, since float32's rounding shows at sigmoid"
        )
    exact = values(model, scale * normal(512, 8).double())
    for name, result in results.items():
        expected = exact[name].summary["value"]
        assert result.summary["value"] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_resolved_networks_run_in_their_own_type():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Sigmoid())
    types = []

    @nlbench.site_measure()
    def records_type(x, y):
        types.append((x.dtype, y.dtype))
        return 0.0

    run = nlbench.evaluate(model, normal(64, 8), [records_type])
    assert set(types) == {(torch.float32, torch.float32)}
    assert run.records[0].result.reason == ""


def test_the_facts_list_the_unresolved_sites():
    run = nlbench.evaluate(nn.Sequential(nn.ReLU(), nn.Sigmoid()), 1e-7 * normal(64, 8), ["norm"])
    (record,) = run.records
    assert record.probe.facts["precision"] == "float64"
    assert record.probe.facts["unresolved"] == ["1"]


def test_the_model_stays_in_float32():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values(model, 1e-9 * normal(64, 8))
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_random_networks_are_not_compared():
    class Noisy(nn.Module):
        def forward(self, x):
            return torch.relu(x + torch.randn_like(x))

    run = nlbench.evaluate(Noisy(), normal(64, 8), ["norm"])
    facts = run.records[0].probe.facts
    assert facts["not_compared_with_float64"] == "the network draws random numbers"
    assert "precision" not in facts


def test_networks_that_fill_the_memory_are_not_copied(monkeypatch):
    monkeypatch.setattr(listeners, "available_memory", lambda device: 100)
    run = nlbench.evaluate(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), normal(64, 8), ["norm"])
    reason = run.records[0].probe.facts["not_compared_with_float64"]
    assert reason == "too little memory for a copy of the model"


def test_networks_without_float64_are_measured():
    class Single(nn.Module):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("expected float32")
            return torch.sigmoid(x)

    run = nlbench.evaluate(Single(), 1e-7 * normal(64, 8), ["norm", "affinity"])
    norm, affinity = (record.result for record in run.records)
    assert norm.status == "ok"
    assert run.records[0].probe.facts["not_compared_with_float64"] == "expected float32"
    assert affinity.values[0].status == "undefined"
    assert affinity.values[0].reason.endswith("float32's rounding: try --precision float64")


def test_networks_failing_on_few_samples_skip_the_comparison():
    class NeedsMore(nn.Module):
        def forward(self, x):
            if len(x) == 2:
                raise RuntimeError("two samples are too few")
            return torch.relu(x)

    run = nlbench.evaluate(NeedsMore(), normal(64, 8), ["norm"])
    assert run.records[0].result.status == "ok"
    assert run.records[0].probe.facts["not_compared_with_float64"] == "two samples are too few"


def test_a_constant_site_is_resolved():
    rows = {"relu": (torch.full((2, 3), 0.1), torch.tensor([[0.0], [1.0]]))}
    exact = {"relu": tuple(side.double() for side in rows["relu"])}
    assert unresolved_sites(rows, exact, {}) == []


@pytest.mark.parametrize(("noise", "found"), [(1e-3, ["a"]), (1e-5, [])])
@pytest.mark.parametrize("columns", [1, 4])
def test_noise_is_small_in_terms_of_the_spread(noise, found, columns):
    exact = normal(400, columns).double()
    values = exact + noise * normal(400, columns, seed=1)
    assert unresolved_sites({"a": (values, values)}, {"a": (exact, exact)}, {}) == found


def test_few_columns_may_be_rounding():
    exact = normal(4, 1000).double()
    noisy = exact.clone()
    noisy[:, 0] += normal(4, 1, seed=1)[:, 0]
    side = (exact, exact)
    assert unresolved_sites({"a": (noisy.float(), exact.float())}, {"a": side}, {}) == ["a"]
    exact[:, 0], noisy[:, 0] = 1e-9 * exact[:, 0], 1e-9 * exact[:, 0] * (1 + 1e-3)
    assert unresolved_sites({"a": (noisy, noisy)}, {"a": (exact, exact)}, {}) == []


class SqueezeExcitation(nn.Module):
    """Blocks as in EfficientNet: signals shrink, and gates are sigmoids of small numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.gates = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(6))
        for layer in (*self.convolutions, *self.gates):
            nn.init.normal_(layer.weight, std=0.03)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for convolution, gate in zip(self.convolutions, self.gates, strict=True):
            x = torch.relu(convolution(x))
            x = x * torch.sigmoid(gate(x.mean((2, 3), keepdim=True)))
        return x


def test_batches_keep_values_of_small_signals():
    model = SqueezeExcitation()
    images = torch.randn(32, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    # Affinity is a mean over batches, which depends on their size.
    measures = [name for name in MEASURES if name != "affinity"]
    whole = values(model, images, measures, **{"sites.batch": 32})
    parts = values(model, images, measures, **{"sites.batch": 5})
    for name in measures:
        for value, other in zip(whole[name].values, parts[name].values, strict=True):
            assert value.status == other.status
            number = value.statistics.get("value", 0)
            assert other.statistics.get("value", 0) == pytest.approx(number, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "has_statistics"),
    [("mobilenet_v3_small", {"width_mult": 0.35}, False), ("shufflenet_v2_x0_5", {}, True)],
)
def test_networks_in_float32_agree_with_float64(name, options, has_statistics):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    if has_statistics:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
                module.train()
        with torch.no_grad():
            model(images)
        model.eval()
    native = values(model, images)
    exact = values(model.double(), images.double())
    for measure, result in exact.items():
        for expected, value in zip(result.values, native[measure].values, strict=True):
            if value.status != "ok":
                continue
            number = expected.statistics["value"]
            assert value.statistics["value"] == pytest.approx(number, rel=1e-3, abs=1e-3)
