"""What sparsify makes of a network, and what can be done to its slopes."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import _len_torch_function_stack

import nlbench
from nlbench.errors import RequestError
from nlbench.measures.pathlength import average_path_length
from nlbench.models.networks.vgg import VGG
from nlbench.models.sparsified.relu_calls import other_activations
from nlbench.models.sparsified.sparsification import (
    linear_share,
    nonlinear_units,
    parameter_groups,
    penalty,
    randomize,
    snap,
    sparsify,
)
from nlbench.probes.sites.sites_observation import list_sites


def slopes(model):
    return parameter_groups(model, 0.0)[1]["params"]


def chain(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


def set_slopes(model, *numbers):
    with torch.no_grad():
        slopes(model)[0].copy_(torch.tensor(numbers))


@pytest.mark.parametrize(
    ("name", "calls", "units"),
    [
        # Channels of the ReLU calls, from the papers' tables: a VGG8 has 2 (6 + 16 + 64) + 120.
        ("vgg8", 7, 292),
        # 64, then two blocks of two calls at 64, 128, 256 and 512 channels.
        ("resnet18", 17, 64 + 4 * (64 + 128 + 256 + 512)),
        ("googlenet", 57, None),
        ("densenet121", 121, None),
    ],
)
def test_every_relu_call_gets_slopes(name, calls, units):
    torch.manual_seed(0)
    if name == "vgg8":
        model, size = VGG(8), 32
    else:
        model, size = torchvision.models.get_model(name, weights=None, num_classes=7), 32
    x = torch.randn(2, 3, size, size)
    made = sparsify(model.eval(), example=x)
    with torch.no_grad():
        assert torch.equal(made(x), model(x))
    assert len(nonlinear_units(made)) == calls
    if units is not None:
        assert sum(total for _, total in nonlinear_units(made).values()) == units
    assert {site.kind for site in list_sites(made, x)} == {"prelu"}


def test_the_model_is_not_modified():
    model = torchvision.models.resnet18(weights=None, num_classes=5)
    names = list(model.state_dict())
    made = sparsify(model)
    assert list(model.state_dict()) == names
    assert not model._forward_hooks
    assert set(names) < set(made.state_dict())
    assert made.training


def test_reused_module_has_slopes_per_call():
    made = sparsify(torchvision.models.resnet18(weights=None))
    first, second = made.layer1[0].relu.children()
    before = made(torch.ones(2, 3, 32, 32)).detach()
    with torch.no_grad():
        first.weight.fill_(1.0)
    assert nonlinear_units(made)["layer1.0.relu.0"] == (0, 64)
    assert nonlinear_units(made)["layer1.0.relu.1"] == (64, 64)
    assert second.weight.eq(0).all()
    assert not torch.allclose(made(torch.ones(2, 3, 32, 32)), before)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)
        self.relu = nn.Identity()

    def forward(self, x):
        x = torch.relu(self.first(self.relu(x)))
        return self.second(x).relu_()


def test_functional_calls_get_child_under_free_name():
    made = sparsify(Functional())
    assert list(nonlinear_units(made)) == ["relu_1.0", "relu_1.1"]
    with torch.no_grad():
        for weight in slopes(made):
            weight.fill_(1.0)
    x = torch.randn(6, 3)
    torch.testing.assert_close(made(x), made.second(made.first(x)))


class Shared(nn.Module):
    """One block called twice, with one ReLU for it and for the network."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.block = nn.Sequential(nn.Linear(4, 4), self.act)

    def forward(self, x):
        return self.act(self.block(self.block(x)) - 1)


def test_a_shared_relu_has_a_prelu_per_call():
    torch.manual_seed(0)
    model = Shared()
    made = sparsify(model)
    x = torch.randn(8, 4)
    assert made.act is made.block[1]
    assert list(nonlinear_units(made)) == ["act.0", "act.1", "act.2"]
    for _ in range(2):
        torch.testing.assert_close(made(x), model(x), rtol=0, atol=0)


