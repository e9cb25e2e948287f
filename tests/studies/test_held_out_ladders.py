"""The held-out ladders follow their rule, and recommendations are judged on them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nlbench.studies.framework import Context
from nlbench.studies.held_out_ladders import RECOMMENDED, HeldOutLadders, _verdicts
from nlbench.studies.networks.held_out import DEGREES, FIRST, NAMES, SECOND, draw
from nlbench.studies.networks.planted import Ladders
from nlbench.studies.shared.ladders import HELD_OUT
from nlbench.studies.shared.orders import Order


def network(name, amount):
    torch.manual_seed(0)
    return Ladders().load(f"{name}-{amount:g}")(input_shape=(8,)).double()


def affine_residual(model):
    torch.manual_seed(1)
    x = torch.randn(20_000, 8, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).numpy()
    inputs = np.column_stack([x.numpy(), np.ones(len(x))])
    rest = y - inputs @ np.linalg.lstsq(inputs, y, rcond=None)[0]
    return rest.var(0).sum() / y.var(0).sum()


@pytest.mark.parametrize("name", NAMES)
def test_ladders_rise_from_an_affine_network(name):
    residuals = [affine_residual(network(name, amount)) for amount in (0, 0.5, 1)]
    assert residuals[0] == pytest.approx(0, abs=1e-12)
    assert residuals[0] < residuals[1] < residuals[2]


@pytest.mark.parametrize("amount", [0.25, 0.5, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if draw(name).form == "function"])
def test_amount_of_a_function_is_its_affine_residual(name, amount):
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    values = network(name, amount)[0](torch.as_tensor(nodes)).numpy()
    assert weights @ values == pytest.approx(0, abs=1e-9)
    assert weights @ values**2 == pytest.approx(1)
    assert 1 - (weights @ (nodes * values)) ** 2 == pytest.approx(amount)


def test_rule_is_fixed():
    assert len(set(map(draw, NAMES))) == len(NAMES) == 23
    questions = [HELD_OUT[name].question for name in SECOND]
    assert {questions.count(question) for question in RECOMMENDED} == {6}
    # As on docs/benchmark.md: another draw would be other ladders.
    assert [draw(name).text for name in FIRST] == [
        "√(1 - t) x + √t (+0.48 h2 -0.78 h3 +0.16 h4 +0.38 h5) of each input",
        "blocks x + t F(x), tanh, 2 × 24 units",
        "blocks x + t F(x), tanh, 2 × 64 units",
        "blocks x + t F(x), silu, 3 × 64 units",
        "√(1 - t) x + √t (+0.51 h2 -0.35 h3 +0.78 h4 -0.07 h5) of each input",
    ]
    for name in NAMES:
        coefficients = draw(name).coefficients
        assert len(coefficients) == len(DEGREES)
        assert np.square(coefficients).sum() == pytest.approx(1)


def orders(**words):
    order = {"sees": Order(0.9, p_rises=0.01), "falls": Order(-0.9, p_falls=0.01), "": Order(0.1)}
    return {
        (measure, ladder): order[words.get(ladder, "sees")]
        for measures in RECOMMENDED.values()
        for measure in measures
        for ladder in HELD_OUT
    }


def test_recommendations_are_judged_on_their_own_ladders():
    function = [name for name in SECOND if HELD_OUT[name].question == "function"]
    verdicts = _verdicts(orders(**{function[0]: "falls", "heldout1": "falls"}))
    of_function = [v for v in verdicts if v.claim.endswith("function")]
    assert {v.word for v in of_function} == {"can't tell"}
    assert {v.ours for v in of_function} == {f"5 of 6 ladders; {function[0]}: inverts"}
    others = [v for v in verdicts if not v.claim.endswith("function")]
    assert {(v.word, v.ours) for v in others} == {("yes", "6 of 6 ladders")}


@pytest.mark.parametrize(("word", "agrees"), [("sees", True), ("falls", False), ("", False)])
def test_six_ladders_decide(word, agrees):
    order = orders(heldout1=word)["nlc", "heldout1"]
    (verdict,) = _verdicts({("nlc", name): order for name in SECOND})
    assert verdict.agrees is agrees


def test_undirected_measures_are_not_recommended():
    undirected = replace(Order(0.9, p_rises=0.01), has_direction=False)
    (verdict,) = _verdicts({("nlc", name): undirected for name in SECOND})
    assert verdict.agrees is False


def test_quick_version_has_a_ladder_of_each_question(tmp_path, monkeypatch):
    monkeypatch.setattr(Context, "run", lambda self, request, part: request)
    runs = HeldOutLadders().measure(Context(tmp_path, "held-out-ladders", quick=True))
    assert {HELD_OUT[name].question for name in runs} == set(RECOMMENDED)
