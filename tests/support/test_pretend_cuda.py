"""Results, tensor devices and synchronisation counts on a simulated GPU."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from pretend_cuda import PretendCuda
from pretend_mps import PretendMps
from programs import record_checked_program
from torch import nn
from torch.autograd import forward_ad
from torch.utils.data import TensorDataset

import nlbench
from nlbench import runner
from nlbench.introspection.random_state import RandomStream, preserve_rng_state, rng_state
from nlbench.measures.affinity import affinity_score
from nlbench.measures.cka import linear_cka
from nlbench.measures.r2 import r2_score
from nlbench.measures.sparsity import fraction_near_zero
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


@pytest.fixture
def cuda():
    with PretendCuda() as device:
        yield device


def test_every_measure_agrees_and_leaves_model_unchanged(monkeypatch):
    # The same number of measuring threads on machines with fewer cores.
    monkeypatch.setattr(sites, "measure_threads", lambda device: 3 if device.type == "cuda" else 1)
    torch.manual_seed(0)
    model, inputs = smooth().eval(), torch.rand(64, 3, 8, 8)
    on_cpu = nlbench.evaluate(model, inputs, MEASURES, settings=FEW_LINES)
    with PretendCuda():
        moved = copy.deepcopy(model).to("cuda")
        on_gpu = nlbench.evaluate(moved, inputs.to("cuda"), MEASURES, settings=FEW_LINES)
        for name, tensor in moved.state_dict().items():
            assert tensor.is_cuda
            torch.testing.assert_close(tensor.cpu(), model.state_dict()[name], rtol=0, atol=0)
    assert {record.machine.device for record in on_gpu.records} == {"cuda:0"}
    assert_same_results(on_gpu, on_cpu, rel=1e-9)


def assert_same_results(run, expected, rel=1e-12):
    for record in expected.records:
        name, result = record.measure.name, run[record.measure.name]
        assert result.status == record.result.status, f"{name}: {result.reason}"
        assert result.summary == pytest.approx(record.result.summary, rel=rel, abs=1e-12), name


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_segment_is_traced_on_device_of_model(cuda, method):
    torch.manual_seed(0)
    model, (start, end) = pooled().eval(), torch.rand(2, 3, 8, 8)
    end = start + (end - start) / 16
    on_gpu = trace_segment(
        copy.deepcopy(model).to("cuda"), start.to("cuda"), end.to("cuda"), method=method
    )
    on_cpu = trace_segment(model, start, end, method=method)
    assert on_gpu.values.is_cuda
    assert on_gpu.regions == on_cpu.regions
    torch.testing.assert_close(on_gpu.t.cpu(), on_cpu.t, rtol=0, atol=1e-12)
    torch.testing.assert_close(on_gpu.values.cpu(), on_cpu.values, rtol=1e-12, atol=1e-12)


def test_tensors_of_two_devices_do_not_mix(cuda):
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="cuda") + torch.zeros(3)
    with pytest.raises(TypeError, match="cpu"):
        torch.zeros(3, device="cuda").numpy()


def test_synchronisations_are_counted_by_operation(cuda):
    values = torch.arange(4.0).to("cuda")
    cuda.reset()
    values.sum().item()
    values[values > 1]
    assert cuda.waits == {"_local_scalar_dense": 1, "index[mask]": 1}


def test_site_measures_wait_at_most_four_times(cuda):
    torch.manual_seed(0)
    model, inputs = pooled().eval().to("cuda"), torch.rand(32, 3, 8, 8).to("cuda")
    nlbench.evaluate(model, inputs[:12], SITE_MEASURES)

    def waits(samples):
        cuda.reset()
        run = nlbench.evaluate(model, inputs[:samples], SITE_MEASURES, settings={"sites.batch": 8})
        assert not run.failed
        return sum(cuda.waits.values())

    # Synchronisations once per run cancel out.
    batches, sites = 2, 2
    assert waits(32) - waits(16) <= 4 * batches * sites


class Deep(nn.Sequential):
    """A perceptron with several layers of ReLUs."""

    def __init__(self, layers):
        parts = [nn.Linear(6, 16)]
        for _ in range(layers):
            parts += [nn.ReLU(), nn.Linear(16, 16)]
        super().__init__(*parts)


def waits_of(cuda, build, shape, run):
    """Count the synchronisations of the second of two runs."""
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
        program = record_checked_program(model, points)
        needs = measure_point_memory(program, points)
        return lambda: trace_exactly(program, points[None], limit=limit, needs=needs)

    return prepared


def test_exact_tracing_waits_five_times_per_activation(cuda):
    one, four = (waits_of(cuda, lambda n=n: Deep(n), (6,), exactly()) for n in (1, 4))
    assert 0 < four - one <= 5 * 3


def test_exact_tracing_waits_five_times_per_pooling(cuda):
    def without_pooling():
        return nn.Sequential(pooled()[0], nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5))

    def with_pooling():
        return nn.Sequential(pooled()[0], nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())

    networks = (without_pooling, with_pooling)
    without, pooling = (waits_of(cuda, build, (3, 8, 8), exactly()) for build in networks)
    assert pooling - without <= 5


def test_waits_of_exact_tracing_in_chunks_are_bounded(cuda):
    in_chunks = waits_of(cuda, lambda: Deep(4), (6,), exactly(limit=4))
    at_once = waits_of(cuda, lambda: Deep(4), (6,), exactly())
    torch.manual_seed(0)
    regions = trace_segment(Deep(4).double().eval(), *torch.rand(2, 6).double()).regions
    # At most one chunk per region, each through at most four layers, plus their concatenation.
    assert in_chunks - at_once <= regions * (5 * 4 + 3)


def test_estimates_wait_few_times_per_halving(cuda):
    def poolings(count):
        pools = (nn.MaxPool2d(2, 1) for _ in range(count))
        last = nn.Linear(2 * (4 - count) ** 2, 2)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), *pools, nn.Flatten(), last)

    def estimated(*segment):
        return lambda: estimate_segment(*segment, evaluations=17, dtype=torch.float64)

    # Per grid: crossings, which of them coincide, their number, finiteness of the outputs; with
    # windows also the nodes that are evaluated again, their crossings and finiteness.
    for build, shape, waits in ((Deep, (6,), 4), (poolings, (1, 6, 6), 7)):
        one, three = (waits_of(cuda, partial(build, n), shape, estimated) for n in (1, 3))
        assert abs(three - one) <= 3
        # Apart from those, the network's copy is compared with the network once.
        assert three <= waits * 3 + 30


def few_images():
    random = torch.Generator().manual_seed(5)
    images, labels = torch.rand(24, 3, 8, 8, generator=random), torch.arange(24) % 5
    return Dataset("few", *[TensorDataset(images, labels)] * 2, (3, 8, 8), 5, (0.5,), (0.25,), "")


def test_training_agrees_with_cpu_at_two_waits(cuda):
    # One for the finiteness of the loss, one for the number of correct predictions.
    recipe = replace(vanilla, batch_size=8, epochs=2)
    on_gpu = train(smooth, few_images(), recipe, device="cuda")
    waits = cuda.waits.total()
    on_cpu = train(smooth, few_images(), recipe)
    losses = [[epoch.loss for epoch in result.history] for result in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], 1e-12)
    for name, tensor in on_cpu.model.state_dict().items():
        trained = on_gpu.model.state_dict()[name]
        assert trained.is_cuda
        torch.testing.assert_close(trained.cpu(), tensor, rtol=1e-12, atol=1e-12)
    cuda.reset()
    train(smooth, few_images(), replace(recipe, epochs=4), device="cuda")
    # Two more epochs of three steps, each evaluated on at most two splits of one batch.
    steps, evaluations = 2 * 3, 2 * 2
    assert cuda.waits.total() - waits <= 2 * steps + 2 * evaluations


NETWORK = """
from torch import nn
def net(num_classes):
    layers = nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(144, 40)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(40, num_classes))
