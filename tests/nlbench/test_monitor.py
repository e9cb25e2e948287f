"""Measurements during a training equal those of its checkpoints and don't disturb it."""

import copy

import pytest
import torch
from torch import nn

import nlbench
from nlbench import monitor as module
from nlbench.weight_linearity import weight_linearity


def training(monitor_of=lambda model: None, steps=6):
    """Train a small network; return its final weights, checkpoints and monitor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch, checkpoints = monitor_of(model), {}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(32, 4)).square().mean().backward()
        optimizer.step()
        checkpoints[f"step {step}"] = copy.deepcopy(model)
        if watch is not None:
            watch.step()
            assert model.training
    return model.state_dict(), checkpoints, watch


def inputs():
    return torch.randn(64, 4, generator=torch.Generator().manual_seed(7))


def test_the_training_takes_the_same_course():
    plain, _, _ = training()
    options = {"every": 1, "weight_linearity": "previous"}
    watched, _, _ = training(lambda m: nlbench.Monitor(m, inputs(), ["r2", "nlc"], **options))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_values_equal_those_of_the_checkpoints():
    _, checkpoints, watch = training(
        lambda m: nlbench.Monitor(m, inputs(), ["r2", "affinity", "nlc"], every=2)
    )
    chosen = {name: checkpoints[name] for name in ("step 2", "step 4", "step 6")}
    afterwards = nlbench.evaluate(chosen, inputs(), ["r2", "affinity", "nlc"])
    columns = ["weights", "measure", "place", "statistic", "value"]
    assert watch.run.scores[columns].equals(afterwards.scores[columns])


def test_default_interval_bounds_the_overhead(monkeypatch):
    clock = [0.0]

    def evaluate(*arguments, **options):
        clock[0] += 3.0
        return nlbench.evaluate(*arguments, **options)

    monkeypatch.setattr(module, "evaluate", evaluate)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    watch = nlbench.Monitor(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), inputs(), ["norm"])
    measured = 0
    for _ in range(400):
        clock[0] += 1.0
        measured += watch.step() is not None
    assert measured >= 2
    assert 3.0 * (measured - 1) <= 0.05 * clock[0]


def test_a_step_is_measured_on_demand_once():
    watch = nlbench.Monitor(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), inputs(), ["norm"], every=5)
    with pytest.raises(nlbench.RequestError):
        _ = watch.run
    watch.measure()
    watch.measure()
    assert watch.run.scores["weights"].unique().tolist() == ["step 0"]


@pytest.mark.parametrize(("since", "starts"), [("previous", (0, 2, 4)), ("first", (0, 0, 0))])
def test_weights_are_compared_with_earlier_ones(since, starts):
    torch.manual_seed(0)
    initial = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    _, checkpoints, watch = training(
        lambda m: nlbench.Monitor(m, inputs(), ["norm"], every=2, weight_linearity=since)
    )
    checkpoints["step 0"] = initial
    frame = watch.weight_linearity()
    assert frame["end"].tolist() == ["step 2", "step 4", "step 6"]
    assert frame["start"].tolist() == [f"step {start}" for start in starts]
    for row in frame.itertuples():
        expected = weight_linearity(checkpoints[row.start], checkpoints[row.end], inputs())
        assert row.value == pytest.approx(expected.value)
        assert row.kernel_distance == pytest.approx(expected.kernel_distance, abs=1e-9)


def test_weights_are_compared_only_on_request():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(nlbench.RequestError):
        nlbench.Monitor(model, inputs(), ["norm"]).weight_linearity()
    watch = nlbench.Monitor(model, inputs(), ["norm"], weight_linearity="first")
    watch.measure()
    with pytest.raises(nlbench.RequestError):
        watch.weight_linearity()
