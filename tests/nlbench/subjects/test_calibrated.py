"""Fresh weights: whether batch norm's statistics are as drawn or those of the samples."""

import pytest
import torch
from torch import nn

from nlbench.errors import RequestError
from nlbench.subjects.load import calibrate, load_subject
from nlbench.subjects.spec import SubjectSpec

CPU = torch.device("cpu")


def subject(weights, model="resnet20", samples=200):
    return load_subject(SubjectSpec(model, weights, "digits", samples=samples), CPU)


def test_statistics_are_drawn_unless_calibrated():
    drawn = subject("init")
    assert drawn.model.bn.running_mean.eq(0).all()
    assert drawn.facts.batch_norm == "statistics as drawn: mean 0, variance 1"
    calibrated = subject("calibrated")
    assert calibrated.facts.weights == "calibrated"
    assert "calibrated on the 200 samples" in calibrated.facts.batch_norm
    assert torch.equal(drawn.model.stem.weight, calibrated.model.stem.weight)
    assert drawn.facts.weights_hash != calibrated.facts.weights_hash
    assert not any(module.training for module in calibrated.model.modules())


def test_the_statistics_are_those_of_the_samples():
    found = subject("calibrated")
    parts = found.inputs.split(100)  # Two batches of equal size.
    with torch.no_grad():
        maps = [found.model.stem(part) for part in parts]
    mean = torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0)
    variance = torch.stack([m.var((0, 2, 3)) for m in maps]).mean(0)
    torch.testing.assert_close(found.model.bn.running_mean, mean)
    torch.testing.assert_close(found.model.bn.running_var, variance)


def test_calibration_keeps_outputs_of_order_one():
    drawn, calibrated = (subject(weights, "resnet56") for weights in ("init", "calibrated"))
    with torch.no_grad():
        assert drawn.model(drawn.inputs).std() > 100
        assert 0.01 < calibrated.model(calibrated.inputs).std() < 100


def test_networks_without_batch_norm_have_no_choice():
    assert subject("calibrated", "vgg8").facts.batch_norm is None
    assert torch.equal(
        subject("calibrated", "vgg8").model.features[0].weight,
        subject("init", "vgg8").model.features[0].weight,
    )


def test_dropout_and_momentum_are_left_as_they_were():
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(2, momentum=0.3)).eval()
    calibrate(model, [torch.ones(4, 2)])
    assert model[1].running_mean.tolist() == [1.0, 1.0]
    assert model[1].momentum == 0.3
    assert not model[1].training


def test_too_few_samples_raise_in_one_line():
    model = nn.BatchNorm1d(2).eval()
    with pytest.raises(RequestError):
        calibrate(model, [torch.ones(1, 2)])
    assert not model.training
