"""Orders of removal, curves, and the command."""

import csv
import errno
import json
from functools import partial

import numpy as np
import pytest
import torch
from pretend_cuda import DEVICE, PretendCuda
from torch import nn

import nlbench
import nlbench.reports
from nlbench.errors import RequestError
from nlbench.models.removal.curve import (
    Removal,
    Step,
    area_under,
    refitted_maps,
    removal_order,
    run_removal,
    weights_of_calls,
)
from nlbench.probes.replacement import find_calls
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.LeakyReLU(0.9), nn.Linear(6, 5), nn.Tanh(),
        nn.Linear(5, 3),
    ).eval()  # fmt: skip


def removal(model, labels=None):
    return Removal(model, find_calls(model, INPUTS), INPUTS, INPUTS, labels)


def test_later_maps_are_fitted_after_earlier_ones(model):
    calls = find_calls(model, INPUTS)
    maps = refitted_maps(model, calls[:2], INPUTS)
    with torch.no_grad():
        x = model[0](INPUTS)
        lines = [np.polyfit(x[:, c], x[:, c].relu(), 1) for c in range(8)]
        slope, bias = torch.tensor(np.array(lines)).float().T
        y = model[2](x * slope + bias)
        lines = np.array([np.polyfit(y[:, c], model[3](y)[:, c], 1) for c in range(6)])
    np.testing.assert_allclose(maps["1"].weight, slope, atol=1e-5)
    np.testing.assert_allclose(maps["3"].weight, lines[:, 0], atol=1e-5)
    np.testing.assert_allclose(maps["3"].bias, lines[:, 1], atol=1e-5)


def test_curve_ends_at_an_affine_network(model):
    steps = removal(model).curve(["3", "5", "1"])
    assert [step.removed for step in steps] == ["", "3", "5", "1"]
    assert steps[0].kl == 0
    assert 0 < steps[1].kl < steps[-1].kl
    assert steps[-1].remaining == {"calls": 0, "units": 0, "positions": 0, "flops": 0}
    assert steps[1].remaining["units"] == pytest.approx((8 + 5) / 19)


def test_weights_are_those_of_the_architecture(model):
    weights = weights_of_calls(model, find_calls(model, INPUTS), INPUTS[:2])
    assert weights["units"] == {"1": 8, "3": 6, "5": 5}
    # Two floating-point operations a multiplication, for two samples.
    assert weights["flops"] == {"1": 4 * 4 * 8, "3": 4 * 8 * 6, "5": 4 * 6 * 5}


def test_positions_of_resnet18_are_those_that_papers_count():
    # 557,056 ReLUs at 32x32: D. Jha et al., "DeepReDuce", ICML 2021, table 1.
    from torchvision.models import resnet18

    network = resnet18(num_classes=10)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1)
    network.maxpool = nn.Identity()
    inputs = torch.zeros(2, 3, 32, 32)
    network.eval()
    weights = weights_of_calls(network, find_calls(network, inputs), inputs)
    assert sum(weights["positions"].values()) == 557_056


def test_accuracy_and_loss_are_those_of_remaining_network(model):
    from nlbench.models.removal.network import network_with_maps

    labels = torch.arange(60) % 3
    curve = removal(model, labels)
    network = network_with_maps(model, curve.maps(["5", "1"]), INPUTS)
    step = curve.step(["5", "1"])
    with torch.no_grad():
        outputs = network(INPUTS)
    assert step.accuracy == pytest.approx(float((outputs.argmax(1) == labels).float().mean()))
    assert step.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), rel=1e-5)


def test_steps_of_probabilities_are_those_of_logits(model):
    labels = torch.arange(60) % 3
    expected = removal(model, labels).step(["5"])
    step = removal(nn.Sequential(*model, nn.Softmax(-1)), labels).step(["5"])
    assert step.accuracy == expected.accuracy
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.kl == pytest.approx(expected.kl, rel=1e-4)


