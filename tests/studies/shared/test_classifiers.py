"""The choice of classifiers and weights, and verdicts for random weights."""

import dataclasses

import numpy as np
import pytest
import torch
from made_signatures import make_signatures
from PIL import Image
from torchvision import models

import nlbench
from nlbench import registry
from nlbench.models.networks.libraries import NAMES
from nlbench.serialization.hashing import state_hash
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.studies.framework import Context, Verdict
from nlbench.studies.shared import classifiers


def test_all_36_networks_are_in_torchvision():
    assert len(classifiers.CLASSIFIERS) == 36
    assert {classifiers.short_name(name) for name in classifiers.CLASSIFIERS} <= set(NAMES)
    years = [one.year for one in classifiers.CLASSIFIERS.values()]
    assert years == sorted(years)


def test_random_weights_leave_claims_undecided():
    claim = Verdict("ViTs are the most nonlinear", "yes", "0.9", False, "looked twice")
    random = make_signatures({("torchvision/alexnet", "init", "synthetic", 0): [0.5]})
    trained = make_signatures({("torchvision/alexnet", "trained", "imagenet", 0): [0.5]})
    assert classifiers.undecided_if_untrained(trained, [claim]) == [claim]
    (left,) = classifiers.undecided_if_untrained(random, [claim])
    assert left.agrees is None
    assert left.remark == "random weights, which would give: no; looked twice"
    assert classifiers.classifier_remarks(random)[0].startswith("Random weights")
    assert not classifiers.classifier_remarks(trained)[0].startswith("Random weights")


def test_networks_without_a_value_are_named():
    run = make_signatures(
        {
            ("torchvision/alexnet", "init", "cifar10", 0): [],
            ("torchvision/vgg11", "init", "cifar10", 0): [0.5],
        }
    )
    failed = dataclasses.replace(run.records[0].result, status="failed", reason="too small")
    nothing = dataclasses.replace(run.records[0].probe, facts={})
    run.records[0] = dataclasses.replace(run.records[0], result=failed, probe=nothing)
    said = classifiers.classifier_remarks(run)
    assert said[1].startswith("1 of the 36 networks, on cifar10, ")
    assert said[2] == "No value for alexnet (too small)."


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Where published weights and ImageNet are looked for; there is nothing yet."""
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    (tmp_path / "data" / "weights").mkdir(parents=True)
    return tmp_path / "data"


def asked(folder, **changes):
    context = Context(folder, "history", quick=True, **changes)
    return classifiers.measure_classifiers(context, ("affinity",))


def test_available_weights_are_measured_on_imagenet(tmp_path, monkeypatch, library):
    weights = models.MNASNet0_5_Weights.DEFAULT
    network = models.mnasnet0_5(weights=None)
    torch.save(network.state_dict(), library / "weights" / weights.url.rpartition("/")[2])
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = library / "imagenet" / "val" / f"n{number:08d}"
        folder.mkdir(parents=True)
        Image.fromarray(image).save(folder / "0.png")
    run, few = Context.run, {"sites.batch": 4, "sites.reduction": "published"}
    monkeypatch.setattr(
        Context,
        "run",
        lambda self, request, part: run(
            self, dataclasses.replace(request, samples=4, settings=few), part
        ),
    )
    (record,) = asked(tmp_path, weights="trained").records
    assert (record.subject.model, record.subject.weights) == ("torchvision/mnasnet0_5", "trained")
    assert str(weights) in record.subject.preprocessing
    found = Run(Manifest().describe_records([record]), [record])
    said = " ".join(registry.load("studies", "history")().analyse({"run": found}).remarks)
    assert record.subject.weights_hash == state_hash(network)
    assert f"mnasnet0_5 {state_hash(network)[:8]}" in said
    # Without being asked for they are taken too, and there is nothing left to measure.
    assert asked(tmp_path).records == [record]
    monkeypatch.setattr(Context, "run", lambda self, request, part: (request.weights, part))
    assert asked(tmp_path, weights="init") == (("init",), "init")


def test_missing_weights_or_images_raise_in_one_line(tmp_path, library, monkeypatch):
    file = library / "weights" / models.GoogLeNet_Weights.DEFAULT.url.rpartition("/")[2]
    with pytest.raises(nlbench.RequestError, match=str(file)) as caught:
        asked(tmp_path, weights="trained")
    assert "\n" not in str(caught.value)
    with pytest.raises(nlbench.RequestError, match="digits"):
        asked(tmp_path, weights="trained", data="digits")
    file.touch()
    with pytest.raises(nlbench.RequestError, match="imagenet"):
        asked(tmp_path, weights="trained")
    monkeypatch.setattr(Context, "run", lambda self, request, part: request)
    assert asked(tmp_path).weights == ("init",)
    with pytest.raises(nlbench.RequestError, match="'trained'"):
        asked(tmp_path, weights="trainde")
