"""A network as a function: its derivatives against explicit Jacobians."""

import pytest
import torch
from commands import call
from torch import nn

import nlbench
from nlbench.errors import Undefined
from nlbench.probes.function import directional_derivative, observe_function
from nlbench.probes.function.derivatives import check_derivative

NETWORKS = {
    "relu": nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)),
    "convolution": nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.SiLU(), nn.MaxPool1d(2)
    ),
    "attention": nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 8, batch_first=True, dropout=0.3)
    ),
    "in place at once": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2)),
}


def seen(model, *batches):
    observations = []
    count = observe_function(model, batches, observations.append)
    return count, observations


def differentiated(model, inputs, directions):
    """Derivatives that a listener finds while it is shown the model."""
    found = []
    observe_function(
        model,
        [inputs],
        lambda observation: found.append(
            directional_derivative(observation.function, observation.inputs, directions)
        ),
    )
    return found[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_networks_derivatives_are_those_of_its_jacobian(name):
    torch.manual_seed(0)
    model = NETWORKS[name].double().eval()
    inputs, directions = torch.randn(2, 5, 6, dtype=torch.float64)
    outputs, derivatives = differentiated(model, inputs.clone(), directions)
    torch.testing.assert_close(outputs, model(inputs.clone()).flatten(1).detach())
    for x, direction, derivative in zip(inputs, directions, derivatives, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda one: model(one[None].clone()).flatten(), x
        )
        torch.testing.assert_close(derivative, jacobian @ direction)


class SquareWithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_operation_without_forward_mode_uses_double_backward():
    x, v = torch.randn(2, 5, 3)
    outputs, derivatives = directional_derivative(SquareWithoutForwardMode.apply, x, v)
    torch.testing.assert_close(outputs, x**2)
    torch.testing.assert_close(derivatives, 2 * x * v)


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2


def test_operation_without_derivatives_is_named():
    x = torch.randn(4, 3)
    with pytest.raises(Undefined):
        directional_derivative(OnceDifferentiable.apply, x, x)


def test_a_built_in_operation_without_derivatives_is_named():
    lengths, targets = (5, 5), torch.ones(2, 2, dtype=torch.int64)
    x = torch.randn(5, 2, 4)

    def function(x):
        loss = torch.nn.functional.ctc_loss(x, targets, lengths, (2, 2), reduction="none")
        return loss.sum().expand(5)[:, None]

    with pytest.raises(Undefined, match="_ctc_loss"):
        directional_derivative(function, x, x)


def test_model_error_is_not_a_missing_derivative():
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        directional_derivative(lambda x: x @ torch.ones(7, 7), x, x)


def test_inputs_mode_and_weights_are_unchanged():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(3), nn.Dropout())
    model[1].eval()
    inputs = torch.randn(5, 3)
    before, state = inputs.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    count, observations = seen(model, inputs)
    observations[0].function(observations[0].inputs)
    assert count == 5
    assert torch.equal(inputs, before)
    assert model.training
    assert not model[1].training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_batches_are_numbered_and_counted():
    count, observations = seen(nn.Identity(), torch.zeros(3, 2), torch.zeros(2, 2))
    assert count == 5
    assert [(observation.batch, len(observation.inputs)) for observation in observations] == [
        (0, 3),
        (1, 2),
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_non_floating_inputs_are_undefined(dtype):
    with pytest.raises(Undefined):
        seen(nn.Identity(), torch.zeros(3, 2, dtype=dtype))


class Gives(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: (x, x), "tuple"),
        (lambda x: x.sum(), r"\(\)"),
        (lambda x: x[:1], r"\(1, 4\)"),
        (lambda x: x.argmax(1), "int64"),
    ],
)
def test_outputs_mixing_samples_are_undefined(make, name):
    with pytest.raises(Undefined, match=name):
        seen(Gives(make), torch.zeros(3, 4))


def test_output_of_one_number_sample_is_one_column():
    _, observations = seen(Gives(lambda x: x.sum(1)), torch.ones(3, 4))
    assert observations[0].function(observations[0].inputs).tolist() == [[4.0], [4.0], [4.0]]


class Cramped(nn.Module):
    """Runs out of memory with more than so many samples."""

    def __init__(self, most, square):
        super().__init__()
        self.most, self.square, self.sizes = most, square, []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return self.square(x)


@pytest.mark.parametrize("square", [torch.square, SquareWithoutForwardMode.apply])
def test_derivative_is_halved_on_out_of_memory(square):
    x, v = torch.randn(2, 11, 3)
    model = Cramped(3, square)
    outputs, derivatives = directional_derivative(model, x, v)
    torch.testing.assert_close(outputs, x**2)
    torch.testing.assert_close(derivatives, 2 * x * v)
    assert model.sizes[:3] == [11, 6, 3]


def test_memory_below_one_sample_is_reported():
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="memory"):
        directional_derivative(Cramped(0, torch.square), x, x)


