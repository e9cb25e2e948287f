"""Devices of tensors and numbers of synchronisations, on a simulated GPU."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from pretend_cuda import PretendCuda
from pretend_mps import PretendMps
from programs import record_checked_program as recorded
from torch import nn
from torch.autograd import forward_ad
from torch.utils.data import TensorDataset

import nlbench
from nlbench.execution.machine import Machine
from nlbench.introspection.random_state import RandomStream, preserve_rng_state, rng_state
from nlbench.measures.affinity import affinity_score
from nlbench.measures.cka import linear_cka
from nlbench.measures.r2 import r2_score
from nlbench.measures.sparsity import share_near_zero
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import vanilla
from nlbench.probes.function import directional_derivative
from nlbench.probes.lines import estimate_segment, plane, trace_segment
from nlbench.probes.lines.exact.trace import trace_exactly
from nlbench.probes.lines.paths import direction_paths, noise_paths
from nlbench.probes.lines.recording.point_memory import measure_point_memory
from nlbench.probes.sites import listeners as sites
from nlbench.request import ExecutionOptions, Request
from nlbench.runner import run
from nlbench.subjects.data import Dataset

SITE_MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
MEASURES = [*SITE_MEASURES, "nlc", "pathlength", "absdev", "density"]
FEW_LINES = {"lines.number": 1, "lines.anchors": 2}


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4, 40),
        nn.ReLU(),
        nn.Linear(40, 5),
    )


def smooth():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4, 40),
        nn.Tanh(),
        nn.Linear(40, 5),
    )


class Residual(nn.Module):
    """A block whose ReLU is called twice, once as a function."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head(torch.relu(x + self.second(x)).mean((2, 3)))


@pytest.fixture
def cuda():
    with PretendCuda() as device:
        yield device


@pytest.mark.parametrize("build", [pooled, smooth, Residual])
def test_every_measure_gives_what_it_gives_on_the_cpu(build, monkeypatch):
    # Of threads that share sites as many also where there are fewer cores.
    monkeypatch.setattr(sites, "measure_threads", lambda device: 3 if device.type == "cuda" else 1)
    torch.manual_seed(0)
    model, inputs = build().eval(), torch.rand(160, 3, 8, 8)
    here = nlbench.evaluate(model, inputs, MEASURES, settings=FEW_LINES)
    with PretendCuda():
        there = nlbench.evaluate(
            copy.deepcopy(model).to("cuda"), inputs.to("cuda"), MEASURES, settings=FEW_LINES
        )
    assert {record.machine.device for record in there.records} == {"cuda:0"}
    for record in here.records:
        name, found = record.measure.name, there[record.measure.name]
        assert found.status == record.result.status, f"{name}: {found.reason}"
        assert found.summary == pytest.approx(record.result.summary, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_a_segment_is_traced_where_the_model_is(cuda, method):
    torch.manual_seed(0)
    model, (start, end) = pooled().eval(), torch.rand(2, 3, 8, 8)
    end = start + (end - start) / 16
    there = trace_segment(
        copy.deepcopy(model).to("cuda"), start.to("cuda"), end.to("cuda"), method=method
    )
    here = trace_segment(model, start, end, method=method)
    assert there.values.is_cuda
    assert there.regions == here.regions
    torch.testing.assert_close(there.t.cpu(), here.t, rtol=0, atol=1e-12)
    torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-12, atol=1e-12)


def test_tensors_of_two_devices_do_not_mix(cuda):
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="cuda") + torch.zeros(3)
    with pytest.raises(TypeError, match="cpu"):
        torch.zeros(3, device="cuda").numpy()


def test_waiting_is_counted_with_the_line_that_waits(cuda):
    values = torch.arange(4.0).to("cuda")
    cuda.reset()
    values.sum().item()
    values[values > 1]
    assert cuda.waits == {"_local_scalar_dense": 1, "index[mask]": 1}


def test_site_measures_wait_at_most_four_times_a_site_and_batch(cuda):
    torch.manual_seed(0)
    model, inputs = pooled().eval().to("cuda"), torch.rand(256, 3, 8, 8).to("cuda")
    nlbench.evaluate(model, inputs, SITE_MEASURES)

    def waits(samples):
        cuda.reset()
        run = nlbench.evaluate(model, inputs[:samples], SITE_MEASURES, settings={"sites.batch": 64})
        assert not run.failed
        return sum(cuda.waits.values())

    # Two sites; what is waited for once a run cancels out.
    batches, sites = 2, 2
    assert waits(256) - waits(128) <= 4 * batches * sites


