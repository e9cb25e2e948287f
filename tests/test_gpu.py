"""A GPU gives what the CPU gives, to the precision of its own forward pass."""

import copy
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn

import nlbench
from nlbench.measures.affinity import affinity_score
from nlbench.measures.cka import linear_cka, rbf_cka
from nlbench.measures.r2 import r2_score
from nlbench.models.networks.vgg import vgg8
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import vanilla
from nlbench.probes.lines import estimate_segment, observe_paths, plane, trace_segment
from nlbench.registry import load
from nlbench.request import Request
from nlbench.weight_linearity import weight_linearity

pytestmark = pytest.mark.gpu


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 64, 40),
        nn.ReLU(),
        nn.Linear(40, 5),
    )


def test_every_measure_agrees_with_the_cpu():
    model, inputs = network(), torch.rand(256, 3, 32, 32)
    measures = ["affinity", "r2", "cka", "absdev", "density"]
    settings = {"lines.number": 1}
    here = nlbench.evaluate(model, inputs, measures, settings=settings)
    there = nlbench.evaluate(
        copy.deepcopy(model).cuda(), inputs.cuda(), measures, settings=settings
    )
    assert {r.machine.device for r in there.records} == {"cuda:0"}
    for measure in measures:
        expected = here[measure].summary["value"]
        assert there[measure].summary["value"] == pytest.approx(expected, rel=1e-4)


def test_traced_segment_is_same_to_last_digits():
    model, (start, end) = network(), torch.rand(2, 3, 32, 32)
    here = trace_segment(model, start, end)
    there = trace_segment(copy.deepcopy(model).cuda(), start.cuda(), end.cuda())
    assert there.values.is_cuda
    assert there.regions == here.regions
    torch.testing.assert_close(there.t.cpu(), here.t, rtol=0, atol=1e-10)
    torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-9, atol=1e-9)