def test_ignored_labels_do_not_count(model):
    labels = torch.arange(60) % 3
    half = torch.where(torch.arange(60) < 30, labels, -100)
    whole = Removal(model, find_calls(model, INPUTS), INPUTS, INPUTS[:30], labels[:30])
    some, all_of_half = removal(model, half).step(["5"]), whole.step(["5"])
    assert some.accuracy == pytest.approx(all_of_half.accuracy)
    assert some.loss == pytest.approx(all_of_half.loss)


@pytest.mark.parametrize(
    ("outputs", "labels", "shape"),
    [(1, None, r"\(60, 1\)"), (3, torch.zeros(60, 2).long(), r"\(60, 2\)")],
)
def test_non_logit_outputs_raise(outputs, labels, shape):
    with pytest.raises(RequestError, match=shape):
        removal(nn.Sequential(nn.Linear(4, outputs), nn.Tanh()), labels)


def test_area_is_that_of_numpy():
    lefts, values = [1.0, 0.7, 0.2, 0.0], [0.9, 0.8, 0.5, 0.1]
    steps = [Step("", {"units": u}, v, 0.0, None) for u, v in zip(lefts, values, strict=True)]
    expected = np.trapezoid(values[::-1], lefts[::-1])
    assert area_under(steps, "accuracy", "units") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("criterion", "order"), [("depth", ["5", "3", "1"]), ("size", ["5", "3", "1"])]
)
def test_simple_orders(model, criterion, order):
    assert removal_order(criterion, model, find_calls(model, INPUTS), INPUTS, None) == order


def test_random_orders_follow_the_seed(model):
    calls = find_calls(model, INPUTS)
    orders = {tuple(removal_order("random", model, calls, INPUTS, None, seed=s)) for s in range(30)}
    assert len(orders) == 6


@pytest.mark.parametrize("criterion", ["affinity", "substitution", "r2", "norm", "cka"])
def test_most_nearly_affine_call_is_removed_first(model, criterion):
    order = removal_order(criterion, model, find_calls(model, INPUTS), INPUTS, None)
    assert order[0] == "3"


@pytest.mark.parametrize("criterion", ["afinity", "absdev"])
def test_wrong_criteria_are_refused(model, criterion):
    with pytest.raises(RequestError, match=f"--by: .*{criterion}"):
        removal_order(criterion, model, find_calls(model, INPUTS), INPUTS, None)


@pytest.fixture
def command(run_command):
    return partial(run_command, "remove", "--model", "vgg8")


def test_command_writes_a_network_that_run_measures(tmp_path, command):
    arguments = ["--by", "depth", "--samples", "64", "--fit-samples", "64"]
    code, out, error = command(*arguments, "--out", str(tmp_path), "--json")
    assert code == 0, error
    assert len(json.loads(out)) == 8
    file = tmp_path / "left.safetensors"
    run = nlbench.run(
        nlbench.Request(
            ("accuracy", "affinity"), ("vgg8",), ("digits",), weights=(str(file),), samples=64
        ),
        tmp_path / "run",
    )
    accuracy, affinity = (run[name] for name in ("accuracy", "affinity"))
    with (tmp_path / "curve.csv").open() as lines:
        written = list(csv.DictReader(lines))
    assert float(written[4]["accuracy"]) == pytest.approx(accuracy.summary["value"], abs=1e-6)
    assert len(affinity.values) == 3
    page = (tmp_path / "curve.html").read_text(encoding="utf-8")
    assert all(row["removed"] in page for row in written)
    assert "left.safetensors keeps 3 of 7 calls" in page
    code, _, error = command("--weights", str(file))
    assert code == 2
    assert "already transformed (remove)" in error


