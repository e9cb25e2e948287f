"""The pass of the probe `function`: which samples it shows, and in what memory."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nlbench
from nlbench.measures.nlc import NonlinearityCoefficient
from nlbench.probes import ProbePass, Resources
from nlbench.probes.function import FUNCTION
from nlbench.subjects.data import Dataset
from nlbench.subjects.samples import Batches, DrawnBatches
from nlbench.subjects.subject import Subject

CPU = torch.device("cpu")


class Keeping:
    """A listener that keeps what it is shown."""

    def __init__(self):
        self.observations = []

    def update(self, observation):
        self.observations.append(observation)

    @property
    def inputs(self):
        return torch.cat([observation.inputs for observation in self.observations])


def network():
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(12, 30), nn.ReLU(inplace=True), nn.Linear(30, 3)
    return nn.Sequential(*layers).eval()


def dataset(count):
    images = torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    items = TensorDataset(images, torch.zeros(count, dtype=torch.int64))
    return Dataset("noise", items, items, (3, 2, 2), 3, (), (), "none")


def subject(inputs, stream=None):
    return Subject(network(), inputs, None, {}, stream=stream)


def shown(subject, listener, memory=None, batch=128):
    steps = []
    resources = Resources(CPU, memory)
    options = {"batch": batch}
    facts = FUNCTION.observe(
        ProbePass(subject.model, subject, options, [listener], resources, lambda: steps.append(1))
    )
    return facts, steps, resources


def sorted_rows(inputs):
    return sorted(inputs.flatten(1).tolist())


def test_each_sample_is_observed_once_in_even_batches():
    inputs, keeping = torch.randn(130, 3, 2, 2), Keeping()
    facts, steps, _ = shown(subject(inputs), keeping)
    assert [len(observation.inputs) for observation in keeping.observations] == [65, 65]
    assert sorted_rows(keeping.inputs) == sorted_rows(inputs)
    assert facts["samples"] == 130
    assert len(steps) == 2


def test_samples_that_come_in_order_are_mixed():
    inputs = torch.arange(200.0)[:, None].expand(200, 12)
    keeping = Keeping()
    shown(subject(inputs), keeping, batch=50)
    assert all(observation.inputs.std() > 30 for observation in keeping.observations)


def test_large_sample_is_observed_whole():
    data, keeping = dataset(300), Keeping()
    stream = DrawnBatches(data, None, "test", 0, network())
    every = data.sample(None, split="test", seed=0).inputs
    facts, _, _ = shown(subject(every[:10], stream), keeping)
    assert facts["samples"] == 300
    assert torch.equal(keeping.inputs, every)
    again = Keeping()
    shown(subject(every[:10], stream), again)
    assert torch.equal(again.inputs, every)


def test_first_samples_of_a_loader_are_shown():
    first, keeping = torch.randn(20, 3, 2, 2), Keeping()
    facts, _, _ = shown(subject(first, Batches([first, torch.randn(7, 3, 2, 2)])), keeping)
    assert facts["samples"] == 20
    assert sorted_rows(keeping.inputs) == sorted_rows(first)


@pytest.mark.parametrize("memory", [1, 50_000])
def test_memory_limits_the_batch_and_changes_no_number(memory):
    def coefficient(memory):
        measure, given = NonlinearityCoefficient(), subject(torch.randn(90, 3, 2, 2))
        sizes = []
        given.model[1].register_forward_hook(lambda *call: sizes.append(len(call[2])))
        measure.reset()
        _, _, resources = shown(given, measure, memory)
        found = [size for sizes in resources.feasible_sizes.values() for size in sizes.values()]
        return measure.compute().summary["value"], max(sizes), found

    torch.manual_seed(3)
    plain, most, _ = coefficient(None)
    assert most == 90
    torch.manual_seed(3)
    bounded, most, found = coefficient(memory)
    assert bounded == pytest.approx(plain, rel=1e-6)
    assert most <= found[0] < 90


class Noisy(nn.Module):
    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x.tanh() + 0.1 * torch.randn(x.shape, generator=self.generator)


class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.tanh() * self.calls


class EarlyExit(nn.Module):
    """Leaves early if all samples of a batch, or any of them, are large."""

    def __init__(self, decision):
        super().__init__()
        self.decision = decision

    def forward(self, x):
        return x if self.decision(x[:, 0] > 0.8) else x.square()


FUNCTION_MEASURES = ["nlc", "geometric-complexity", "affine-residual"]


@pytest.mark.parametrize("measure", FUNCTION_MEASURES)
@pytest.mark.parametrize("model", [Noisy(), Noisy(torch.Generator()), Counting()])
def test_nondeterministic_network_is_undefined(model, measure):
    cell = nlbench.evaluate(model, torch.randn(40, 3), measure)[measure]
    assert cell.status == "undefined"
    assert "changes from call to call" in cell.reason


@pytest.mark.parametrize("measure", FUNCTION_MEASURES)
@pytest.mark.parametrize("decision", [torch.all, torch.any])
@pytest.mark.parametrize("place", [3, 70])
def test_a_decision_for_the_whole_batch_is_undefined(decision, place, measure):
    # Most samples are small: most batches are computed as their samples are.
    torch.manual_seed(place)
    inputs = torch.rand(100, 3)
    cell = nlbench.evaluate(EarlyExit(decision), inputs, measure)[measure]
    assert cell.status == "undefined"
    assert "depend on the other samples" in cell.reason


def test_a_decision_for_each_sample_is_measured():
    class Gated(nn.Module):
        def forward(self, x):
            return torch.where(x[:, :1] > 0.8, x, x.square())

    assert nlbench.evaluate(Gated(), torch.rand(100, 3), "nlc")["nlc"].status == "ok"
