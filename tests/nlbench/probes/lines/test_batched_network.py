import pytest
import torch
from torch import nn

from nlbench.errors import NotFinite, Undefined
from nlbench.introspection.memory import bytes_per_sample
from nlbench.probes.lines.quadrature import BatchedNetwork, integrate_along

from segments import Functional


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return x.square()


def test_the_outputs_are_those_of_each_input():
    x = torch.randn(150, 3, 2)
    batches = BatchedNetwork.of(nn.Tanh(), x[:2])
    assert torch.equal(batches(x), x.tanh().reshape(150, 6))


def test_a_small_memory_makes_small_batches():
    net = Watched()
    example = torch.randn(2, 1000, dtype=torch.float64)
    # Half of so little memory is overhead, and the batch size is a power of two.
    batches = BatchedNetwork.of(net, example, memory=2 * 5 * bytes_per_sample(net, example[:1]))
    net.sizes.clear()
    batches(torch.randn(10, 1000, dtype=torch.float64))
    assert net.sizes == [4, 4, 2]


def test_mixing_networks_run_one_sample_at_a_time():
    class Mixing(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    batches = BatchedNetwork.of(Mixing(), torch.randn(2, 3))
    assert batches.size == 1
    assert batches(torch.randn(4, 3)).tolist() == torch.zeros(4, 3).tolist()


@pytest.mark.parametrize("decision", [torch.all, torch.any])
def test_decisions_for_a_batch_change_no_deviation(decision):
    class EarlyExit(nn.Module):
        def forward(self, x):
            return x.sin() if decision((x > 0.3) & (x < 0.8)) else x.sin() + x.square().sin()

    class Sample(EarlyExit):
        def forward(self, x):
            return torch.cat([super(Sample, self).forward(one) for one in x.split(1)])

    starts, ends = torch.tensor([[-2.0], [-0.5]]), torch.tensor([[-1.0], [2.0]])
    results = [
        [float(s.above + s.below) for s in integrate_along(net, starts, ends, evaluations=600)]
        for net in (EarlyExit(), Sample())
    ]
    assert results[0] == pytest.approx(results[1])


@pytest.mark.parametrize("function", [lambda x: x + x.roll(2, 0), lambda x: x.reshape(1, 3)])
def test_mixing_and_single_samples_run_one_by_one(function):
    assert BatchedNetwork.of(Functional(function), torch.randn(2, 3)).size == 1


def test_writes_into_input_do_not_change_outputs():
    x = torch.randn(2, 3)
    before = x.clone()
    BatchedNetwork.of(nn.ReLU(inplace=True), x)(x)
    assert torch.equal(x, before)


def test_non_finite_output_raises():
    with pytest.raises(NotFinite):
        BatchedNetwork(Watched(), 4)(torch.tensor([[float("inf")]]))


def test_random_network_raises():
    class Dropping(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, training=True)

    with pytest.raises(Undefined):
        BatchedNetwork.of(Dropping(), torch.randn(2, 300))


class Cramped(nn.Module):
    """Runs out of memory with more than `max_inputs` inputs."""

    def __init__(self, max_inputs):
        super().__init__()
        self.max_inputs, self.sizes = max_inputs, []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.max_inputs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.square()


@pytest.mark.parametrize("max_inputs", [1, 3])
def test_out_of_memory_halves_batches(max_inputs):
    network, x = Cramped(max_inputs), torch.randn(20, 3)
    batches = BatchedNetwork.of(network, x[:2])
    assert torch.equal(batches(x), x.square())
    network.sizes.clear()
    batches(x)
    assert max(network.sizes) <= max_inputs


def test_a_network_that_never_fits_is_refused():
    with pytest.raises(torch.OutOfMemoryError):
        BatchedNetwork(Cramped(0), 4)(torch.randn(4, 3))
