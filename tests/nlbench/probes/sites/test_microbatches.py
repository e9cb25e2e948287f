import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlbench.errors import Undefined
from nlbench.introspection import memory
from nlbench.introspection.memory import bytes_per_sample
from nlbench.probes.sites.sites_observation import observe_sites

OUT_OF_MEMORY = {
    "of a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "of the machine": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    "of Python": MemoryError(),
}


class Limited(nn.Module):
    """Runs out of memory halfway for more than so many samples; in float64, so that how many
    samples there are shows in no digit that is compared."""

    def __init__(self, most, error=OUT_OF_MEMORY["of a GPU"]):
        super().__init__()
        self.most, self.error, self.sizes = most, error, []
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 8).double()
        self.table = nn.Parameter(torch.randn(1, 8).double())

    def forward(self, x):
        self.sizes.append(len(x))
        x = torch.relu(self.first(x))
        if len(x) > self.most:
            raise self.error
        return torch.tanh(self.second(x)) + torch.sigmoid(self.table)


def looks_of(model, *batches, **options):
    observations = []
    observe_sites(model, batches, observations.append, **options)
    return observations


@pytest.mark.parametrize(
    ("error", "most"), list(zip(OUT_OF_MEMORY.values(), [20, 3, 2], strict=True))
)
def test_oversized_batch_is_split_and_observed_whole(most, error):
    model = Limited(1000, error)
    batches = [torch.randn(50, 6).double(), torch.randn(30, 6).double()]
    functions = {"peak": lambda x: x.amax(1)}
    expected = looks_of(model, *batches, functions=functions)
    model.most, model.sizes = most, []
    found = looks_of(model, *batches, functions=functions)
    assert max(model.sizes) > most
    assert [(a.site, a.batch) for a in found] == [(b.site, b.batch) for b in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.x, b.x, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(a.y, b.y, rtol=1e-14, atol=1e-14)
        for mine, theirs in zip(a.unreduced["peak"], b.unreduced["peak"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_size_that_fits_is_remembered_and_tried_first():
    model, found = Limited(20), {}
    x = torch.randn(64, 6).double()
    looks_of(model, x, x, feasible_sizes=found)
    assert list(found[model].values()) == [16]
    assert max(model.sizes[-5:]) == 13
    model.sizes.clear()
    looks_of(model, x, feasible_sizes=found)
    assert max(model.sizes) == 13


def test_input_independent_table_is_not_a_site():
    observations = looks_of(Limited(4), torch.randn(16, 6).double())
    assert {observation.place: len(observation.x) for observation in observations} == {
        "relu": 16,
        "tanh": 16,
    }


def test_network_fitting_only_one_sample_is_refused():
    with pytest.raises(Undefined):
        looks_of(Limited(1), torch.randn(4, 6).double())


def test_single_sample_that_does_not_fit_is_error():
    with pytest.raises(torch.OutOfMemoryError):
        looks_of(Limited(0), torch.randn(4, 6).double())


def test_another_error_of_model_is_not_tried_again():
    model = Limited(1, RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        looks_of(model, torch.randn(4, 6).double())
    assert model.sizes == [4]


def test_given_memory_decides_the_size_of_the_parts():
    model, x = Limited(1000), torch.randn(64, 6).double()
    expected = looks_of(model, x)
    model.sizes.clear()
    needed = bytes_per_sample(model.eval(), x[:2])
    found = {}
    observations = looks_of(model, x, memory=10 * needed, feasible_sizes=found)
    assert list(found[model].values()) == [10]
    assert max(model.sizes) == 10
    for a, b in zip(observations, expected, strict=True):
        torch.testing.assert_close(a.y, b.y, rtol=1e-14, atol=1e-14)


class Lost(Limited):
    def forward(self, x):
        return torch.relu(torch.rot90(super().forward(x), 1, (0, 1)))


@pytest.mark.parametrize("most", [1000, 2])
def test_site_without_sample_axis_is_undefined_in_parts(most):
    problems = {}
    whole = torch.randn(16, 7, 6).double()
    observed = looks_of(Lost(most), whole, on_undefined=problems.setdefault)
    assert [batch.place for batch in observed] == ["relu", "tanh"]
    assert list(problems) == ["relu:1"]


def test_batch_with_unclear_samples_is_not_split():
    with pytest.raises(Undefined, match="batch axis"):
        looks_of(Lost(2), torch.randn(16, 8, 6).double())


def test_data_dependent_activations_are_refused_in_parts():
    class Choosing(Limited):
        def forward(self, x):
            is_low = x[0, 0] < 0
            x = super().forward(x)
            return torch.relu(x) if is_low else torch.tanh(x)

    x = torch.linspace(-1, 1, 16 * 6).reshape(16, 6).double()
    with pytest.raises(Undefined):
        looks_of(Choosing(4), x)


class Written(nn.Module):
    """An activation written out, which runs out of memory on its way for more than so many."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        x = x.clamp(min=0)
        if len(x) > self.most:
            raise OUT_OF_MEMORY["of a GPU"]
        return 2 * x


@pytest.mark.parametrize(("most", "memory"), [(3, None), (1000, 10**6), (1000, 1)])
def test_handwritten_activation_survives_errors_and_earlier_runs(most, memory):
    model = nn.Sequential(nn.Linear(6, 8), Written(most), nn.ReLU())
    observations = looks_of(model, torch.randn(8, 6), memory=memory)
    assert [(observation.place, len(observation.x)) for observation in observations] == [
        ("1", 8),
        ("2", 8),
    ]


class Mixing(nn.Module):
    """A network with a function in its middle that may mix samples."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        return torch.tanh(self.function(torch.relu(self.first(x))))


def attended(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def repeated(x):
    return x + x[torch.arange(len(x)) // 2 * 2]


MIXING = {
    "the statistics of a batch": nn.BatchNorm1d(6, track_running_stats=False),
    "a mean over the samples": lambda x: x - x.mean(0),
    "a mean over all numbers": lambda x: x - x.mean(),
    "a softmax over the samples": lambda x: x.softmax(0),
    "a sum over those before": lambda x: x.cumsum(0),
    "products of samples": lambda x: x @ x.T,
    "a product of samples and back": lambda x: x @ x.T @ x,
    "a norm of the batch": lambda x: F.normalize(x, dim=0),
    "attention to other samples": attended,
    "a matrix of distances": lambda x: x + torch.cdist(x, x).sum(1, keepdim=True),
    "the rank of a sample": lambda x: x + x.argsort(0),
    "its neighbour": repeated,
    "the largest of the batch": lambda x: x / (1 + x.abs().amax()),
}


@pytest.mark.parametrize(
    ("function", "how"),
    list(zip(MIXING.values(), itertools.cycle(["memory", "error"]))),
    ids=MIXING,
)
def test_network_mixing_samples_is_refused_in_parts(function, how):
    torch.manual_seed(0)
    x, model = torch.randn(9, 6), Mixing(function)
    if how == "error":
        model = nn.Sequential(model, OutOfMemory(4))
    assert [len(one.x) for one in looks_of(Mixing(function), x)] == [9, 9]
    with pytest.raises(Undefined):
        looks_of(model, x, memory=1 if how == "memory" else None)


@pytest.mark.parametrize("function", [lambda x: x / len(x), lambda x: x + x.roll(2, 0)])
def test_mixing_beyond_two_samples_is_refused_in_parts(function):
    model = nn.Sequential(Mixing(function), OutOfMemory(4))
    with pytest.raises(Undefined):
        looks_of(model, torch.randn(9, 6))


APART = {
    "a softmax of each": lambda x: x.softmax(1),
    "a sum along each": lambda x: x.cumsum(1),
    "a norm of each": lambda x: F.normalize(x),
    "products of each with itself": lambda x: (x[:, :, None] @ x[:, None]).sum(2),
    "a table": lambda x: x + torch.arange(6.0),
    "samples one by one": lambda x: torch.stack([one * one.sum() for one in x]),
    # Samples that are reordered are put back in order.
    "a roll": lambda x: x.roll(1, 0),
    "a flip": lambda x: x.flip(0),
}


class OutOfMemory(nn.Module):
    """Runs out of memory for more than so many samples."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        if len(x) > self.most:
            raise OUT_OF_MEMORY["of a GPU"]
        return x


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_network_with_independent_samples_is_accepted(function):
    torch.manual_seed(0)
    x, model = torch.randn(9, 6), Mixing(function)
    for a, b in zip(looks_of(model, x, memory=1), looks_of(model, x), strict=True):
        torch.testing.assert_close(a.y, b.y, rtol=1e-6, atol=1e-6)


def test_network_that_draws_numbers_is_refused_in_parts():
    x, model = torch.randn(9, 6), Mixing(lambda x: x + torch.rand_like(x))
    with pytest.raises(Undefined, match="random"):
        looks_of(model, x, memory=1)


def test_sufficient_memory_does_not_change_random_draws():
    x, model = torch.randn(9, 6), Mixing(lambda x: x + torch.rand_like(x))
    found = []
    for limit in (None, 10**9):
        torch.manual_seed(0)
        found.append(looks_of(model, x, memory=limit)[1].y)
    assert torch.equal(*found)


def test_size_is_remembered_per_model():
    found, x = {}, torch.randn(64, 6).double()
    large, small = Limited(4), Limited(1000)
    looks_of(large, x, feasible_sizes=found)
    small.sizes.clear()
    looks_of(small, x, feasible_sizes=found)
    assert small.sizes == [64]
    assert max(large.sizes) == 64


def test_automatic_size_does_not_override_given_memory():
    found, x = {}, torch.randn(64, 6).double()
    model = Limited(40)
    looks_of(model, x, feasible_sizes=found)
    model.sizes.clear()
    looks_of(model, x, feasible_sizes=found, memory=8 * bytes_per_sample(model.eval(), x[:2]))
    assert max(model.sizes) == 8


def test_size_is_remembered_per_image_size():
    found = {}
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    memory = 8 * bytes_per_sample(model, torch.randn(2, 1, 20, 20))
    looks_of(model, torch.randn(64, 1, 4, 4), feasible_sizes=found, memory=memory)
    looks_of(model, torch.randn(64, 1, 20, 20), feasible_sizes=found, memory=memory)
    small, large = found[model].values()
    assert small > large == 8


def test_network_squeezing_single_samples_accepts_memory():
    class Squeezing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)

        def forward(self, x):
            x = torch.relu(self.conv(x)).mean((2, 3), keepdim=True).squeeze()
            return torch.log_softmax(self.linear(x), 1)

    assert len(looks_of(Squeezing(), torch.randn(8, 3, 5, 5), memory=10**6)) == 1


@pytest.mark.parametrize("mixes", [False, True])
def test_large_cpu_batch_is_split_unless_samples_mix(monkeypatch, mixes):
    class Network(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return torch.relu(x - x.mean(0) if mixes else x)

    batch, sizes = torch.randn(90, 40).double(), []
    whole = looks_of(Network(), batch)
    assert max(sizes) == 90
    monkeypatch.setattr(memory, "MIN_LIMITED", 0)
    monkeypatch.setattr(memory, "CPU_BATCH_BYTES", 20 * bytes_per_sample(Network(), batch[:2]))
    sizes.clear()
    in_parts = looks_of(Network(), batch, feasible_sizes={})
    assert max(sizes) == (90 if mixes else 19)
    torch.testing.assert_close([o.y for o in in_parts], [o.y for o in whole], rtol=0, atol=0)