"""


def test_run_on_the_gpu_agrees_with_the_cpu(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(NETWORK)
    settings = {**FEW_LINES, "lines.radius": 0.5, "lines.budget": 0, "lines.evaluations": 64}
    few = {"samples": 2, "traced": 0, "directions": 2}
    settings |= {f"local-complexity.{name}": value for name, value in few.items()}
    request = Request(
        ("*",), (f"{file}:net",), samples=12, data=("digits",), settings=settings, errors="none"
    )
    on_cpu = run(request, tmp_path / "cpu")
    with PretendCuda():
        on_gpu = run(replace(request, device="cuda"), tmp_path / "cuda")
    assert {r.machine.device for r in on_gpu.records} == {"cuda"}
    assert on_gpu.records[0].machine.environment["device_name"] == "Pretended GPU"
    assert_same_results(on_gpu, on_cpu)
    # r2 needs more samples, regions needs exact breakpoints.
    undefined = {r.measure.name for r in on_gpu.records if r.result.status != "ok"}
    assert undefined == {"r2", "regions"}


def test_derivatives_agree_with_the_cpu(cuda):
    x, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def gradients(device):
        w = weight.clone().to(device).requires_grad_()
        bias = torch.ones(3, dtype=torch.float64).to(device).requires_grad_()
        loss = ((x.to(device) @ w.T + bias).tanh() ** 2).sum() * bias.sum()
        loss.backward()
        (first,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), w)
        return [gradient.cpu() for gradient in (w.grad, bias.grad, second)]

    for on_gpu, on_cpu in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-12, atol=1e-12)


class Recurrent(nn.Module):
    """A recurrent layer, and a linear layer on its last step."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_differentiated_without_cudnn(kind):
    torch.manual_seed(0)
    model, inputs = Recurrent(kind).eval().double(), torch.randn(12, 4, 5, dtype=torch.float64)
    on_cpu = nlbench.evaluate(model, inputs, ["nlc"])
    with PretendCuda():
        on_gpu = nlbench.evaluate(copy.deepcopy(model).to("cuda"), inputs.to("cuda"), ["nlc"])
    assert on_gpu["nlc"].status == "ok", on_gpu["nlc"].reason
    assert_same_results(on_gpu, on_cpu)