def test_the_model_is_left_on_its_device_as_it_was(cuda):
    model = smooth().eval().to("cuda")
    before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    nlbench.evaluate(model, torch.rand(32, 3, 8, 8).to("cuda"), MEASURES, settings=FEW_LINES)
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), before[name], rtol=0, atol=0)


class Deep(nn.Sequential):
    """Layers of ReLUs, one after another."""

    def __init__(self, layers):
        parts = [nn.Linear(6, 16)]
        for _ in range(layers):
            parts += [nn.ReLU(), nn.Linear(16, 16)]
        super().__init__(*parts)


def waits_of(cuda, build, shape, run):
    """Count the synchronisations of a pass, without those of its first run."""
    torch.manual_seed(0)
    model, (start, end) = build().double().eval().to("cuda"), torch.rand(2, *shape).double()
    run = run(model, start.to("cuda"), end.to("cuda"))
    run()
    cuda.reset()
    run()
    return sum(cuda.waits.values())


def exactly(limit=None):
    def prepared(model, start, end):
        points = torch.stack([start, end])
        program = recorded(model, points)
        needs = measure_point_memory(program, points)
        return lambda: list(trace_exactly(program, [(start, end)], limit=limit, needs=needs))

    return prepared


def test_exact_tracing_waits_at_most_five_times_a_bending_layer(cuda):
    one, four = (waits_of(cuda, lambda n=n: Deep(n), (6,), exactly()) for n in (1, 4))
    assert 0 < four - one <= 5 * 3


def test_exact_tracing_waits_at_most_five_times_a_pooling_and_for_a_chunk(cuda):
    def without():
        return nn.Sequential(pooled()[0], nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5))

    def pooling():
        return nn.Sequential(pooled()[0], nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())

    bare, more = (waits_of(cuda, build, (3, 8, 8), exactly()) for build in (without, pooling))
    assert more - bare <= 5
    parts = waits_of(cuda, lambda: Deep(4), (6,), exactly(limit=4))
    whole = waits_of(cuda, lambda: Deep(4), (6,), exactly())
    regions = trace_segment(*traced(Deep(4))).regions
    # No more chunks than regions, each through four layers at most, and put together.
    assert parts - whole <= regions * (5 * 4 + 3)


def traced(model):
    torch.manual_seed(0)
    model = type(model)(4).double().eval()
    return model, *torch.rand(2, 6).double()


def test_estimates_wait_four_times_a_halving_however_many_layers_bend(cuda):
    def poolings(count):
        pools = (nn.MaxPool2d(2, 1) for _ in range(count))
        last = nn.Linear(2 * (4 - count) ** 2, 2)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), *pools, nn.Flatten(), last)

    def estimated(*given):
        return lambda: estimate_segment(*given, evaluations=33, dtype=torch.float64)

    for build, shape in ((Deep, (6,)), (poolings, (1, 6, 6))):
        one, many = (waits_of(cuda, partial(build, n), shape, estimated) for n in (1, 3))
        # Each grid: crossings, which of them coincide, their number, finiteness of the outputs.
        assert abs(many - one) <= 1
        assert many <= 4 * 3 + 25


def few_images():
    random = torch.Generator().manual_seed(5)
    images, labels = torch.rand(24, 3, 8, 8, generator=random), torch.arange(24) % 5
    return Dataset("few", *[TensorDataset(images, labels)] * 2, (3, 8, 8), 5, (0.5,), (0.25,), "")


def test_training_equals_the_cpus_with_two_waits_per_step(cuda):
    # One number tells whether the loss is finite, one transfer how many are right.
    recipe = replace(vanilla, batch_size=8, epochs=2)
    there = train(smooth, few_images(), recipe, device="cuda")
    waited = cuda.waits.total()
    here = train(smooth, few_images(), recipe)
    assert [e.loss for e in there.history] == pytest.approx([e.loss for e in here.history], 1e-12)
    for name, tensor in here.model.state_dict().items():
        found = there.model.state_dict()[name]
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), tensor, rtol=1e-12, atol=1e-12)
    cuda.reset()
    train(smooth, few_images(), replace(recipe, epochs=4), device="cuda")
    steps, looks = 2 * 3, 2 * 2
    # Each epoch ends with a look at a split or two, a batch each.
    assert cuda.waits.total() - waited <= 2 * steps + 2 * looks


