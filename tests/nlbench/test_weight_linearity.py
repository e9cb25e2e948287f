"""The distance of a network from its linearisation in the weights."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import nlbench
from nlbench import RequestError, Undefined
from nlbench.weight_linearity import weight_linearity, weight_linearity_of_run


def shifted(model, size, seed=0):
    """Return a copy whose weights are moved at random."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return other


def perceptron():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def jacobian(model, inputs):
    """Return the derivatives of all outputs by all weights, (n, k, weights)."""
    model = copy.deepcopy(model).double()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    blocks = jacrev(lambda p: functional_call(model, p, (inputs.double(),)))(parameters)
    return torch.cat([block.flatten(2) for block in blocks.values()], 2)


def test_value_follows_its_definition():
    start, inputs = perceptron(), torch.randn(20, 3)
    end = shifted(start, 0.3)
    first, second = (copy.deepcopy(m).double()(inputs.double()) for m in (start, end))
    step = torch.cat(
        [
            (b.double() - a.double()).flatten()
            for a, b in zip(start.parameters(), end.parameters(), strict=True)
        ]
    )
    tangent = jacobian(start, inputs) @ step
    change = (second - first).detach()
    expected = (change - tangent).square().sum() / change.square().sum()
    result = weight_linearity(start, end, inputs)
    assert result.value == pytest.approx(expected.item(), rel=1e-9)
    assert result.n == 20
    assert 0 < result.error < 1


def test_sketched_kernels_approach_the_exact_ones():
    start, inputs = perceptron(), torch.randn(40, 3)
    end = shifted(start, 0.5)
    grams = []
    for model in (start, end):
        rows = jacobian(model, inputs).flatten(1)
        gram = rows @ rows.T
        gram.fill_diagonal_(0)
        n = len(gram)
        rows = gram.sum(1)
        centred = gram - (rows[:, None] + rows) / (n - 2) + gram.sum() / ((n - 1) * (n - 2))
        grams.append(centred.fill_diagonal_(0).flatten())
    expected = 1 - torch.cosine_similarity(*grams, dim=0)
    result = weight_linearity(start, end, inputs, directions=800)
    assert abs(result.kernel_distance - float(expected)) < 4 * result.kernel_error
    assert result.kernel_error < 0.5 * result.kernel_distance


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 2), nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(3, 2))],
    ids=["layer", "last layer"],
)
def test_models_linear_in_their_weights_have_zero(model):
    end = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in end.parameters():
            parameter += torch.randn(parameter.shape)
    result = weight_linearity(model, end, torch.randn(24, 3))
    assert result.value < 1e-20
    assert abs(result.kernel_distance) < 1e-9


def test_product_of_two_weights_has_its_closed_form():
    # f = a b x. From (1, 1) to (1 + s, 1 + s) it changes by (2 s + s²) x, the tangent by 2 s x.
    start = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    end, s = copy.deepcopy(start), 0.25
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.fill_(1.0)
        for parameter in end.parameters():
            parameter.fill_(1.0 + s)
    value = weight_linearity(start, end, torch.randn(16, 1)).value
    assert value == pytest.approx((s / (2 + s)) ** 2, rel=1e-9)


def test_wide_networks_are_closer_to_linear():
    values = []
    inputs = torch.randn(32, 4)
    for width in (16, 256, 4096):
        start = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        # In the parametrisation of tangent kernels all weights are of order 1.
        with torch.no_grad():
            start[0].weight.normal_(0, 1 / 2)
            start[2].weight.normal_(0, width**-0.5)
        end = copy.deepcopy(start)
        optimizer = torch.optim.SGD(end.parameters(), 2 / width)
        for _ in range(20):
            optimizer.zero_grad()
            (end(inputs)[:, 0] - inputs[:, 0].sin()).square().mean().backward()
            optimizer.step()
        values.append(weight_linearity(start, end, inputs, directions=8).value)
    assert values[0] > 4 * values[1] > 16 * values[2]


def test_networks_stay_as_they_are():
    start, inputs = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(16, 3)
    end = shifted(start, 0.1)
    before = [copy.deepcopy(model.state_dict()) for model in (start, end)]
    weight_linearity(start, end, inputs, directions=8)
    for model, state in zip((start, end), before, strict=True):
        assert model.training
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_false_derivatives_are_undefined():
    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            rounded = (4 * self.weight).round() / 4
            return x @ (self.weight + (rounded - self.weight).detach())

    start = Rounded()
    with pytest.raises(Undefined, match="derivative"):
        weight_linearity(start, shifted(start, 0.5), torch.randn(16, 3))