def test_pass_that_fails_leaves_count_of_calls_right():
    model = sparsify(Shared())
    x = torch.randn(2, 4)
    expected = model(x)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


class Interrupting(nn.Module):
    """Passes on what it is given, but for the first time that it is asked to stop."""

    stops = False

    def forward(self, x):
        if self.stops:
            self.stops = False
            raise KeyboardInterrupt
        return x


class Broken(nn.Module):
    """A ReLU module called twice, and one called as a function, around an interrupt."""

    def __init__(self):
        super().__init__()
        self.act, self.inner = nn.ReLU(), nn.Sequential(nn.Linear(4, 4), Interrupting())

    def forward(self, x):
        return self.act(torch.relu(self.inner(self.act(x))))


@pytest.mark.parametrize("alone", [False, True])
def test_interrupted_pass_restores_the_model(alone):
    made = sparsify(nn.Sequential(nn.Linear(3, 4), Broken()), example=torch.ones(2, 3))
    x = torch.randn(5, 3)
    expected = made(x)
    modes = _len_torch_function_stack()
    for _ in range(2):
        made[1].inner[1].stops = True
        with pytest.raises(KeyboardInterrupt):
            made(x)
        assert _len_torch_function_stack() == modes
        torch.testing.assert_close(made[1](made[0](x)) if alone else made(x), expected)


def test_a_path_length_does_not_change_reused_relus():
    made = sparsify(torchvision.models.resnet18(weights=None, num_classes=3)).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = made(x)
    assert average_path_length(made, x) == 13.0
    torch.testing.assert_close(made(x), expected)


def test_several_probes_measure_reused_relus():
    made = sparsify(nn.Sequential(nn.Linear(3, 4), Broken(), nn.Linear(4, 2)))
    run = nlbench.evaluate(made, torch.randn(32, 3), measures=["pathlength", "affinity", "absdev"])
    assert {record.result.status for record in run.records} == {"ok"}


class ChannelsLast(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return torch.relu(torch.einsum("nhwc,cd->nhwd", x, self.weight))


def test_channels_are_not_guessed():
    model = ChannelsLast(torch.randn(3, 16))
    with pytest.raises(RequestError):
        sparsify(model, example=torch.randn(2, 8, 8, 3))


@pytest.mark.parametrize(("layer", "units"), [(nn.Linear(5, 2), 5), (nn.Conv1d(4, 2, 1), 4)])
def test_a_relu_of_the_input_has_its_channels(layer, units):
    made = sparsify(nn.Sequential(nn.ReLU(), layer), example=torch.randn(2, 4, 5))
    assert nonlinear_units(made)["0"] == (units, units)


def test_calls_are_counted_per_thread():
    made = sparsify(nn.Sequential(nn.Linear(3, 4), Broken()), example=torch.ones(2, 3))
    xs = [torch.randn(5, 3) for _ in range(24)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(made, xs))
    for x, y in zip(xs, found, strict=True):
        torch.testing.assert_close(y, made(x))


def test_call_more_than_on_the_example_is_refused():
    class Repeated(Shared):
        times = 2

        def forward(self, x):
            for _ in range(self.times):
                x = self.block(x)
            return x

    made = sparsify(Repeated())
    made.times = 3
    with pytest.raises(RequestError):
        made(torch.zeros(1, 4))


def test_channels_of_tokens_are_last():
    model = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True, dropout=0.0).eval()
    x = torch.randn(3, 5, 6)
    made = sparsify(model, example=x)
    assert nonlinear_units(made) == {"relu": (10, 10)}
    torch.testing.assert_close(made(x), model(x))
    with torch.no_grad():
        made.relu.weight[3:] = 1.0
    hidden = made.linear1(made.norm1(x + made.self_attn(x, x, x)[0]))
    hidden = torch.cat([hidden[..., :3].relu(), hidden[..., 3:]], -1)
    y = made.norm1(x + made.self_attn(x, x, x)[0])
    torch.testing.assert_close(made(x), made.norm2(y + made.linear2(hidden)))


