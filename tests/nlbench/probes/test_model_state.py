import pytest
import torch
from torch import nn

from nlbench.errors import RequestError
from nlbench.probes.model_state import refuse_unobservable
from nlbench.probes.sites.sites import list_sites, observe_sites


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


def test_the_model_is_left_as_it_was_found():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)).train()
    model[1].eval()
    before = state_of(model)
    observe_sites(model, [torch.randn(4, 3, 8, 8)] * 2, lambda observation: None)
    assert_same_state(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_left_as_it_was_found_after_an_error_in_the_listener_or_the_model():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.SiLU(inplace=True), nn.Linear(6, 6), nn.GELU()
    ).train()
    before = state_of(model)

    def fail(observation):
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        observe_sites(model, [torch.randn(5, 4)], fail)
    assert_same_state(model, before)
    with pytest.raises(RuntimeError):
        observe_sites(model, [torch.randn(5, 9)], lambda observation: None)
    assert_same_state(model, before)
    assert [site.name for site in list_sites(model, torch.randn(5, 4))] == ["1", "3"]


def test_buffers_that_the_forward_pass_changes_get_their_values_back():
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


def test_a_scripted_model_is_refused_in_one_line():
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2))
    with pytest.raises(RequestError, match="scripted, so its activations can't be observed"):
        list_sites(scripted, torch.zeros(1, 2))


def test_a_compiled_model_is_refused_in_one_line():
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(RequestError, match="compiled, so its activations can't be observed"):
        list_sites(compiled, torch.zeros(1, 2))


@pytest.mark.parametrize("wrap", [torch.compile, torch.jit.script], ids=["compiled", "scripted"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_a_part_that_can_not_be_observed_is_refused_by_name(wrap):
    model = nn.Sequential(nn.ReLU(), wrap(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    with pytest.raises(RequestError, match=r"1 is .*pass the module it was made from"):
        refuse_unobservable(model)
    refuse_unobservable(nn.Sequential(nn.ReLU()))


def test_an_exported_model_is_refused_in_one_line():
    exported = torch.export.export(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.zeros(2, 3),))
    with pytest.raises(RequestError, match=r"can't be put into evaluation mode.*made from$"):
        list_sites(exported.module(), torch.zeros(2, 3))


def test_a_model_that_runs_in_several_threads_is_refused_by_name():
    parallel = nn.DataParallel(nn.ReLU())
    parallel.device_ids = [0, 1]
    with pytest.raises(RequestError, match=r"^0 is a DataParallel on several devices"):
        list_sites(nn.Sequential(parallel), torch.zeros(2, 3))
