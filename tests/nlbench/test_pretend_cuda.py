"""What a GPU would refuse, and how often it would be waited for, seen without one."""

import copy

import pytest
import torch
from torch import nn

import nlbench
from nlbench.pretend_cuda import PretendCuda
from nlbench.probes.lines import trace_segment

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
def test_every_measure_gives_what_it_gives_on_the_cpu(build):
    torch.manual_seed(0)
    model, inputs = build().eval(), torch.rand(160, 3, 8, 8)
    here = nlbench.evaluate(model, inputs, MEASURES, settings=FEW_LINES)
    with PretendCuda():
        there = nlbench.evaluate(
            copy.deepcopy(model).to("cuda"), inputs.to("cuda"), MEASURES, settings=FEW_LINES
        )
    assert {record.machine["device"] for record in there.records} == {"cuda:0"}
    for record in here.records:
        name, found = record.measure["name"], there[record.measure["name"]]
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
