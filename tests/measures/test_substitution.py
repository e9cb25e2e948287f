"""Costs of substitution, by closed forms and by networks changed by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.evaluation import SEED
from nlbench.measures.substitution import divergence, loss_change
from nlbench.probes.replacement import replacement_observation as observation
from nlbench.subjects.samples import sample_order

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def places(model, inputs, labels=None, **settings):
    """Measure samples in this order, and return the statistics by place."""
    inputs = before_drawing(inputs)
    labels = labels if labels is None else before_drawing(labels)
    run = nlbench.evaluate(model, inputs, ["substitution"], labels=labels, settings=settings)
    result = run["substitution"]
    assert result.status == "ok", result.reason
    return {value.place: value.numbers for value in result.values}


def test_loss_change_is_that_of_cross_entropy():
    before, after = draw(9, 4), draw(9, 4)
    labels = torch.arange(9) % 4
    change, positions = loss_change(before, after, labels)
    expected = F.cross_entropy(after, labels, reduction="none")
    expected -= F.cross_entropy(before, labels, reduction="none")
    torch.testing.assert_close(change.float(), expected)
    assert positions.tolist() == [1.0] * 9


def test_ignored_labels_do_not_count():
    before, after = draw(2, 3, 4), draw(2, 3, 4)
    labels = torch.tensor([[0, -100, 1], [2, 3, -100]])
    change, positions = loss_change(before, after, labels)
    kl, kl_positions = divergence(before, after, labels)
    before[0, 1], after[1, 2] = 7 * draw(4), 7 * draw(4)
    assert positions.tolist() == kl_positions.tolist() == [2.0, 2.0]
    torch.testing.assert_close(change, loss_change(before, after, labels)[0])
    torch.testing.assert_close(kl, divergence(before, after, labels)[0])


def test_divergence_is_that_of_pytorch():
    before, after = draw(9, 4), draw(9, 4)
    expected = F.kl_div(
        after.log_softmax(1), before.log_softmax(1), reduction="none", log_target=True
    ).sum(1)
    torch.testing.assert_close(divergence(before, after)[0].float(), expected)
    assert divergence(before, before + 3)[0].abs().max() < 1e-6


def test_wide_outputs_equal_pytorch():
    before, after = draw(2, 3, 70_000), draw(2, 3, 70_000)
    labels = torch.tensor([[0, -100, 1], [2, 3, 69_999]])
    expected = F.cross_entropy(after.mT, labels, reduction="none")
    expected = (expected - F.cross_entropy(before.mT, labels, reduction="none")).sum(1)
    torch.testing.assert_close(loss_change(before, after, labels)[0].float(), expected)
    expected = F.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(divergence(before, after)[0].float(), expected.sum(1))


def test_impossible_class_does_not_change_the_loss():
    before = torch.tensor([[0.0, -math.inf]])
    assert divergence(before, torch.zeros(1, 2))[0].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("labels", [None, torch.arange(60) % 3])
def test_affine_activation_has_no_cost(labels):
    model = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(1.0), nn.Linear(6, 3)).double()
    statistics = places(model, draw(60, 4).double(), labels)["1"]
    assert statistics["value"] == pytest.approx(0, abs=1e-14)
    assert statistics["identity"] == pytest.approx(0, abs=1e-14)
    assert statistics["affine"] == pytest.approx(0, abs=1e-12)


def test_relu_that_never_clips_has_no_cost():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    nn.init.constant_(model[0].bias, 50.0)
    statistics = places(model, draw(60, 4))["1"]
    assert statistics["identity"] == 0
    assert statistics["value"] == pytest.approx(0, abs=1e-6)


def test_relu_of_symmetric_input_has_known_squared_cost():
    # The best line of a ReLU on {-1, 1} is (x + 1) / 2, exact there; on {-3, -1, 1, 3} it is
    # x / 2 + 1, with squared errors 1/4, 1/4, 1/4, 1/4, and the ReLU has variance 1.5.
    inputs = torch.tensor([-3.0, -1, 1, 3]).repeat_interleave(2).repeat(5)[:, None]
    # A stream keeps its order, in which both halves have the same samples.
    run = nlbench.evaluate(nn.ReLU(), iter([(inputs, inputs)]), ["substitution"])
    statistics = run["substitution"].values[0].statistics
    assert statistics["value"] == pytest.approx(0.25 / 1.5, rel=1e-6)
    assert statistics["identity"] == pytest.approx(2.5 / 1.5, rel=1e-6)


def test_removing_one_relu_changes_loss_by_known_amount():
    # Logits (relu(x), 0) on x = ±2 with label 0 exactly where x > 0: without the ReLU the
    # logit of the negative samples is -2 instead of 0.
    model = nn.Sequential(nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [0.0]]))
        model[1].bias.zero_()
    inputs = torch.tensor([2.0, 2, -2, -2]).repeat(8)[:, None]
    statistics = places(model, inputs, (inputs[:, 0] < 0).long())["0"]
    before, after = math.log(2), math.log(1 + math.exp(-2))
    # Every other sample is evaluated, in the order in which they are drawn.
    given = before_drawing(inputs)
    evaluated = given[sample_order(given, SEED)][1::2]
    negative = (evaluated < 0).double().mean().item()
    assert statistics["identity"] == pytest.approx((after - before) * negative, rel=1e-5)
    assert statistics["value"] == pytest.approx(0, abs=1e-6)


def test_cost_equals_a_network_with_a_fitted_module():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.SiLU(), nn.Conv2d(5, 4, 3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.LazyLinear(3),
    )  # fmt: skip
    inputs, labels = draw(80, 1, 8, 8), torch.arange(80) % 3
    model(inputs)
    statistics = places(model, inputs, labels)["1"]

    with torch.no_grad():
        x = model[0](inputs[::2]).movedim(1, -1).reshape(-1, 5)
        lines = [np.polyfit(x[:, c], F.silu(x[:, c]), 1) for c in range(5)]
        slope, bias = torch.tensor(np.array(lines)).float().T.reshape(2, 5, 1, 1)
        held_out = model[0](inputs[1::2])
        changed = model[2:](held_out * slope + bias)
        original = model(inputs[1::2])
    losses = [F.cross_entropy(o, labels[1::2], reduction="none") for o in (original, changed)]
    difference = losses[1] - losses[0]
    assert statistics["value"] == pytest.approx(difference.mean().item(), abs=1e-6)
    assert statistics["loss"] == statistics["value"]
    groups = difference.reshape(5, 8).mean(0)  # sample i is in group i mod 8
    assert statistics["error"] == pytest.approx(groups.std().item() / 8**0.5, rel=1e-4)
    correct = [(o.argmax(1) == labels[1::2]).float().mean() for o in (original, changed)]
    assert statistics["accuracy"] == pytest.approx(float(correct[1] - correct[0]), abs=1e-6)


def test_full_map_and_best_map_of_mlp_agree():
    # Least squares commute with linear maps: W₂ of the best map of the activation is the best
    # map from the block's input to its output.
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3)).double()
    inputs, labels = draw(400, 4).double(), torch.arange(400) % 3
    statistics = places(model, inputs, labels)["1"]
    with torch.no_grad():
        design = torch.cat([inputs, torch.ones(400, 1).double()], 1)
        weight = torch.linalg.lstsq(design[::2], model(inputs[::2])).solution
        changed, original = design[1::2] @ weight, model(inputs[1::2])
    change = F.cross_entropy(changed, labels[1::2]) - F.cross_entropy(original, labels[1::2])
    assert statistics["affine"] == pytest.approx(change.item(), abs=1e-9)


def test_value_is_the_cost_of_the_first_map():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    inputs = draw(60, 4)
    usual = places(model, inputs)["1"]
    first = places(model, inputs, **{"replacement.maps": "mean,channel,affine"})["1"]
    assert first["channel"] == usual["value"]
    assert first["affine"] == usual["affine"]
    assert first["value"] > usual["value"]


def test_few_rows_leave_the_full_map_undefined():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    settings = {"replacement.maps": "affine"}
    run = nlbench.evaluate(model, draw(20, 4), ["substitution"], settings=settings)
    assert run["substitution"].status == "undefined"
    # Half of 56 samples have the 4 (6 + 1) rows.
    assert "needs 28 rows" in run["substitution"].reason
    assert "at least 56 samples" in run["substitution"].reason
    run = nlbench.evaluate(model, draw(56, 4), ["substitution"], settings=settings)
    assert run["substitution"].status == "ok"


@pytest.mark.parametrize(("samples", "few"), [(2 * 9 * 15, "15.0 rows"), (2 * 9 * 16, "")])
def test_few_rows_per_coefficient_are_noted(samples, few):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
    )
    settings = {"replacement.of": "modules:1", "replacement.maps": "affine,identity"}
    run = nlbench.evaluate(model, draw(samples, 4), ["substitution"], settings=settings)
    reason = run["substitution"].reason
    assert ("rows per coefficient" in reason) == bool(few)
    assert few in reason
    settings["replacement.maps"] = "channel,affine"
    run = nlbench.evaluate(model, draw(samples, 4), ["substitution"], settings=settings)
    assert "rows per coefficient" not in run["substitution"].reason


@pytest.mark.parametrize("cost", ["kl", "squared"])
def test_costs_do_not_depend_on_memory(cost, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3))
    inputs, settings = draw(400, 4), {"substitution.cost": cost, "replacement.crossed": True}
    together = places(model, inputs, **settings)
    groups = []
    fit_places = observation.fit_places
    monkeypatch.setattr(observation, "MAX_FITTING_FRACTION", 1e-9)
    monkeypatch.setattr(
        observation,
        "fit_places",
        lambda model, group, *args, **options: (
            groups.append([place.name for place in group])
            or fit_places(model, group, *args, **options)
        ),
    )
    assert places(model, inputs, **settings) == together
    assert groups == [["1"], ["1"], ["3"], ["3"]]


def test_costs_do_not_depend_on_batches():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    inputs = draw(90, 4).double()
    for cost in ("kl", "squared"):
        settings = {"substitution.cost": cost}
        whole = places(model, inputs, **settings)["1"]
        parts = places(model, inputs, **settings, **{"replacement.batch": 16})["1"]
        assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(
    ("outputs", "labels", "cost"),
    [
        (3, torch.arange(20) % 3, "loss"),
        (3, None, "kl"),
        (3, torch.randn(20, 3), "squared"),
        (1, None, "squared"),
    ],
)
def test_usual_cost_follows_labels(outputs, labels, cost):
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, outputs))
    run = nlbench.evaluate(model, draw(20, 2), ["substitution"], labels=labels)
    assert run["substitution"].notes["cost"] == cost


@pytest.mark.parametrize(
    ("outputs", "settings", "reason"),
    [
        (3, {"substitution.cost": "loss"}, "no labels of classes"),
        (1, {"substitution.cost": "kl"}, "one output"),
    ],
)
def test_cost_that_does_not_fit_is_undefined(outputs, settings, reason):
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, outputs))
    run = nlbench.evaluate(model, draw(20, 2), ["substitution"], settings=settings)
    assert run["substitution"].status == "undefined"
    assert reason in run["substitution"].reason


def test_few_samples_are_undefined():
    run = nlbench.evaluate(nn.ReLU(), draw(3, 2), ["substitution"])
    assert run["substitution"].status == "undefined"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def test_split_batches_are_undefined():
    class Split(Small):
        def forward(self, x):
            return torch.cat([Small.forward(self, part) for part in x.split(16)])

    run = nlbench.evaluate(Split(), torch.randn(48, 4), ["substitution"], errors="none")
    assert run["substitution"].status == "undefined"
    assert "splits or selects samples" in run["substitution"].reason


def test_inference_mode_inside_changes_no_cost():
    class Inference(Small):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    x = torch.randn(32, 4)
    scores = [nlbench.evaluate(net, x, ["substitution"]) for net in (Small(), Inference())]
    values = [run["substitution"].summary for run in scores]
    assert values[1] == pytest.approx(values[0], rel=1e-6)


@pytest.mark.parametrize("labelled", [True, False])
def test_costs_of_probabilities_are_those_of_logits(labelled):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), draw(40, 4)
    labels = torch.arange(40) % 3 if labelled else None
    expected = places(model, inputs, labels)["1"]
    found = places(nn.Sequential(*model, nn.Softmax(-1)), inputs, labels)["1"]
    assert found == pytest.approx(expected, abs=1e-5)
    run = nlbench.evaluate(nn.Sequential(*model, nn.Softmax(-1)), inputs, ["substitution"])
    assert "probabilities" in run["substitution"].reason
