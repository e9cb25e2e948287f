"""Which classifiers are measured, and what is made of random weights."""

import dataclasses

import pytest
from made_signatures import made_signatures

import nlbench
from nlbench.models.networks.torchvision import NAMES
from nlbench.reports.studies import classifiers
from nlbench.reports.studies.study import Context, Verdict


def test_all_36_networks_of_the_paper_are_torchvision_s():
    assert len(classifiers.CLASSIFIERS) == 36
    assert {classifiers.short_name(name) for name in classifiers.CLASSIFIERS} <= set(NAMES)
    years = [one.year for one in classifiers.CLASSIFIERS.values()]
    assert years == sorted(years)


def test_what_is_claimed_of_trained_networks_is_left_open_for_random_ones():
    claim = Verdict("ViTs are the most nonlinear", "yes", "0.9", False, "looked twice")
    random = made_signatures({("torchvision/alexnet", "init", "synthetic", 0): [0.5]})
    trained = made_signatures({("torchvision/alexnet", "trained", "imagenet", 0): [0.5]})
    assert classifiers.judged(trained, [claim]) == [claim]
    (left,) = classifiers.judged(random, [claim])
    assert left.agrees is None
    assert left.remark == "random weights, which would say: no; looked twice"
    assert classifiers.remarks_on(random)[0].startswith("Random weights")
    assert not classifiers.remarks_on(trained)[0].startswith("Random weights")


def test_networks_without_a_value_are_named():
    run = made_signatures(
        {
            ("torchvision/alexnet", "init", "cifar10", 0): [],
            ("torchvision/vgg11", "init", "cifar10", 0): [0.5],
        }
    )
    failed = dataclasses.replace(run.records[0].result, status="failed", reason="too small")
    nothing = dataclasses.replace(run.records[0].probe, facts={})
    run.records[0] = dataclasses.replace(run.records[0], result=failed, probe=nothing)
    said = classifiers.remarks_on(run)
    assert said[1].startswith("1 of the 36 networks, on cifar10, ")
    assert said[2] == "No value of alexnet (too small)."


@pytest.mark.parametrize(
    ("chosen", "there", "taken"),
    [
        ("", [], "init"),
        ("", ["torchvision/alexnet"], "trained"),
        ("init", ["torchvision/alexnet"], "init"),
    ],
)
def test_trained_weights_are_taken_where_they_are(tmp_path, monkeypatch, chosen, there, taken):
    asked = []
    monkeypatch.setattr(classifiers, "_at_hand", lambda names: tuple(there))
    monkeypatch.setattr(Context, "run", lambda self, request, part: asked.append((request, part)))
    context = Context(tmp_path, "history", quick=True, weights=chosen)
    classifiers.measured_classifiers(context, ("affinity",))
    ((request, part),) = asked
    assert part == taken
    assert request.weights == (taken,)
    assert request.models == tuple(there) or taken == "init"


def test_without_weights_one_line_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    context = Context(tmp_path, "history", quick=True, weights="trained")
    with pytest.raises(nlbench.RequestError, match="say --weights init to measure them as drawn"):
        classifiers.measured_classifiers(context, ("affinity",))
    context = Context(tmp_path, "history", weights="trainde")
    with pytest.raises(nlbench.RequestError, match="did you mean 'trained'"):
        classifiers.measured_classifiers(context, ("affinity",))