def test_function_batches_fit_memory():
    model, observations = Cramped(9, torch.square), []
    x = torch.randn(9, 4)
    observe_function(model, [x], observations.append, memory=1)
    model.sizes.clear()
    torch.testing.assert_close(observations[0].function(x), x**2)
    assert max(model.sizes) == 2


class Squeezing(nn.Module):
    """Drops the axis of a single sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return torch.log_softmax(self.layer(x[:, :, None] * torch.ones(4)).squeeze(), 1)


@pytest.mark.parametrize("memory", [None, 10**7])
def test_network_that_squeezes_a_single_sample_is_differentiated(memory):
    observations = []
    observe_function(Squeezing(), [torch.randn(8, 3)], observations.append, memory=memory)
    assert observations[0].function(observations[0].inputs).shape == (8, 3)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.softmax(0), lambda x: x - x.mean(0), lambda x: x * len(x)],
    ids=["softmax", "mean", "count"],
)
def test_mixed_samples_are_refused(function):
    model, x = Cramped(9, function), torch.randn(9, 4)
    with pytest.raises(Undefined):
        observe_function(model, [x], lambda seen: None)
    with pytest.raises(Undefined):
        directional_derivative(Cramped(4, function), x, x)


def test_mixing_check_draws_no_random_numbers():
    seen, x = [], torch.randn(9, 4)
    for pieces in ([x], [x[:1]]):  # Of a single sample nothing has to be asked.
        torch.manual_seed(0)
        observe_function(Drawing(), pieces, lambda batch: None)
        seen.append(torch.rand(1))
    assert seen[0] == seen[1]


class Drawing(nn.Module):
    """Draws random numbers on which its output does not depend."""

    def forward(self, x):
        nn.functional.dropout(x, 0.5, training=True)
        return x.square()


def test_function_computes_in_precision_that_was_asked_for():
    model, types = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), []
    model[0].register_forward_hook(lambda module, given, output: types.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(5, 3)

        def look(seen):
            with torch.autocast("cpu", enabled=False):
                directional_derivative(seen.function, seen.inputs, seen.inputs)

        observe_function(model, [x], look)
    assert set(types) == {torch.bfloat16}


def test_first_derivative_emits_no_warning(tmp_path):
    script = tmp_path / "derive.py"
    script.write_text(
        "import torch; from nlbench.probes.function import directional_derivative as d\n"
        "print(d(torch.square, torch.ones(1, 1), torch.ones(1, 1))[1].item())\n"
    )
    done = call(cwd=tmp_path, script=str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


class Scaled(torch.autograd.Function):
    """The identity, with a gradient reversal of 0.1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -0.1 * gradient


class Clipped(torch.autograd.Function):
    """Clips values, but passes the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WrongTangent(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0]


DERIVATIVES = ["nlc", "geometric-complexity"]
WRONG = {
    "reversal": Scaled.apply,
    "clip": Clipped.apply,
    "straight-through rounding": lambda x: x + ((4 * x).round() / 4 - x).detach(),
    "detached part": lambda x: x * x.detach(),
    "wrong tangent": WrongTangent.apply,
}


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x):
        return self.last(self.function(self.first(x)).tanh())


@pytest.mark.parametrize("name", WRONG)
def test_backward_that_is_not_the_derivative_is_undefined(name):
    torch.manual_seed(0)
    model = Applied(WRONG[name])
    for record in nlbench.evaluate(model, 2 * torch.randn(40, 6), DERIVATIVES).records:
        assert record.result.status == "undefined"
        assert "its backward is not its derivative" in record.result.reason


RIGHT = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "square without forward mode": SquareWithoutForwardMode.apply,
    "many kinks": lambda x: (x - (20 * x).abs()).abs().sin(),
    "steep": lambda x: (100 * x).sin(),
    "jump": lambda x: torch.where(x > 0, x, x.square() + 3),
    "root": lambda x: x.relu().sqrt(),
    "rounding": lambda x: (x / 3).round() + x,
    "single precision inside": lambda x: x.float().tanh().to(x.dtype),
    "large offset": lambda x: (x + 1e6) - 1e6,
    "normalised": lambda x: x / x.norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", [*RIGHT, *NETWORKS])
def test_a_right_backward_is_measured(name):
    torch.manual_seed(0)
    model = Applied(RIGHT[name]) if name in RIGHT else NETWORKS[name].float().eval()
    x = torch.randn(40, 6)
    x[:20] = x[:20].relu()  # Many equal values, as in the background of an image.
    for record in nlbench.evaluate(model, x, DERIVATIVES).records:
        assert record.result.status == "ok" or "not finite" in record.result.reason


@pytest.mark.parametrize(("seed", "mode"), list(enumerate(["forward", "reverse"] * 4)))
def test_kinks_are_not_wrong_derivatives(seed, mode):
    torch.manual_seed(seed)
    pool = nn.MaxPool2d(3, 2, 1)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(8, 8, 3), nn.LeakyReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(30), nn.Hardswish()).double()
    images = torch.rand(8, 1, 12, 12, dtype=torch.float64) * (torch.rand(8, 1, 12, 12) > 0.6)
    check_derivative(model, images, mode=mode)