class Attention(nn.Module):
    """A transformer's layer on the rows of an image."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2).flatten(2)).mean(1))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(24, 10, batch_first=True), nn.Linear(10, 5)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2).flatten(2))[0][:, -1])


def smooth():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )


# Of what a layer's normalisation makes dependent, r2 takes the rounding for directions of its own.
DIGITS = defaultdict(lambda: 1e-3, r2=1e-2)
EVERY = ["affinity", "r2", "cka", "norm", "sparsity", "entropy", "nlc", "pathlength", "density"]


SHORT_LINES = {"lines.number": 1, "lines.anchors": 2, "lines.radius": 0.05}
SOME = ["affinity", "r2", "cka", "sparsity", "pathlength"]
OPTIONS = {
    "sites.reduction": "flatten",
    "sites.attention": True,
    "cka.kernel": "rbf",
    "r2.kind": "crossvalidated",
    "affinity.shrinkage": "none",
    "pathlength.empirical": True,
}


def assert_alike(there, here):
    for record in here.records:
        name, result, expected = record.measure.name, there[record.measure.name], record.result
        assert result.status == expected.status, f"{name}: {result.reason}"
        assert result.summary == pytest.approx(expected.summary, rel=DIGITS[name], abs=1e-6), name


@pytest.mark.parametrize(
    ("build", "measures", "settings"),
    [
        *((build, EVERY, SHORT_LINES) for build in (pooled, smooth, Attention, Recurrent)),
        *((Attention, SOME, {name: value}) for name, value in OPTIONS.items()),
    ],
)
def test_layers_and_options_agree_with_cpu(build, measures, settings):
    torch.manual_seed(0)
    model, inputs = build().eval(), torch.rand(160, 3, 8, 8)
    here = nlbench.evaluate(model, inputs, measures, settings=settings)
    there = nlbench.evaluate(
        copy.deepcopy(model).cuda(), inputs.cuda(), measures, settings=settings
    )
    assert_alike(there, here)


def test_bfloat16_network_agrees_with_cpu():
    torch.manual_seed(0)
    model, inputs = pooled().eval().bfloat16(), torch.rand(160, 3, 8, 8).bfloat16()
    here = nlbench.evaluate(model, inputs, ["affinity", "norm"])
    there = nlbench.evaluate(
        copy.deepcopy(model).to("cuda"), inputs.to("cuda"), ["affinity", "norm"]
    )
    for name in ("affinity", "norm"):
        assert there[name].summary["value"] == pytest.approx(here[name].summary["value"], rel=0.02)


def test_estimates_never_use_tf32():
    model, (start, end) = network(), torch.rand(2, 3, 32, 32)
    here = estimate_segment(model, start, end)
    there = estimate_segment(copy.deepcopy(model).cuda(), start.cuda(), end.cuda())
    assert there.crossings == pytest.approx(here.crossings, rel=1e-3)
    torch.testing.assert_close(
        there.values[[0, -1]].cpu(), here.values[[0, -1]], rtol=1e-5, atol=1e-6
    )


def test_plane_is_same_but_for_pixels_on_boundaries():
    model, points = network(), torch.rand(3, 3, 32, 32)
    here = plane(model, points, size=16).boundaries()
    there = plane(copy.deepcopy(model).cuda(), points.cuda(), size=16).boundaries()
    assert (there.cpu() - here).abs().sum() <= 1e-2 * here.sum()


def test_joint_and_single_estimates_agree():
    model, starts = network().cuda(), torch.rand(100, 3, 32, 32).cuda()
    paths = torch.stack([starts, starts.roll(1, 3)], 1)
    together = [seen.trace.crossings for seen in observe_paths(model, paths, method="refined")]
    alone = [estimate_segment(model, *path).crossings for path in paths[:3]]
    assert together[:3] == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize(
    "score",
    [
        affinity_score,
        r2_score,
        lambda x, y: r2_score(x, y, kind="crossvalidated"),
        linear_cka,
        rbf_cka,
    ],
)
def test_dependent_columns_have_the_same_scores(score):
    # Which of them is decided by singular values that are rounding.
    x = torch.randn(300, 40, dtype=torch.float64)
    x = torch.cat([x, x @ torch.randn(40, 20, dtype=torch.float64)], 1)
    y = x.relu()
    found = score(x.cuda(), y.cuda())
    assert found.is_cuda
    assert float(found) == pytest.approx(float(score(x, y)), rel=1e-9)


def test_the_derivative_of_a_score_is_the_same():
    x = torch.randn(60, 30, dtype=torch.float64)
    gradients = []
    for place in ("cpu", "cuda"):
        given = x.to(place, copy=True).requires_grad_()
        affinity_score(given, given.relu()).backward()
        gradients.append(given.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)


def test_training_is_the_same_each_time():
    digits = load("datasets", "digits")()
    recipe = replace(vanilla, epochs=1)
    first, second = (train(vgg8, digits, recipe, device="cuda").model for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["tf32", "float64", "bfloat16", "float16"])
def test_run_has_the_precision_that_is_asked_for(tmp_path, precision):
    request = Request(("norm",), ("vgg8",), samples=16, device="cuda", precision=precision)
    (record,) = nlbench.run(request, tmp_path / "run").records
    assert record.result.status == "ok", record.result.reason
    environment = record.machine.environment
    assert (environment["precision"], environment["tf32"]) == (precision, precision == "tf32")
    assert environment["device_name"] == torch.cuda.get_device_name()
    assert record.costs["peak_device_memory"] > 0


def test_run_frees_device_memory(tmp_path):
    request = Request(("norm", "density"), ("vgg8",), samples=16, device="cuda")
    settings = {"lines.number": 1, "lines.anchors": 2, "lines.radius": 0.5}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    nlbench.run(replace(request, settings=settings), tmp_path / "run")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**26


def test_run_of_all_measures_agrees_with_cpu(tmp_path):
    settings = {"lines.number": 1, "lines.anchors": 2, "lines.radius": 0.5}
    settings |= {"local-complexity.samples": 4, "local-complexity.traced": 1}
    request = Request(("*",), ("vgg8",), samples=160, settings=settings)
    here, there = (
        nlbench.run(replace(request, device=device), tmp_path / device)
        for device in ("cpu", "cuda")
    )
    assert len(there.records) == len(here.records)
    assert_alike(there, here)


def test_padded_language_model_agrees_with_cpu():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    mask = torch.ones(16, 12, dtype=torch.long)
    mask[::2, 8:] = 0
    inputs = {"input_ids": torch.randint(1, 64, (16, 12)), "attention_mask": mask}
    measures = ["linearity", "influence", "substitution", "cka", "norm"]
    settings = {"sites.of": "blocks", "replacement.of": "blocks"}
    here = nlbench.evaluate(model, inputs, measures, settings=settings)
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    there = nlbench.evaluate(copy.deepcopy(model).cuda(), inputs, measures, settings=settings)
    assert_alike(there, here)


def test_weight_linearity_agrees_with_cpu():
    start, inputs = network(), torch.rand(40, 3, 32, 32)
    end = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in end.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    here = weight_linearity(start, end, inputs)
    there = weight_linearity(start.cuda(), end.cuda(), inputs.cuda())
    assert there.value == pytest.approx(here.value, rel=1e-6)
    assert there.kernel_distance == pytest.approx(here.kernel_distance, rel=1e-6)


@pytest.mark.parametrize(
    "command",
    [
        "remove --model vgg8 --samples 64 --fit-samples 64 --out out --device cuda",
        "linearize --model vgg8 --omega 0.01 --epochs 1 --out out --device cuda",
        "plane vgg8 --size 16 --out plane.png --device cuda",
        "train --model vgg8 --epochs 1 --out out.safetensors --device cuda",
        "check-measure affinity",
    ],
)
def test_command_works_on_the_gpu(command, tmp_path):
    command = [sys.executable, "-m", "nlbench.cli.app", *command.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


ON_CPU = """
import os, torch, nlbench
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
if {after}:
    torch.zeros(1, device="cuda")
child = os.fork() if {after} else 0
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
run = nlbench.evaluate(model, torch.rand(16, 4), ["norm", "nlc", "density"])
os._exit(bool(run.failed) or not {after} and torch.cuda.is_initialized())
"""


@pytest.mark.parametrize("after", [False, True])
def test_cpu_run_leaves_the_gpu_alone(after):
    # CUDA can't be taken into use in a process that was forked after it had been.
    done = subprocess.run([sys.executable, "-c", ON_CPU.format(after=after)], timeout=100)
    assert done.returncode == 0
