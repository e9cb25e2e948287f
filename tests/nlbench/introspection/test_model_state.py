"""A model is left unchanged."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pretend_cuda import PretendCuda
from torch import nn

from nlbench.errors import RequestError
from nlbench.introspection.model_state import (
    changed_parameters,
    evaluation_mode,
    parameter_checksums,
    preserve_attributes,
    refuse_unobservable,
)
from nlbench.probes.function import observe_function
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.sites.sites_observation import list_sites, observe_sites


def state_of(model):
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()
    ]
    return hooks, {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model, before):
    hooks, weights = state_of(model)
    assert hooks == before[0]
    assert weights.keys() == before[1].keys()
    for name, value in weights.items():
        assert torch.equal(value, before[1][name]), name


def test_the_model_is_restored():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)).train()
    model[1].eval()
    before = state_of(model)
    observe_sites(model, [torch.randn(4, 3, 8, 8)] * 2, lambda observation: None)
    assert_same_state(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_restored_after_an_error():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.SiLU(inplace=True), nn.Linear(6, 6), nn.GELU()
    ).train()
    before = state_of(model)

    def fail(observation):
        raise KeyError("listener")

    with pytest.raises(KeyError):
        observe_sites(model, [torch.randn(5, 4)], fail)
    assert_same_state(model, before)
    with pytest.raises(RuntimeError):
        observe_sites(model, [torch.randn(5, 9)], lambda observation: None)
    assert_same_state(model, before)
    assert [site.name for site in list_sites(model, torch.randn(5, 4))] == ["1", "3"]


def test_changed_buffers_are_restored():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("last", torch.zeros(3))
            self.register_buffer("cache", torch.zeros(0))

        def forward(self, x):
            self.calls += 1
            self.last = x.mean(0)
            self.cache = torch.arange(len(x))
            return torch.relu(x)

    model = Counting()
    last = model.last
    observe_sites(model, [torch.randn(4, 3)] * 2, lambda observation: None)
    assert model.calls.item() == 0
    assert model.last is last
    assert torch.equal(model.last, torch.zeros(3))
    assert len(model.cache) == 4


def test_a_sparse_buffer_is_restored():
    class OnAGraph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("edges", torch.eye(3).to_sparse())

        def forward(self, x):
            self.edges.mul_(2)
            return torch.relu(x @ self.edges)

    model = OnAGraph()
    observe_sites(model, [torch.ones(2, 3)], lambda observation: None, memory=2**20)
    assert torch.equal(model.edges.to_dense(), torch.eye(3))


def test_unchanged_buffers_are_not_written_to():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    versions = [buffer._version for buffer in model.buffers()]
    observe_sites(model, [torch.randn(4, 3)], lambda observation: None)
    assert [buffer._version for buffer in model.buffers()] == versions


@pytest.mark.parametrize("layers", [1, 5])
def test_buffers_take_one_gpu_synchronisation(layers):
    with PretendCuda() as cuda:
        model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(layers))).cuda()
        cuda.reset()
        with evaluation_mode(model):
            model[0].running_mean += 1
        assert cuda.waits.total() == 1
        assert model[0].running_mean.sum().item() == 0


def test_plain_attributes_are_restored():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.last = 0, None

        def forward(self, x):
            self.calls += 1
            self.last = self.extra = x.detach()
            return torch.relu(x)

    model = nn.Sequential(Counting())
    observe_sites(model, [torch.randn(4, 3)] * 2, lambda observation: None)
    assert (model[0].calls, model[0].last, hasattr(model[0], "extra")) == (0, None, False)
    observe_function(model, [torch.randn(4, 3)] * 2, lambda seen: seen.function(seen.inputs))
    assert (model[0].calls, model[0].last, hasattr(model[0], "extra")) == (0, None, False)


def test_class_attributes_and_variables_of_closures_are_restored():
    count = 0

    class Counting(nn.Module):
        total, sizes = 0, []

        def forward(self, x):
            nonlocal count
            count += 1
            Counting.total += 1
            Counting.last = x.detach()
            self.sizes.append(len(x))
            return torch.relu(x)

    model = nn.Sequential(Counting())
    observe_sites(model, [torch.randn(4, 3)] * 2, lambda observation: None)
    observe_function(model, [torch.randn(4, 3)] * 2, lambda seen: seen.function(seen.inputs))
    assert (count, Counting.total, hasattr(Counting, "last")) == (0, 0, False)
    # What is added to a container stays, since it may be a cache.
    assert 4 in Counting.sizes


def test_layers_created_at_the_first_run_stay():
    class Building(nn.Module):
        built = False

        def forward(self, x):
            if not self.built:
                self.layer, self.built = nn.Linear(x.shape[1], 3), True
            return torch.relu(self.layer(x))

    found, model = [], Building()
    for _ in range(2):
        observe_sites(model, [torch.ones(2, 4)], lambda observation: found.append(observation.x))
    assert torch.equal(*found)


def test_nested_passes_over_shared_modules_restore_them():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()).train()
    before = state_of(model)
    with evaluation_mode(model):
        model[0].running_mean += 1
        with evaluation_mode(model[0]):
            model[0].running_mean += 1
            model[0].counter = 1
        assert not model[0].training
        assert not hasattr(model[0], "counter")
    assert_same_state(model, before)


def test_passes_in_several_threads_are_independent():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 2).train(), torch.randn(5, 4, 8)

    def look(_):
        found = []
        observe_sites(model, [x] * 3, lambda o: found.append((o.place, o.batch, o.y.clone())))
        return found

    expected = look(0)
    assert [place for place, _, _ in expected[:2]] == ["layers.0/relu", "layers.1/relu"]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(look, range(16)):
            assert [a[:2] for a in found] == [b[:2] for b in expected]
            assert all(torch.equal(a[2], b[2]) for a, b in zip(found, expected, strict=True))
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_scripted_model_is_refused_in_one_line():
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2))
    with pytest.raises(RequestError, match="scripted"):
        list_sites(scripted, torch.zeros(1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_model_is_observed_as_a_function():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    scripted, x, found = torch.jit.script(model), torch.randn(4, 2), []
    for each in (scripted, model):
        observe_function(each, [x], lambda batch: found.append(batch.function(batch.inputs)))
        assert each.training
    assert torch.equal(*found)


@pytest.mark.parametrize("wrap", [torch.compile, torch.jit.script], ids=["compiled", "scripted"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_an_unobservable_part_is_refused_by_name(wrap):
    model = nn.Sequential(nn.ReLU(), wrap(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    with pytest.raises(RequestError):
        refuse_unobservable(model)
    refuse_unobservable(nn.Sequential(nn.ReLU()))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.seen, self.layer = None, [], nn.Linear(3, 3)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(3, device=x.device)
        self.seen.append(x.shape)
        return self.layer(x) * self.mask


def test_a_mask_cached_during_recording_is_removed():
    model = Masked()
    channel_graph(model, torch.ones(1, 3))
    assert model.mask is None
    assert model.seen == []
    assert model(torch.ones(1, 3)).device.type == "cpu"


def test_earlier_hooks_can_still_be_removed():
    model = Masked()
    handle = model.register_forward_hook(lambda *args: None)
    with preserve_attributes(model):
        model.register_forward_hook(lambda *args: None)
        model.register_buffer("added", torch.ones(1))
    assert len(model._forward_hooks) == 1
    assert not hasattr(model, "added")
    handle.remove()
    assert not model._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_any_changed_parameter_is_named(dtype):
    model = nn.ParameterDict(
        {
            "odd": torch.randn(3, 5, 7, dtype=dtype),
            "part": torch.randn(9, dtype=dtype)[1:8],
            "sheets": torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
            "empty": torch.zeros(0, dtype=dtype),
            "kept": torch.ones(2, dtype=dtype),
        }
    )
    checksums = parameter_checksums(model)
    assert changed_parameters(model, checksums) == []
    for name in ("odd", "part", "sheets"):
        with torch.no_grad():
            model[name][(0,) * model[name].dim()] += 1
    assert changed_parameters(model, checksums) == ["odd", "part", "sheets"]


def test_parameters_without_numbers_are_not_checked():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2, device="meta"))
    model.register_parameter("sparse", nn.Parameter(torch.eye(2).to_sparse()))
    assert parameter_checksums(model) == {}


def test_changed_tensor_attributes_are_restored():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = torch.zeros(1)

        def forward(self, x):
            self.calls += 1
            return torch.relu(x)

    model = Counting()
    observe_sites(model, [torch.randn(4, 3)] * 2, lambda observation: None)
    assert model.calls.item() == 0