def test_equal_networks_are_undefined():
    model = perceptron()
    with pytest.raises(Undefined, match="same"):
        weight_linearity(model, copy.deepcopy(model), torch.randn(16, 3))


@pytest.mark.parametrize(
    ("end", "name"), [(nn.Linear(4, 2), "weight"), (nn.Linear(3, 2, bias=False), "bias")]
)
def test_mismatched_networks_raise(end, name):
    with pytest.raises(RequestError, match=f"'{name}'"):
        weight_linearity(nn.Linear(3, 2), end, torch.randn(16, 3))


def test_too_few_samples_have_no_error():
    start = perceptron()
    result = weight_linearity(start, shifted(start, 0.1), torch.randn(6, 3))
    assert math.isnan(result.error)
    assert math.isnan(result.kernel_error)


def test_checkpoints_of_a_run_are_compared_in_turn(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))\n"
    )
    for epoch in range(3):
        torch.manual_seed(epoch)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))
        torch.save(model.state_dict(), tmp_path / f"epoch{epoch}.pt")
    request = nlbench.Request(
        ("norm",),
        (f"{file}:net",),
        ("digits",),
        weights=tuple(str(tmp_path / f"epoch{epoch}.pt") for epoch in range(3)),
        samples=32,
    )
    run = nlbench.run(request, tmp_path / "run")
    frame = weight_linearity_of_run(run, directions=8)
    assert len(frame) == 2
    assert frame["end"][0] == frame["start"][1]
    assert (frame["value"] > 0).all()
    alone = nlbench.load_run(run.path)
    assert run.weight_linearity(directions=8).equals(alone.weight_linearity(directions=8))
    since_first = run.weight_linearity(since="first", directions=8)
    assert since_first["start"].tolist() == [frame["start"][0]] * 2
    assert since_first["value"][0] == frame["value"][0]
    with pytest.raises(RequestError, match="previous"):
        run.weight_linearity(since="previuos")


def trained_series():
    torch.manual_seed(0)
    first = perceptron()
    return {"epoch 1": first, "epoch 2": shifted(first, 0.1), "epoch 3": shifted(first, 0.4, 1)}


def test_models_in_memory_are_compared():
    models, inputs = trained_series(), torch.randn(64, 3)
    run = nlbench.evaluate(models, inputs, ["norm"])
    frame = run.weight_linearity(since="first", directions=8)
    assert frame[["start", "end"]].values.tolist() == [
        ["epoch 1", "epoch 2"],
        ["epoch 1", "epoch 3"],
    ]
    expected = weight_linearity(models["epoch 1"], models["epoch 3"], inputs, directions=8)
    assert frame["value"][1] == pytest.approx(expected.value)
    with torch.no_grad():
        models["epoch 2"][0].bias += 1
    with pytest.raises(RequestError, match="epoch 2"):
        run.weight_linearity()


def test_undefined_pairs_have_a_reason():
    models = trained_series()
    models["epoch 2"] = copy.deepcopy(models["epoch 1"])
    frame = nlbench.evaluate(models, torch.randn(32, 3), ["norm"]).weight_linearity(directions=8)
    assert math.isnan(frame["value"][0])
    assert "same at both" in frame["reason"][0]
    assert frame["value"][1] > 0
    assert frame["reason"][1] == ""


def test_models_take_all_inputs_of_evaluate():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = perceptron()

        def forward(self, first, second):
            return {"logits": self.layer(first + second)}

    start, first, second = Keywords(), torch.randn(32, 3), torch.randn(32, 3)
    end = shifted(start, 0.3)
    expected = weight_linearity(start.layer, end.layer, first + second, directions=8).value
    mapping = {"first": first, "second": second}
    for inputs in (
        mapping,
        [{k: v[i : i + 8] for k, v in mapping.items()} for i in (0, 8, 16, 24)],
    ):
        frame = nlbench.evaluate({"a": start, "b": end}, inputs, ["norm"]).weight_linearity()
        assert frame["value"][0] == pytest.approx(expected)