def test_a_run_on_the_device_gives_what_one_on_the_cpu_gives(tmp_path):
    settings = {**FEW_LINES, "lines.radius": 0.5, "lines.budget": 0, "lines.evaluations": 64}
    few = {"samples": 2, "traced": 1, "directions": 2}
    settings |= {f"local-complexity.{name}": value for name, value in few.items()}
    request = Request(("*",), ("vgg8",), samples=12, data=("digits",), settings=settings)
    here = run(request, tmp_path / "cpu")
    with PretendCuda():
        there = run(replace(request, device="cuda"), tmp_path / "cuda")
    assert {r.machine.device for r in there.records} == {"cuda"}
    assert there.records[0].machine.environment["device_name"] == "Pretended GPU"
    for record in here.records:
        name, found = record.measure.name, there[record.measure.name]
        assert found.status == record.result.status, f"{name}: {found.reason}"
        # They need more samples, and exact breakpoints.
        assert found.status == ("undefined" if name in ("r2", "regions") else "ok")
        assert found.summary == pytest.approx(record.result.summary, rel=1e-12, abs=1e-12), name


def test_derivatives_are_what_they_are_on_the_cpu(cuda):
    x, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def gradients(device):
        given = weight.clone().to(device).requires_grad_()
        spread = torch.ones(3, dtype=torch.float64).to(device).requires_grad_()
        loss = ((x.to(device) @ given.T + spread).tanh() ** 2).sum() * spread.sum()
        loss.backward()
        (first,) = torch.autograd.grad((given**3).sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), given)
        return [one.cpu() for one in (given.grad, spread.grad, second)]

    for there, here in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-12)


class Recurrent(nn.Module):
    """A recurrent layer and a linear one on its last step."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_differentiated_without_cudnn(kind):
    torch.manual_seed(0)
    model, inputs = Recurrent(kind).eval().double(), torch.randn(12, 4, 5, dtype=torch.float64)
    here = nlbench.evaluate(model, inputs, ["nlc"])["nlc"]
    with PretendCuda():
        there = nlbench.evaluate(copy.deepcopy(model).to("cuda"), inputs.to("cuda"), ["nlc"])["nlc"]
    assert (here.status, there.status) == ("ok", "ok"), there.reason
    assert there.summary == pytest.approx(here.summary, rel=1e-12)


def test_a_layer_of_cudnn_is_differentiated_without_it():
    used = []

    class Layer(nn.RNN):
        """Raise PyTorch's error for layers of cuDNN."""

        def forward(self, x):
            used.append(torch.backends.cudnn.enabled)
            if torch.backends.cudnn.enabled and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    "Trying to use forward AD with _cudnn_rnn that does not support it because it "
                    "has not been implemented yet."
                )
            return super().forward(x)

    torch.manual_seed(0)
    plain = Recurrent(nn.RNN).eval().double()
    model = copy.deepcopy(plain)
    model.layer = Layer(5, 7, batch_first=True).double()
    model.layer.load_state_dict(plain.layer.state_dict())
    x, v = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    before = torch.backends.cudnn.enabled
    found, expected = (directional_derivative(one, x, v) for one in (model, plain))
    assert used == [True, False]
    assert torch.backends.cudnn.enabled == before
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_is_turned_in_place_has_another_shape(cuda):
    x = torch.arange(6.0).reshape(2, 3).to("cuda")
    x.transpose_(0, 1)
    assert x.shape == (3, 2)
    assert x[:, 0].cpu().tolist() == [0, 1, 2]


