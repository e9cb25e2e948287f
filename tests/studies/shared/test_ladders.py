"""Ladders: distinct rungs and their weights."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from nlbench import registry
from nlbench.studies.framework import Context
from nlbench.studies.framework.trends import SIGNIFICANCE, trend_test
from nlbench.studies.measures import build_requests
from nlbench.studies.shared.ladders import LADDERS, QUESTIONS, Rung, request_weights
from nlbench.subjects.facts import SubjectFacts


def test_rungs_are_distinct_and_ordered():
    for ladder in LADDERS.values():
        for number, rung in enumerate(ladder.rungs):
            name = f"{rung.model.replace('/', '-')}-{ladder.data}-{rung.weights}-seed3"
            shipped = rung.weights == "init"
            label = rung.weights if shipped else f"{name}.safetensors"
            subject = SubjectFacts(model=rung.model, weights=label, data="digits", seed=0)
            assert ladder.find_rung(subject) == number
    with pytest.raises(ValueError, match="vgg8"):
        LADDERS["slope"].find_rung(SubjectFacts(model="vgg8", weights="init", data="", seed=0))
    assert [rung.label for rung in LADDERS["slope"].rungs][::4] == ["1", "0"]
    for ladder in LADDERS.values():
        assert len(ladder.seeds) >= 5
        assert (ladder.question in QUESTIONS) == (ladder.kind == "planted")


AFFINE = [ladder for ladder in LADDERS.values() if ladder.is_affine and not ladder.is_trained]


@pytest.mark.parametrize("ladder", AFFINE, ids=lambda ladder: ladder.name)
def test_affine_rungs_are_affine_beyond_the_samples(ladder):
    shape = int(ladder.settings[f"{ladder.data.partition('/')[0]}.shape"])
    network = registry.load("models", ladder.rungs[0].model)(input_shape=(shape,))
    x, y = 3 * torch.randn(2, 32, shape)
    mean = (network(x) + network(y)) / 2
    torch.testing.assert_close(network((x + y) / 2), mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "degree"), [("residual", 2), ("residual", 3), ("attention", 2)])
def test_polynomials_explain_less_on_each_rung(name, degree):
    """The order doesn't rest on the affine residual alone."""
    ladder = LADDERS[name]
    shape = int(ladder.settings["normal.shape"])
    x = torch.randn(3000, shape, generator=torch.Generator().manual_seed(0)).double()
    terms = [torch.ones(len(x)).double()]
    for size in range(1, degree + 1):
        for indices in itertools.combinations_with_replacement(range(shape), size):
            terms.append(x[:, indices].prod(1))
    basis = torch.linalg.qr(torch.stack(terms, 1)).Q
    for seed in ladder.seeds:
        fractions = []
        for rung in ladder.rungs:
            torch.manual_seed(seed)
            network = registry.load("models", rung.model)(input_shape=(shape,)).double().eval()
            with torch.no_grad():
                y = network(x)
            left = y - basis @ (basis.T @ y)
            fractions.append((left.square().sum() / (y - y.mean(0)).square().sum()).item())
        assert fractions[0] < 1e-9
        assert (np.diff(fractions) > 1e-4).all()


def test_full_order_can_be_significant():
    for kind in ("planted", "published"):
        ladders = [ladder for ladder in LADDERS.values() if ladder.kind == kind]
        for ladder in ladders:
            least = trend_test([range(len(ladder.rungs))] * len(ladder.seeds)).p_rises
            assert 2 * least * len(ladders) < SIGNIFICANCE


def test_seeds_have_their_own_samples():
    ladder = LADDERS["tents"]
    assert LADDERS["relu"].settings["normal.count"] == ladder.settings["interval.count"]
    options = {name.partition(".")[2]: value for name, value in ladder.settings.items()}
    points = registry.load("datasets", ladder.data)(**options)
    first, second = (set(points.sample(512, seed=seed).inputs[:, 0].tolist()) for seed in (0, 1))
    assert len(first & second) < 0.02 * 512


def test_weights_of_a_rung_have_names(tmp_path, monkeypatch):
    asked = []

    def trained(self, model, data, recipe="auto", seed=0, **changes):
        asked.append((model, data, recipe, seed, changes))
        return tmp_path / changes["name"]

    monkeypatch.setattr(Context, "request_training", trained)
    context = Context(tmp_path, "measures")
    assert request_weights(context, Rung("", "vgg8"), 0) == "init"
    found = request_weights(context, Rung("", "ladders/cnn", "omega0.01"), 2)
    assert found == str(tmp_path / "omega0.01")
    plain, omega = asked
    assert plain[2:4] == ("adam", 2)
    assert (omega[2], omega[4]["omega"]) == ("post-training", 0.01)
    assert omega[4]["weights"] == str(tmp_path / "plain")
    request_weights(context, Rung("", "", "noise0.3"), 0)
    assert asked[-1][4]["label_noise"] == 0.3
    request_weights(context, Rung("", "", "sine2"), 0)
    assert asked[-1][1] == "curves"
    assert asked[-1][4]["options"] == {"k": 2}


@pytest.mark.parametrize("name", LADDERS)
def test_each_network_is_measured_once(name, tmp_path):
    ladder, seeds = LADDERS[name], set()
    rungs = []
    for fields in build_requests(Context(tmp_path, "measures"), ladder):
        for model, weights, seed in itertools.product(
            *map(fields.get, ("models", "weights", "seeds"))
        ):
            subject = SubjectFacts(
                model=model, weights=Path(weights).name, data=ladder.data, seed=seed
            )
            rungs.append((ladder.find_rung(subject), seed))
            seeds.add(seed)
    assert sorted(rungs) == sorted(itertools.product(range(len(ladder.rungs)), seeds))
    assert seeds == set(ladder.seeds)
