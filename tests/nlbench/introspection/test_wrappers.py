"""The network inside a wrapper is measured, and the wrapper works afterwards."""

import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import nlbench
from nlbench.errors import RequestError
from nlbench.introspection.model_copy import cpu_copy
from nlbench.introspection.wrappers import unwrapped
from nlbench.probes.lines import trace_segment
from nlbench.probes.sites import list_sites

MEASURES = ["r2", "density", "nlc"]
EAGER = {"backend": "eager"}


class Quick(nn.Module):
    """A handwritten GELU."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    """One activation called twice, and a functional one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.act = nn.ReLU()

    def forward(self, x):
        return torch.relu(self.layer(self.act(x)) - 0.1) + self.act(x)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), Block(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def samples():
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


def scores(model):
    """Return a row for each place, and the statuses."""
    run = nlbench.evaluate(model, samples(), MEASURES, settings={"lines.number": 1})
    rows = []
    for record in run.records:
        for value in record.result.values:
            rows.append((record.measure.name, value.place, dict(value.statistics)))
    return rows, [record.result.status for record in run.records]


def compiled(model):
    return torch.compile(model, **EAGER)


def compiled_in_place(model):
    model.compile(**EAGER)
    return model


def compiled_child(model):
    model[1] = torch.compile(model[1], **EAGER)
    return model


def compiled_method(model):
    model[1].forward = torch.compile(model[1].forward, **EAGER)
    return model


def compiled_and_parallel(model):
    return nn.DataParallel(torch.compile(model, **EAGER))


WRAPPERS = [
    compiled, compiled_in_place, compiled_child, compiled_method, nn.DataParallel,
    compiled_and_parallel, AveragedModel,
]  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_wrapper_changes_no_name_and_no_value(wrap):
    expected = scores(network())
    wrapper = wrap(network())
    children = [(name, id(module)) for name, module in wrapper.named_modules()]
    attributes = [vars(module).copy() for module in wrapper.modules()]
    before = wrapper(samples())
    assert scores(wrapper) == expected
    assert [(name, id(module)) for name, module in wrapper.named_modules()] == children
    assert [list(vars(module)) for module in wrapper.modules()] == list(map(list, attributes))
    assert torch.equal(wrapper(samples()), before)


def test_functions_take_wrappers_too():
    model = torch.compile(network(), **EAGER)
    names = [site.name for site in list_sites(network(), samples())]
    assert [site.name for site in list_sites(model=model, example=samples())] == names
    assert cpu_copy(model=model)[0].weight.equal(network()[0].weight)
    start, end = samples()[:2]
    trace = trace_segment(model, start, end)
    assert trace.regions == trace_segment(network(), start, end).regions


class Bent(nn.Module):
    """A network with more around it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return torch.tanh(2 * self.module(x.abs()))


class BentParallel(nn.DataParallel):
    forward = Bent.forward


class BentAverage(AveragedModel):
    forward = Bent.forward


class BentCall(nn.DataParallel):
    def __call__(self, x):
        return torch.tanh(2 * super().__call__(x.abs()))


def with_hooks(wrapper):
    wrapper.register_forward_pre_hook(lambda module, args: (args[0].abs(),))
    wrapper.register_forward_hook(lambda module, args, output: torch.tanh(2 * output))
    return wrapper


def with_forward(wrapper):
    forward = wrapper.forward
    wrapper.forward = lambda x: torch.tanh(2 * forward(x.abs()))
    return wrapper


def exported(model):
    sizes = ({0: torch.export.Dim("n", min=1)},)
    return torch.export.export(model.eval(), (samples(),), dynamic_shapes=sizes).module()


@pytest.mark.parametrize(
    "wrap",
    [
        BentParallel,
        BentAverage,
        BentCall,
        lambda model: with_hooks(nn.DataParallel(model)),
        lambda model: with_hooks(compiled(model)),
        lambda model: with_hooks(exported(model)),
        lambda model: with_forward(nn.DataParallel(model)),
        lambda model: with_forward(compiled(model)),
        lambda model: compiled(with_hooks(nn.DataParallel(model))),
        lambda model: nn.Sequential(nn.DataParallel(with_hooks(compiled(model)))),
    ],
)
def test_wrapper_computation_is_measured(wrap):
    wrapper = wrap(network())
    measures = ["accuracy", "affine-residual", "nlc"]
    with torch.no_grad():
        expected = Bent(network())(samples())
        assert torch.allclose(wrapper(samples()), expected, atol=1e-6)
    labels = expected.argmax(1)
    found = nlbench.evaluate(wrapper, samples(), measures, labels=labels).records
    plain = nlbench.evaluate(Bent(network()), samples(), measures, labels=labels).records
    values = [record.result.summary["value"] for record in plain]
    assert [record.result.summary["value"] for record in found] == pytest.approx(values, rel=1e-4)


def test_subclass_with_same_forward_is_unwrapped():
    wrapper = type("Parallel", (nn.DataParallel,), {})(network())
    with unwrapped(wrapper) as inside:
        assert inside is wrapper.module


class Compiled(nn.Module):
    """Compiled where it is defined."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @torch.compile(backend="eager")
    def forward(self, x):
        return torch.relu(self.layer(x))


def test_method_compiled_at_definition_is_observed():
    assert [site.name for site in list_sites(Compiled(), samples())] == ["relu"]


def test_wrapper_is_restored_after_an_error():
    model = compiled_child(compiled_in_place(network()))
    child, call = model[1], model._compiled_call_impl
    with unwrapped(model) as inside:
        assert isinstance(inside[1], Block)
    with pytest.raises(RuntimeError):
        list_sites(model, torch.zeros(2, 3))
    assert model[1] is child
    assert model._compiled_call_impl is call


def test_exported_program_has_the_sites_of_its_network():
    model = network()
    model.append(Quick())
    model.eval()
    sizes = ({0: torch.export.Dim("n", min=1)},)
    program = torch.export.export(model, (samples(),), dynamic_shapes=sizes).module()
    expected, statuses = scores(model)
    actual, same = scores(program)
    assert same == statuses
    assert [row[:2] for row in actual] == [row[:2] for row in expected]
    for first, second in zip(actual, expected, strict=True):
        assert first[2] == pytest.approx(second[2], rel=1e-4)
    kinds = [(site.name, site.kind) for site in list_sites(model, samples())]
    assert [(site.name, site.kind) for site in list_sites(program, samples())] == kinds
    assert torch.equal(program(samples()), model(samples()))


def test_an_exported_program_with_keywords_and_constants_runs():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, *, scale):
            return {"out": torch.relu(self.layer(x)) * scale["by"] + torch.tensor([1.0, 2, 3, 4])}

    model = Scaled().eval()
    arguments = {"x": samples(), "scale": {"by": torch.ones(40, 1)}}
    program = torch.export.export(model, (), arguments).module()
    with unwrapped(program) as inside:
        assert torch.equal(inside(**arguments)["out"], model(**arguments)["out"])
        with pytest.raises(RequestError):
            inside(samples())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_networks_are_measured_at_activations():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    dynamic = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    run = nlbench.evaluate(dynamic, samples(), ["r2", "density"], settings={"lines.number": 1})
    expected = nlbench.evaluate(model, samples(), ["r2"])["r2"]
    assert [value.place for value in run["r2"].values] == ["1"]
    assert run["r2"].summary["value"] == pytest.approx(expected.summary["value"], abs=0.05)
    # The scale of quantised activations is that of the batch.
    assert "depend on the other samples" in run["density"].reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_activations_of_quantised_tensors_are_measured():
    quantization = torch.ao.quantization
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model = nn.Sequential(quantization.QuantStub(), inner, quantization.DeQuantStub()).eval()
    expected = nlbench.evaluate(model, samples(), ["r2"])["r2"]
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    prepared = quantization.prepare(model)
    prepared(samples())
    run = nlbench.evaluate(quantization.convert(prepared), samples(), ["r2", "density"])
    result = run["r2"]
    assert "quantised weights" in run["density"].reason
    assert [value.place for value in result.values] == ["1.1"]
    assert result.summary["value"] == pytest.approx(expected.summary["value"], abs=0.1)


def test_attributes_that_cannot_be_copied_are_shared():
    model = network()
    model.lock = threading.Lock()
    model[1].items = (number for number in range(3))
    assert scores(model) == scores(network())


def test_exported_program_is_undefined_at_other_sizes():
    program = torch.export.export(network().eval(), (samples()[:8],)).module()
    result = nlbench.evaluate(program, samples(), ["r2"])["r2"]
    assert result.status == "undefined"
    assert "dynamic_shapes" in result.reason
    settings = {"sites.batch": 8}
    assert nlbench.evaluate(program, samples(), ["influence"], settings=settings)["influence"]
