"""Networks whose numbers don't exist get a reason, not PyTorch's error."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nlbench
from nlbench.introspection.model_copy import double_copy


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)
        self.register_buffer("graph", torch.eye(6).to_sparse())

    def forward(self, x):
        return self.last(self.hidden(self.first(x)))


class SparseProduct(Layers):
    def hidden(self, h):
        return torch.sparse.mm(self.graph, self.act(h).T).T


class SparseMatmul(Layers):
    def hidden(self, h):
        return (self.graph @ self.act(h).T).T


class SparseSite(Layers):
    def hidden(self, h):
        return self.act(h.to_sparse()).to_dense()


class Complex(Layers):
    def hidden(self, h):
        return torch.tanh(torch.fft.fft(h)).real


class BatchStatistics(Layers):
    def hidden(self, h):
        return self.act(self.norm(h))


# At least one of each probe, and of each way in which a measure runs the network itself.
SOME = [
    "absdev", "density", "boundary-pieces", "length-distortion", "geometric-complexity",
    "local-complexity", "nlc", "pathlength", "affinity", "accuracy", "substitution",
]  # fmt: skip


def results(model, samples=32, measures="*"):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    settings = {"lines.number": 1}
    labels = torch.arange(samples) % 3
    run = nlbench.evaluate(model, x, measures, labels=labels, settings=settings)
    return {record.measure.name: record.result for record in run.records}


@pytest.mark.parametrize("network", [SparseProduct, SparseMatmul, Complex, BatchStatistics])
def test_measures_of_odd_networks_do_not_fail(network):
    found = results(network().eval())
    failed = {name: result.reason for name, result in found.items() if result.status == "failed"}
    assert failed == {}


@pytest.mark.parametrize(
    ("network", "reason"), [(SparseSite, "sparse tensor"), (Complex, "complex numbers (complex64)")]
)
def test_site_without_real_numbers_is_undefined(network, reason):
    result = results(network().eval())["affinity"]
    assert result.status == "undefined"
    assert reason in result.reason


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(0),
        lambda h: h.softmax(0),
        lambda h: h + h.roll(1, 0),
        lambda h: h + h.roll(2, 0),
        lambda h: h.roll(2, 0),
        lambda h: torch.cat([h[:1], h[1:-1].flip(0), h[-1:]]),
    ],
)
def test_functions_of_a_batch_have_no_lines(mix):
    network = Layers()
    network.hidden = lambda h: torch.relu(mix(h))
    found = results(network, measures=["absdev", "pieces", "length-distortion", "affine-residual"])
    assert {result.status for result in found.values()} == {"undefined"}
    for result in found.values():
        assert "depend on the other samples of its batch" in result.reason


def test_batch_statistics_of_one_sample_are_undefined():
    found = results(BatchStatistics().eval(), samples=1)
    for name in ("affinity", "accuracy", "nlc", "substitution", "pathlength"):
        assert found[name].status == "undefined"
        assert "own statistics" in found[name].reason


class Noise(Layers):
    def hidden(self, h):
        return self.act(h + 0.1 * torch.randn_like(h))


class OwnNoise(Layers):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def hidden(self, h):
        return self.act(h + 0.1 * torch.randn(h.shape, generator=self.generator))


@pytest.mark.parametrize(
    ("network", "remark"),
    [
        (Noise, "changes from call to call"),
        (OwnNoise, "changes from call to call"),
        (BatchStatistics, "depend on the other samples of its batch"),
        (Layers, ""),
    ],
)
def test_every_probe_remarks_dependence_and_noise(network, remark):
    model = network().eval()
    model.hidden = getattr(model, "hidden", model.act)
    measures = ["affinity", "cka", "accuracy", "substitution", "nlc"]
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    run = nlbench.evaluate(model, x, measures, labels=torch.arange(24) % 3)
    for name in measures:
        if remark:
            assert remark in run[name].reason, name
        else:
            assert "call" not in run[name].reason
            assert "batch" not in run[name].reason


class WithoutGradient(Layers):
    def forward(self, x):
        with torch.no_grad():
            h = self.act(self.first(x))
        return self.last(h)


def test_network_detached_from_its_input_has_no_gradient():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    result = nlbench.evaluate(WithoutGradient().eval(), x, ["geometric-complexity"])
    assert result["geometric-complexity"].status == "undefined"
    assert "detached" in result["geometric-complexity"].reason


class Plain(Layers):
    def hidden(self, h):
        return self.act(h)


class Checkpointed(Plain):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class Halves(Plain):
    def forward(self, x):
        first, second = x.chunk(2)
        return torch.cat([super(Halves, self).forward(half) for half in (first, second)])


class Groups(Plain):
    def forward(self, x):
        return super().forward(x.view(4, -1, 4)).reshape(len(x), -1)


class WholeBatch(Plain):
    def forward(self, x):
        assert len(x) == 32, "a fixed batch"
        return super().forward(x)


class PairsOnly(Plain):
    def forward(self, x):
        if len(x) % 2:
            raise KeyError("an odd batch")
        return super().forward(x)


class FixedState(Plain):
    def __init__(self):
        super().__init__()
        self.state = torch.zeros(32, 6)

    def hidden(self, h):
        return self.act(h + self.state)


class NumpyInside(Plain):
    def hidden(self, h):
        return torch.from_numpy(np.tanh(h.numpy()))


class WrittenInPlace(Plain):
    def hidden(self, h):
        h = h.exp()
        y = self.act(h)
        h *= 2
        return y.mul_(2)


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("for inference only")


class ForInference(Plain):
    def hidden(self, h):
        return WithoutBackward.apply(h)


class ComplexOutputs(Plain):
    def forward(self, x):
        return torch.fft.fft(super().forward(x))


class ClassIndices(Plain):
    def forward(self, x):
        return super().forward(x).argmax(1)


@pytest.mark.parametrize(
    "network",
    [
        Checkpointed, Halves, Groups, WholeBatch, PairsOnly, FixedState, NumpyInside,
        WrittenInPlace, ForInference, ComplexOutputs, ClassIndices,
    ],
)  # fmt: skip
def test_network_properties_are_not_failures(network):
    found = results(network().eval(), measures=SOME)
    failed = {name: result.reason for name, result in found.items() if result.status == "failed"}
    assert failed == {}


@pytest.mark.parametrize("network", [Halves, Groups, WholeBatch, PairsOnly])
def test_network_for_some_batch_sizes_names_them(network):
    for result in results(network().eval(), measures=["density", "pathlength"]).values():
        assert result.status == "undefined"
        assert "on 32 samples, but not on 1" in result.reason


@pytest.mark.parametrize("network", [ComplexOutputs, ClassIndices])
def test_non_real_outputs_are_undefined(network):
    measures = ["absdev", "length-distortion", "nlc", "substitution"]
    for result in results(network().eval(), measures=measures).values():
        assert result.status == "undefined"
        assert "expected real numbers" in result.reason


def test_reentrant_checkpoint_changes_no_number():
    plain = results(Plain().eval(), measures=SOME)
    for name, result in results(Checkpointed().eval(), measures=SOME).items():
        assert result.status == plain[name].status, name
        assert result.summary.get("value") == pytest.approx(plain[name].summary.get("value")), name


class OddBug(Plain):
    def forward(self, x):
        raise KeyError("a bug")


def test_error_on_every_batch_is_a_failure():
    assert results(OddBug().eval(), measures=["affinity", "absdev"])["affinity"].status == "failed"


class OneByOne(Plain):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        h = self.act(self.first(x))
        return self.last(torch.cat([self.act(self.second(row)) for row in h.split(1)]))


def test_mean_over_few_places_is_undefined():
    found = results(OneByOne().eval(), measures=["r2", "absdev", "affinity"])
    for name in ("r2", "affinity"):
        assert found[name].status == "undefined"
        assert found[name].reason.startswith("1 of 33 places: ")


class Scripted(Layers):
    def hidden(self, h):
        return torch.jit.script(add_sine)(h)


def add_sine(x):
    return x + torch.sin(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_lines_through_a_scripted_function_name_its_operation():
    assert "not piecewise affine" in results(Scripted(), measures=["density"])["density"].reason


class DropsInputs(nn.Sequential):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, training=True))


def test_a_copy_of_a_random_network_is_not_blamed():
    for seed in range(40):
        torch.manual_seed(seed)
        model = DropsInputs(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        assert double_copy(model, inputs=torch.randn(8, 5)) is not None


class ControlFlow(nn.Module):
    """Takes a branch by an operator of PyTorch, which compiles both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x.sigmoid())
        return self.last(torch.cond(torch.tensor(True), torch.relu, torch.tanh, (h,)))


def test_compiled_control_flow_is_undefined():
    before = torch.compile
    measures = ["norm", "substitution", "nlc", "pieces", "density", "pathlength", "accuracy"]
    found = results(ControlFlow(), measures=measures)
    assert found.pop("accuracy").status == "ok"
    for name, result in found.items():
        assert result.status == "undefined", name
        assert "as torch.cond does" in result.reason
    assert torch.compile is before