@pytest.mark.parametrize("activation", [F.relu, nn.ReLU()], ids=["function", "module"])
def test_the_fused_kernel_does_not_bypass_the_slopes(activation):
    layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True, activation=activation)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(3, 5, 6), torch.tensor([[False] * 5, [False] * 3 + [True] * 2] * 2)[:3]
    made = sparsify(model, example=x)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        found = made(x, src_key_padding_mask=mask)
        torch.testing.assert_close(found[~mask], expected[~mask], rtol=0, atol=1e-5)
        randomize(made, 1.0, seed=0)
        assert not torch.allclose(made(x), model(x), atol=1e-3)


def test_a_sparsified_network_can_be_copied_and_pickled():
    model = sparsify(Functional())
    x = torch.randn(4, 3)
    set_slopes(model, 0.5, 0.25, 1.0, 0.0)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), model(x))
    set_slopes(copied, 0.0, 0.0, 0.0, 0.0)
    assert slopes(model)[0].tolist() == [0.5, 0.25, 1.0, 0.0]


def test_relu_with_needed_input_raises():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            x = self.linear(x)
            return F.relu(x, inplace=True) + x

    with pytest.raises(RequestError):
        sparsify(Overwriting())


def test_an_unregistered_relu_is_a_functional_call():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.acts = (nn.ReLU(),)

        def forward(self, x):
            return self.acts[0](self.linear(x))

    assert nonlinear_units(sparsify(Hidden())) == {"relu": (3, 3)}


def test_functions_of_slopes_refuse_a_model_without_them():
    for function in (penalty, snap, linear_share, nonlinear_units):
        with pytest.raises(RequestError):
            function(chain())


@given(st.lists(st.floats(-1, 0.98), min_size=4, max_size=4), st.floats(0.1, 2))
def test_the_penalty_matches_the_formula(numbers, power):
    model = sparsify(chain())
    set_slopes(model, *numbers)
    expected = sum(abs(1 - number) ** power for number in numbers)
    assert penalty(model, power).item() == pytest.approx(expected, rel=1e-5)


def test_the_penalty_has_no_gradient_at_frozen_units():
    model = sparsify(chain())
    set_slopes(model, 0.0, 0.75, 0.995, 1.0)
    snap(model)
    penalty(model).backward()
    assert slopes(model)[0].grad.tolist() == pytest.approx([-0.5, -1.0, 0.0, 0.0])


@given(st.lists(st.floats(-2, 0.99), min_size=4, max_size=4), st.floats(0.2, 2))
@settings(max_examples=10)
def test_the_gradient_matches_finite_differences(numbers, power):
    model = sparsify(chain()).double()
    weight = slopes(model)[0]

    def value(*numbers):
        with torch.no_grad():
            weight.copy_(torch.tensor(numbers, dtype=torch.float64))
        return penalty(model, power)

    value(*numbers).backward()
    step = 1e-6
    for place, number in enumerate(numbers):
        before, after = numbers[:place], numbers[place + 1 :]
        more = value(*before, number + step, *after) - value(*before, number - step, *after)
        assert weight.grad[place].item() == pytest.approx(more.item() / (2 * step), rel=1e-4)


def test_penalty_gradient_is_finite_near_one():
    model = sparsify(chain())
    set_slopes(model, 1.0, 1 - 1e-6, 1 + 1e-6, 0.99995)
    penalty(model).backward()
    assert slopes(model)[0].grad.abs().max() <= 100
    assert torch.isfinite(slopes(model)[0].grad).all()


def test_a_layerwise_slope_counts_once_for_each_channel():
    model = sparsify(chain(), layerwise=True)
    assert slopes(model)[0].shape == (1,)
    assert penalty(model).item() == 4.0
    set_slopes(model, 0.999)
    assert snap(model) == 4
    assert linear_share(model) == 1.0