def test_curve_is_kept_without_a_page(tmp_path, command, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(nlbench.reports, "write_removal", fail)
    few = ["--by", "depth", "--samples", "32", "--fit-samples", "32"]
    code, _, error = command(*few, "--out", str(tmp_path / "out"))
    assert code == 2
    assert "No space left" in error
    assert (tmp_path / "out" / "curve.csv").read_text().startswith("removed,")


def test_printed_fractions_are_percentages(tmp_path, command):
    arguments = ["--by", "depth", "--samples", "32", "--fit-samples", "32"]
    code, out, error = command(*arguments, "--out", str(tmp_path))
    assert code == 0, error
    assert "85.7 %" in out
    assert "0.857143" not in out


def test_command_writes_a_language_model_without_some_mlps(tmp_path, command):
    text = ("--model", "gpt-small", "--data", "text/python", "--set", "text.windows=24")
    arguments = ("--of", "mlp", "--by", "depth", "--keep", "0.7", "--no-curve")
    code, out, error = command(*text, *arguments, "--out", str(tmp_path), "--json")
    assert code == 0, error
    whole, left = json.loads(out)
    assert (whole["left_calls"], whole["kl"]) == (1, 0)
    assert left["left_calls"] <= 0.7
    file = tmp_path / "left.safetensors"
    subject = load_subject(
        SubjectSpec("gpt-small", str(file), "text/python", 0, options={"windows": 24}),
        torch.device("cpu"),
    )
    with torch.no_grad():
        logits = subject.model(subject.inputs).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, subject.labels.flatten()).item()
    assert loss == pytest.approx(left["loss"], abs=2e-6)
    assert abs(left["loss"] - whole["loss"]) > 1e-5


NESTED = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__()
        for name in ("0", "1"):
            self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))

data = torch.randn(64, 4)
"""


def test_modules_inside_removed_modules_are_left_out(tmp_path, run_command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NESTED)
    source = ("--model", "net.py:Net", "--data", "net.py:data")
    code, out, error = run_command(
        "remove", *source, "--of", "modules:*", "--by", "depth", "--json"
    )
    assert code == 0, error
    rows = json.loads(out)
    assert [row["removed"] for row in rows[1:]] == ["1", "0"]
    assert [row["left_flops"] for row in rows] == [1, 0.5, 0]
    assert "6 modules inside other selected modules left out" in error


def test_folder_with_files_is_refused_before_any_work(tmp_path, command, monkeypatch):
    monkeypatch.setattr("nlbench.subjects.load.load_subject", None)
    for name in ("left.safetensors", "curve.csv", "notes.txt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(b"mine")
        code, _, error = command("--by", "depth", "--out", str(folder))
        assert (code, error.count("\n")) == (2, 1)
        assert "already exists and is not empty" in error
        assert [(folder / name).read_bytes()] == [file.read_bytes() for file in folder.iterdir()]


@pytest.mark.parametrize("name", ["", "kept.safetensors", "x/kept.pt", "curve.csv"])
def test_a_folder_named_like_a_file_is_refused(name, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = command("--by", "depth", "--out", name)
    assert code == 2
    assert error == f"nlbench: --out: expected a folder's name, got '{name}'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_second_criterion_keeps_the_first_result(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = []
    for criterion in ("depth", "size"):
        arguments = ("--samples", "8", "--fit-samples", "8", "--no-curve", "--by", criterion)
        code, _, error = command(*arguments)
        assert code == 0, error
        written.append((tmp_path / "vgg8-removed" / "left.safetensors").read_bytes())
    assert written[0] == written[1]
    assert (tmp_path / "vgg8-removed-2" / "left.safetensors").is_file()


def test_samples_are_moved_to_device_of_network():
    splits = ["train", "test"]
    specs = [SubjectSpec("vgg8", "auto", "digits", 0, samples=16, split=split) for split in splits]
    options = {"keep": 0.5, "share": "calls", "reverse": False, "seed": 0, "settings": {}}
    options |= {"of": "activations", "compute_curve": False}

    def rows(device):
        return run_removal(*(load_subject(s, device) for s in specs), "depth", **options).rows()

    expected = rows("cpu")
    with PretendCuda():
        assert rows(DEVICE) == expected


def test_command_keeps_at_most_a_number_of_positions(tmp_path, command):
    arguments = ["--by", "size", "--samples", "32", "--fit-samples", "32", "--no-curve"]
    out = str(tmp_path)
    code, text, error = command(*arguments, "--keep-relus", "3000", "--out", out, "--json")
    assert code == 0, error
    whole, left = json.loads(text)
    assert whole["left_positions"] == 1
    assert left["positions"] <= 3000 < whole["positions"]
    assert left["left_positions"] == pytest.approx(left["positions"] / whole["positions"], abs=1e-6)
