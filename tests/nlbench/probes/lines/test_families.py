"""Published networks are traced unchanged, or refused if they aren't piecewise affine."""

import warnings

import pytest
import torch
import torchvision.models as zoo
from torch import nn
from torch.autograd import forward_ad

from nlbench.errors import UnsupportedOperation
from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.recording.recorder import untraceable_reason

from segments import on_segment, outputs

PLAIN = {"num_classes": 10}

# Networks of all operations, shallow where they are wide: options, image size, length of the
# segment.
FAMILIES = {
    "resnet18": (PLAIN, 32, 1e-3),
    "squeezenet1_1": (PLAIN, 32, 5e-4),
    "shufflenet_v2_x0_5": (PLAIN, 32, 2e-3),
    "mobilenet_v2": ({"num_classes": 10, "width_mult": 0.35}, 32, 2e-3),
}


def build(name, options):
    """Return a network whose batch norms have random statistics."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = getattr(zoo, name)(weights=None, **options).eval()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
                module.bias.normal_(0, 0.1)
    return net


def slopes(net, start, end, t):
    """Return the network's derivative along the segment, by forward-mode differentiation."""
    points = on_segment(start, end, t)
    with torch.no_grad(), forward_ad.dual_level():
        along = (end - start).double().expand_as(points).contiguous()
        return forward_ad.unpack_dual(double_copy(net)(forward_ad.make_dual(points, along)))[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_piecewise_affine_families_are_traced_unchanged(name):
    options, size, length = FAMILIES[name]
    net = build(name, options)
    start = torch.rand(3, size, size)
    end = start + length * torch.randn(3, size, size)
    assert untraceable_reason(net, start[None]) == ""
    trace = trace_segment(net, start, end)
    assert 4 < trace.regions < 200

    # Values at breakpoints and inside regions.
    some = torch.linspace(0, trace.regions - 1, 4).long()
    middle = (trace.t[some] + trace.t[some + 1]) / 2
    expected = torch.cat([trace.values[some], (trace.values[some] + trace.values[some + 1]) / 2])
    values = outputs(net, on_segment(start, end, torch.cat([trace.t[some], middle])))
    assert float((values - expected).abs().max()) <= 1e-9 * float(trace.values.abs().max())

    # The slope changes only at breakpoints, and it does change at some.
    first = trace.regions // 2 - 2
    t = trace.t[first : first + 5]
    inside = t[:-1, None] + torch.tensor([0.1, 0.9]) * t.diff()[:, None]
    along = slopes(net, start, end, inside.flatten())
    change = along.diff(dim=0).abs().amax(1) / along.abs().max()
    assert float(change[::2].max()) < 1e-10
    assert int((change[1::2] > 1e-10).sum()) >= 1


@pytest.mark.slow
def test_adaptive_traces_meet_the_same_regions():
    options, size, length = FAMILIES["squeezenet1_1"]
    net = build("squeezenet1_1", options)
    start = torch.rand(3, size, size)
    end = start + length / 2 * torch.randn(3, size, size)
    exact = trace_segment(net, start, end)
    adaptive = trace_segment(net, start, end, method="adaptive", sensitivity=1e-7)
    assert exact.regions > 2
    assert adaptive.regions + adaptive.notes["shorter_than_sensitivity"] == exact.regions
    if adaptive.regions == exact.regions:
        torch.testing.assert_close(adaptive.t, exact.t, rtol=0, atol=1e-9)
        assert torch.equal(adaptive.origins, exact.origins)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("efficientnet_b0", "silu at features.0.2: not piecewise affine"),
        ("vit_b_16", "layer_norm at encoder.layers.encoder_layer_0.ln_1: not piecewise affine"),
        ("regnet_y_400mf", "sigmoid at trunk_output.block1.block1-0.f.se.scale_activation: not"),
        ("mobilenet_v3_small", "hardswish at features.0.2: not piecewise affine"),
    ],
)
def test_other_families_are_refused_by_their_first_operation(name, refusal):
    # RegNet computes its widths with tensors.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        net = getattr(zoo, name)(weights=None)
    reason = untraceable_reason(net, torch.zeros(1, 3, 224, 224))
    assert reason.startswith(refusal)
    assert "\n" not in reason


def test_prelu_networks_are_checked_without_weights():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Flatten(), nn.PReLU())
    assert untraceable_reason(net, torch.zeros(1, 3, 8, 8)) == ""


def test_large_networks_are_checked_without_weights():
    with torch.device("meta"):
        net = zoo.wide_resnet50_2(weights=None)
    assert untraceable_reason(net, torch.zeros(1, 3, 224, 224)) == ""


def test_untraceable_reason_is_the_error_of_tracing():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Sequential(nn.Softmax(1)))
    ends = torch.randn(2, 3, 8, 8)
    with pytest.raises(UnsupportedOperation) as caught:
        trace_segment(net, *ends)
    assert (
        untraceable_reason(net, ends[:1])
        == str(caught.value)
        == "softmax at 3.0: not piecewise affine"
    )


def test_untraceable_reason_leaves_the_network_unchanged():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.PReLU(3), nn.Linear(3, 2)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert untraceable_reason(net, torch.randn(1, 3)) == ""
    assert all(m.training for m in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
