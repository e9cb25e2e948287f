import json

import pytest
import torch
from distributions import write_distribution
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from nlbench import registry
from nlbench.cli.app import app
from nlbench.cli.listing import traceability
from nlbench.errors import RequestError
from nlbench.subjects.load import load_dataset


def listed(*arguments):
    result = CliRunner().invoke(app, ["list", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments):
    result = CliRunner().invoke(app, ["list", *arguments])
    assert isinstance(result.exception, RequestError)
    return str(result.exception)


def test_a_family_is_one_line_with_its_count():
    rows = {row["name"]: row["description"] for row in listed("models")}
    assert rows["torchvision/*"].startswith("80: ")
    assert "timm/*" in rows
    assert "vgg8" in rows
    assert not any("/" in name and not name.endswith("/*") for name in rows)


def test_a_glob_lists_the_members_it_matches():
    names = [row["name"] for row in listed("models", "--model", "torchvision/vgg1?,vgg8")]
    assert names == ["vgg8", *(f"torchvision/vgg{n}" for n in (11, 13, 16, 19))]


@pytest.mark.slow
def test_everything_is_every_member_of_every_family():
    timm = pytest.importorskip("timm")
    names = {row["name"] for row in listed("models", "--all")}
    assert {f"timm/{name}" for name in timm.list_models()} <= names
    assert sum(name.startswith("torchvision/") for name in names) == 80


def test_numbers_in_names_are_sorted_as_numbers():
    names = [row["name"] for row in listed("models", "--model", "resnet18-w*")]
    assert names == [f"resnet18-w{width}" for width in (4, 8, 16, 24, 32, 64)]


def test_unmatched_glob_is_refused():
    assert "no model matches 'torchvision/zz*'" in refused("models", "--model", "torchvision/zz*")


@pytest.mark.parametrize("flag", ["--all", "--traceable"])
def test_flags_for_models_are_refused_elsewhere(flag):
    assert refused("datasets", flag).startswith(f"list datasets has no option {flag}")


def test_traceable_shows_the_first_preventing_operation():
    rows = {
        row["name"]: row
        for row in listed(
            "models", "--traceable", "--model", "vgg8,redshift-mlp-tanh,torchvision/convnext_tiny"
        )
    }
    assert (rows["vgg8"]["traceable"], rows["vgg8"]["reason"]) == ("yes", "")
    assert rows["redshift-mlp-tanh"]["input"] == "2"
    assert rows["redshift-mlp-tanh"]["traceable"] == "no"
    assert rows["redshift-mlp-tanh"]["reason"].startswith("tanh at 1: ")
    assert rows["torchvision/convnext_tiny"]["reason"].startswith("layer_norm at features.0.1: ")


def test_model_with_fixed_size_is_listed_at_it():
    (row,) = traceability(["torchvision/alexnet"], load_dataset("digits"))
    assert (row["traceable"], row["input"]) == ("yes", "3×224×224")


def test_failing_model_is_listed_as_unknown(monkeypatch):
    class Failing(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError("not\nme")

    def broken(in_channels=3):
        raise RuntimeError("can't be built")

    mine = {"failing": Failing, "broken": broken, "fine": nn.ReLU}
    load = registry.load
    monkeypatch.setattr(
        registry, "load", lambda group, name: mine[name] if name in mine else load(group, name)
    )
    told = []
    rows = traceability(mine, load_dataset("digits"), told.append)
    assert [row["traceable"] for row in rows] == ["unknown", "unknown", "yes"]
    assert rows[0]["reason"] == "ZeroDivisionError: not me"
    assert rows[1]["reason"] == "RuntimeError: can't be built"
    assert told == list(mine)


def test_builder_without_meta_support_is_built_on_cpu(monkeypatch):
    def weighing(in_channels=3):
        layer = nn.Conv2d(in_channels, 1, 1)
        with torch.no_grad():
            layer.weight /= layer.weight.norm().item()
        return layer

    load = registry.load
    monkeypatch.setattr(
        registry, "load", lambda group, name: weighing if name == "w" else load(group, name)
    )
    assert traceability(["w"], load_dataset("digits"))[0]["traceable"] == "yes"


@pytest.mark.slow
def test_traceable_families_of_torchvision():
    # Others in probes/lines/test_families.py.
    answers = {"alexnet": "yes", "densenet121": "yes", "googlenet": "yes", "mnasnet0_5": "yes",
               "regnet_x_400mf": "yes", "vgg11_bn": "yes", "swin_v2_t": "no"}  # fmt: skip
    rows = traceability([f"torchvision/{name}" for name in answers], load_dataset("digits"))
    assert [row["traceable"] for row in rows] == list(answers.values())


def test_sites_have_the_resolution_of_a_run(monkeypatch, tmp_path):
    (tmp_path / "images").mkdir()
    for index in range(2):
        pixels = torch.zeros(20, 20, 3, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    first = listed("sites", "--model", "torchvision/inception_v3", "--data", "images")[0]
    assert first["shape"] == "32×149×149"  # of 299 pixels: (299 - 3) // 2 + 1


def test_other_places_than_activations_are_listed():
    rows = listed("sites", "--model", "torchvision/resnet18", "--of", "blocks")
    assert [row["site"] for row in rows] == [
        "layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1"
    ]  # fmt: skip
    assert {row["role"] for row in rows} == {"block"}


def test_probes_recipes_and_commands_are_listed():
    probes = listed("probes")
    assert {row["name"] for row in probes} >= {"sites", "lines", "graph", "function"}
    assert all(row["description"] for row in probes)
    assert {row["name"] for row in listed("recipes")} >= {"adam", "vanilla"}
    commands = {row["name"]: row["description"] for row in listed("commands")}
    assert {"run", "list", "show", "report", "merge", "doctor", "train"} <= commands.keys()
    assert all(commands.values())


def test_operations_are_listed_with_their_facts():
    rows = {row["operation"]: row for row in listed("ops")}
    assert {"relu", "conv2d", "max_pool2d"} <= rows.keys()
    assert rows["relu"]["kind"] == "relu"
    table = CliRunner().invoke(app, ["list", "ops"]).stdout.splitlines()
    assert table[0].split()[0] == "operation"


def test_malformed_entry_point_is_a_note(tmp_path, monkeypatch):
    write_distribution(tmp_path, "crooked", {"measures": ["odd = a b"]})
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(app, ["list", "measures"])
    assert result.exit_code == 2
    assert "affinity" in result.stdout
    assert "measure 'odd' of crooked 1.0 has the malformed entry point 'a b'" in result.stderr


def test_plugin_names_are_printed_as_plain_text(capsys):
    from nlbench.cli.common import note, print_table

    print_table([{"name": "evil\x1b[2J\u202e", "description": "two\nlines"}], as_json=False)
    note("red \x1b[31m" + "x" * 10000)
    out, err = capsys.readouterr()
    assert out == "evil[2J  two lines\n"
    assert err.startswith("nlbench: red [31mxxx")
    assert len(err) < 2100