def test_layerwise_slopes_do_not_change_the_function():
    model = torchvision.models.resnet18(weights=None, num_classes=4).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(sparsify(model, layerwise=True, example=x)(x), model(x))


def test_snap_freezes_slopes_near_or_above_one():
    model = sparsify(chain())
    set_slopes(model, 0.98, 0.991, 1.3, -0.2)
    assert snap(model) == 2
    torch.testing.assert_close(slopes(model)[0].detach(), torch.tensor([0.98, 1.0, 1.0, -0.2]))
    assert linear_share(model) == 0.5
    assert nonlinear_units(model) == {"1": (2, 4)}
    assert snap(model) == 0


def test_a_frozen_unit_stays_linear():
    model = sparsify(chain())
    optimiser = torch.optim.SGD(parameter_groups(model, 0.1), lr=0.5, momentum=0.9)
    x = torch.randn(16, 3)
    model(x).square().sum().backward()
    optimiser.step()
    set_slopes(model, 1.0, 0.2, 0.2, 0.2)
    snap(model)
    optimiser.zero_grad()
    model(x).square().sum().backward()
    assert slopes(model)[0].grad[0] == 0
    assert slopes(model)[0].grad[1:].ne(0).all()
    optimiser.step()
    assert slopes(model)[0][0] != 1.0  # momentum has moved it
    assert model[1].slopes()[0] == 1.0
    snap(model)
    assert slopes(model)[0][0] == 1.0


def test_slopes_have_no_weight_decay():
    model = sparsify(torchvision.models.resnet18(weights=None))
    others, own = parameter_groups(model, 5e-4)
    assert (others["weight_decay"], own["weight_decay"]) == (5e-4, 0.0)
    ids = [id(p) for p in (*others["params"], *own["params"])]
    assert len(set(ids)) == len(ids) == len(list(model.parameters()))


@given(st.floats(0, 1), st.integers(0, 5))
def test_random_control_makes_the_same_fraction_linear(share, seed):
    model, again = sparsify(VGG(8)), sparsify(VGG(8))
    assert randomize(model, share, seed) == round(share * 292)
    assert linear_share(model) == pytest.approx(round(share * 292) / 292)
    randomize(again, share, seed)
    assert nonlinear_units(model) == nonlinear_units(again)


def test_the_random_control_differs_from_seed_to_seed():
    first, second = sparsify(VGG(8)), sparsify(VGG(8))
    randomize(first, 0.5, 0)
    randomize(second, 0.5, 1)
    assert nonlinear_units(first) != nonlinear_units(second)


def test_the_random_control_checks_its_arguments():
    with pytest.raises(RequestError):
        randomize(sparsify(chain(), layerwise=True), 0.5, 0)
    with pytest.raises(RequestError):
        randomize(sparsify(chain()), 1.5, 0)


def test_a_sparsified_network_trains():
    model = sparsify(Functional())
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    target = x @ torch.randn(3, 5)
    optimiser = torch.optim.Adam(parameter_groups(model, 0.0), lr=0.03)
    for _ in range(300):
        optimiser.zero_grad()
        loss = (model(x) - target).square().mean() + 0.01 * penalty(model)
        loss.backward()
        optimiser.step()
        snap(model)
    # A linear target: the prior can make every unit that matters linear.
    assert linear_share(model) > 0.5
    assert (model(x) - target).square().mean() < 0.3


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mobilenet_v2", {"relu6": 35}),
        ("mobilenet_v3_small", {"hardswish": 19, "hardsigmoid": 9}),
        ("resnet18", {}),
    ],
)
def test_other_activations_are_counted_by_kind(name, counts):
    assert other_activations(torchvision.models.get_model(name, weights=None)) == counts


def test_slopes_are_not_other_activations():
    network = sparsify(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sigmoid()))
    assert other_activations(network) == {"sigmoid": 1}