@pytest.mark.parametrize("build", [pooled, smooth])
def test_every_probe_works_without_float64(build):
    torch.manual_seed(0)
    model, inputs, labels = build().eval(), torch.rand(24, 3, 8, 8), torch.arange(24) % 5
    settings = {**FEW_LINES, "lines.radius": 0.5, "pathlength.empirical": True}
    measures = [*MEASURES, "accuracy"]
    here = nlbench.evaluate(model, inputs, measures, settings=settings, labels=labels)
    with PretendMps():
        given = copy.deepcopy(model).to("mps"), inputs.to("mps"), measures
        there = nlbench.evaluate(*given, settings=settings, labels=labels)
    assert {record.machine.device for record in there.records} == {"mps:0"}
    for record in here.records:
        name, found = record.measure.name, there[record.measure.name]
        assert found.status == record.result.status, f"{name}: {found.reason}"
        assert found.summary == pytest.approx(record.result.summary, rel=1e-12, abs=1e-12), name


DOUBLES = {
    "traced": lambda model, x: trace_segment(model, x[0], x[1]).values,
    "traced in float32": lambda m, x: trace_segment(m, x[0], x[1], dtype=torch.float32).values,
    "estimated": lambda model, x: estimate_segment(model, x[0], x[1], evaluations=65).values,
    "drawn": lambda model, x: plane(model, x[:2], size=4).outputs,
    "directions": lambda model, x: direction_paths(x[:2], 2, 1.0),
    "gradients": lambda m, x: direction_paths(x[:2], 2, 1.0, kind="gradient", model=m),
    "noise": lambda model, x: noise_paths(x, 1, 2, 0),
    "near zero": lambda model, x: share_near_zero(x),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_what_is_called_from_python_does_without_double_precision_too(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(3, 6)
    here = DOUBLES[name](model, x)
    with PretendMps():
        there = DOUBLES[name](model.to("mps"), x.to("mps")).cpu()
    torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-12)


SCORES = {
    "affinity": affinity_score,
    "affinity of few samples": lambda x, y: affinity_score(x[:3].repeat(1, 3), y[:3].repeat(1, 3)),
    "r2 of columns that depend on each other": lambda x, y: r2_score(
        torch.cat([x, x[:, :2].sum(1, keepdim=True)], 1), y
    ),
    "cross-validated r2": lambda x, y: r2_score(x, y, kind="crossvalidated"),
    "cka": lambda x, y: linear_cka(x, y, debiased=True),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_of_tensors_of_the_device_is_one_of_the_device(cuda, name):
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = SCORES[name](x.to("cuda"), x.relu().to("cuda"))
    assert found.is_cuda
    assert float(found) == pytest.approx(float(SCORES[name](x, x.relu())), rel=1e-12)


def test_float64_on_mps_is_refused_early(tmp_path):
    request = Request(("norm",), ("vgg8",), device="mps", precision="float64")
    with PretendMps(), pytest.raises(nlbench.RequestError, match="use --device cpu"):
        run(request, tmp_path / "run")


@pytest.mark.parametrize(("pretended", "kind"), [(PretendCuda, "cuda"), (PretendMps, "mps")])
def test_gpu_generator_has_streams_and_is_restored(pretended, kind):
    with pretended():
        device, module = torch.device(kind), getattr(torch, kind)
        before = module.get_rng_state()
        with RandomStream("one", device).active():
            of_one = module.get_rng_state()
        with RandomStream("another", device).active():
            assert not torch.equal(module.get_rng_state(), of_one)
        assert torch.equal(module.get_rng_state(), before)
        known = rng_state(device)
        with preserve_rng_state(device):
            module.manual_seed(123)
            assert rng_state(device) != known
        assert rng_state(device) == known


@pytest.mark.parametrize("precision", ["native", "bfloat16"])
def test_run_in_processes_does_not_initialise_cuda(tmp_path, monkeypatch, precision):
    # As its own process describes the GPU, and its workers use it.
    def refuse(*args):
        pytest.fail("the supervisor took the GPU into use")

    class Described(Exception):
        """Where the run would start its workers."""

    def described(device, precision):
        raise Described(device, precision)

    with PretendCuda(), monkeypatch.context() as patch:
        for name in ("init", "current_device", "get_device_properties", "is_bf16_supported"):
            patch.setattr(torch.cuda, name, refuse)
        patch.setattr(Machine, "at_in_subprocess", described)
        request = Request(("norm",), ("vgg8",), device="cuda", precision=precision)
        with pytest.raises(Described, match=f"cuda.*{precision}"):
            run(request, tmp_path / "run", execution=ExecutionOptions(executor="processes"))