def test_a_cudnn_layer_is_differentiated_without_cudnn():
    uses = []

    class Layer(nn.RNN):
        """A layer that raises PyTorch's error for cuDNN layers."""

        def forward(self, x):
            uses.append(torch.backends.cudnn.enabled)
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
    derivatives = directional_derivative(model, x, v)
    assert uses == [True, False]
    assert torch.backends.cudnn.enabled == before
    expected = directional_derivative(plain, x, v)
    torch.testing.assert_close(derivatives, expected, rtol=1e-12, atol=1e-12)


def test_a_tensor_transposed_in_place_changes_shape(cuda):
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
    on_cpu = nlbench.evaluate(model, inputs, measures, settings=settings, labels=labels)
    with PretendMps():
        arguments = copy.deepcopy(model).to("mps"), inputs.to("mps"), measures
        on_gpu = nlbench.evaluate(*arguments, settings=settings, labels=labels)
    assert {record.machine.device for record in on_gpu.records} == {"mps:0"}
    assert_same_results(on_gpu, on_cpu)


FUNCTIONS = {
    "trace": lambda model, x: trace_segment(model, x[0], x[1]).values,
    "trace in float32": lambda m, x: trace_segment(m, x[0], x[1], dtype=torch.float32).values,
    "estimate": lambda model, x: estimate_segment(model, x[0], x[1], evaluations=65).values,
    "plane": lambda model, x: plane(model, x[:2], size=4).outputs,
    "directions": lambda model, x: direction_paths(x[:2], 2, 1.0),
    "gradients": lambda m, x: direction_paths(x[:2], 2, 1.0, kind="gradient", model=m),
    "noise": lambda model, x: noise_paths(x, 1, 2, 0),
    "near zero": lambda model, x: fraction_near_zero(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_work_without_float64(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(3, 6)
    on_cpu = FUNCTIONS[name](model, x)
    with PretendMps():
        on_gpu = FUNCTIONS[name](model.to("mps"), x.to("mps")).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-12, atol=1e-12)


SCORES = {
    "affinity": affinity_score,
    "affinity of few samples": lambda x, y: affinity_score(x[:3].repeat(1, 3), y[:3].repeat(1, 3)),
    "r2 of dependent columns": lambda x, y: r2_score(
        torch.cat([x, x[:, :2].sum(1, keepdim=True)], 1), y
    ),
    "cross-validated r2": lambda x, y: r2_score(x, y, kind="crossvalidated"),
    "cka": lambda x, y: linear_cka(x, y, debiased=True),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_is_on_the_device_of_its_inputs(cuda, name):
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = SCORES[name](x.to("cuda"), x.relu().to("cuda"))
    assert score.is_cuda
    assert float(score) == pytest.approx(float(SCORES[name](x, x.relu())), rel=1e-12)


def test_float64_on_mps_is_refused_early(tmp_path):
    request = Request(("norm",), ("vgg8",), device="mps", precision="float64")
    with PretendMps(), pytest.raises(nlbench.RequestError, match="--device"):
        run(request, tmp_path / "run")


@pytest.mark.parametrize(("pretended", "kind"), [(PretendCuda, "cuda"), (PretendMps, "mps")])
def test_gpu_generator_has_streams_and_is_restored(pretended, kind):
    with pretended():
        device, module = torch.device(kind), getattr(torch, kind)
        before = module.get_rng_state()
        with RandomStream("one", device).active():
            state = module.get_rng_state()
        with RandomStream("another", device).active():
            assert not torch.equal(module.get_rng_state(), state)
        assert torch.equal(module.get_rng_state(), before)
        known = rng_state(device)
        with preserve_rng_state(device):
            module.manual_seed(123)
            assert rng_state(device) != known
        assert rng_state(device) == known


@pytest.mark.parametrize("precision", ["native", "bfloat16"])
def test_run_in_processes_does_not_initialise_cuda(tmp_path, monkeypatch, precision):
    # A subprocess describes the GPU, and only the workers use it.
    def refuse(*args):
        pytest.fail("the supervisor initialised the GPU")

    class DescriptionRequested(Exception):
        """Ends the run before it starts workers."""

    def request_description(device, precision):
        raise DescriptionRequested(device, precision)

    with PretendCuda(), monkeypatch.context() as patch:
        for name in ("init", "current_device", "get_device_properties", "is_bf16_supported"):
            patch.setattr(torch.cuda, name, refuse)
        patch.setattr(runner, "describe_machine_in_subprocess", request_description)
        request = Request(("norm",), ("vgg8",), device="cuda", precision=precision)
        with pytest.raises(DescriptionRequested, match=f"cuda.*{precision}"):
            run(request, tmp_path / "run", execution=ExecutionOptions(executor="processes"))
