import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accuracies import accuracy
from torch import nn

import nlbench
from nlbench.errors import RequestError
from nlbench.models.networks import vgg
from nlbench.models.training import parallel
from nlbench.models.training.linearise import LinearisationRequest, linearise
from nlbench.models.training.training_request import TrainingRequest
from nlbench.progress import ProgressMonitor
from nlbench.store.locked_folder import LockedFolder
from nlbench.subjects.load import load_dataset, load_subject
from nlbench.subjects.spec import SubjectSpec

CHANGES = {"epochs": 2, "batch_size": 16, "slope_rate": 300.0}
OPTIONS = (("size", 48), ("test_size", 16))


def request(**changes):
    given = {
        "model": "vgg8",
        "data": "synthetic",
        "mode": "post-training",
        "base_recipe": "vanilla",
        "omegas": (0.0, 0.1),
        "changes": CHANGES,
        "options": OPTIONS,
        "device": "cpu",
    }
    given |= changes
    own = {name: given.pop(name) for name in ("base_recipe", "omegas", "seeds", "control")
           if name in given}  # fmt: skip
    given["changes"] = {**given["changes"], "layerwise": given.pop("layerwise", False)}
    training = TrainingRequest(recipe=given.pop("mode"), **{"weights": "auto", **given})
    return LinearisationRequest(training, **own)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights to start from, trained for a moment."""
    from nlbench.models.training.train import run_training

    file = tmp_path_factory.mktemp("start") / "start.safetensors"
    run_training(
        TrainingRequest("vgg8", "synthetic", "vanilla", options=OPTIONS, changes={"epochs": 1}),
        file,
    )
    return str(file)


@pytest.fixture(scope="module")
def made(tmp_path_factory, start):
    folder = tmp_path_factory.mktemp("made") / "lin"
    return linearise(request(weights=start, control=True), folder, command="nlbench linearize …")


def values(run, measure, statistic="value"):
    table = run.scores
    rows = table[
        (table["measure"] == measure) & (table["place"] == "") & (table["statistic"] == statistic)
    ]
    return dict(zip(rows["weights"], rows["value"], strict=True))


REFERENCE, NONE, MOST = (
    f"{name}.safetensors" for name in ("start", "omega0-seed0", "omega0.1-seed0")
)


def test_each_omega_and_control_is_a_subject(made):
    assert list(values(made, "accuracy")) == [
        REFERENCE,
        NONE,
        "random-omega0-seed0.safetensors",
        MOST,
        "random-omega0.1-seed0.safetensors",
    ]


def test_accuracy_records_its_number_of_samples(made):
    rows = made.scores[made.scores["measure"] == "accuracy"]
    assert set(rows["n"]) == {16}


def test_penalty_makes_units_linear_and_paths_shorter(made):
    linear, lengths = values(made, "linear-units"), values(made, "pathlength")
    assert linear[REFERENCE] == 0.0
    assert linear[NONE] < linear[MOST]
    assert lengths[REFERENCE] == pytest.approx(7)  # VGG8 is a chain of seven ReLUs
    assert lengths[MOST] < lengths[NONE]


def test_the_control_has_as_many_linear_units(made):
    linear = values(made, "linear-units")
    assert linear[f"random-{MOST}"] == pytest.approx(linear[MOST])


def test_units_by_layer_add_up(made):
    table = made.scores
    rows = table[(table["measure"] == "linear-units") & (table["weights"] == MOST)]
    layers = rows[rows["place"] != ""]
    for statistic in ("nonlinear", "units"):
        total = layers[layers["statistic"] == statistic]["value"].sum()
        assert total == values(made, "linear-units", statistic)[MOST]
    assert values(made, "linear-units", "units")[MOST] == 292


def test_subjects_record_their_training(made):
    about = {s["weights"]: s["weights_metadata"] for s in made.manifest["subjects"]}
    assert {k: about[MOST][k] for k in ("recipe", "omega", "seed")} == {
        "recipe": "post-training", "omega": "0.1", "seed": "0",
    }  # fmt: skip
    assert about[f"random-{MOST}"]["random"] == "true"
    assert "omega" not in about[REFERENCE]
    trained = float(about[MOST]["test_accuracy"])
    assert values(made, "accuracy")[MOST] == pytest.approx(trained, abs=1e-4)


def test_accuracy_is_of_the_whole_test_split(tmp_path, start):
    options = (("size", 48), ("test_size", 600))
    once = {"weights": start, "omegas": (0.0,), "changes": {**CHANGES, "epochs": 1}}
    run = linearise(request(**once, options=options), tmp_path / "lin")
    spec = SubjectSpec("vgg8", start, "synthetic", options=options)
    subject = load_subject(spec, torch.device("cpu"))
    whole = accuracy(subject.model, "test", load_dataset("synthetic", dict(options)))
    assert values(run, "accuracy")[REFERENCE] == whole


def test_a_checkpoint_is_a_subject_of_other_measures(made):
    file = str(made.path / "checkpoints" / "omega0.1-seed0.safetensors")
    import torch

    subject = load_subject(
        SubjectSpec("vgg8", file, "synthetic", options=OPTIONS), torch.device("cpu")
    )
    run = nlbench.evaluate(subject.model, subject.inputs, ["norm"])
    assert run.records[0].result.status == "ok"


def test_finished_networks_are_not_trained_again(made, start):
    files = sorted((made.path / "checkpoints").glob("*.safetensors"))
    before = [file.stat().st_mtime_ns for file in files]
    again = linearise(request(weights=start, control=True), made.path)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert again.scores.equals(made.scores)


def test_an_interrupted_grid_resumes(tmp_path, start):
    class Stop:
        def __init__(self, after):
            self.left = after

        def begin(self, steps):
            self.steps = steps

        def step(self, what):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

        def warn(self, message):
            pass

    folder = tmp_path / "lin"
    with pytest.raises(KeyboardInterrupt):
        linearise(request(weights=start), folder, progress=Stop(3))
    kept = folder / "checkpoints" / NONE
    before = kept.stat().st_mtime_ns
    assert not (folder / "manifest.json").exists()
    run = linearise(request(weights=start), folder, progress=Stop(100))
    assert list(values(run, "accuracy")) == [REFERENCE, NONE, MOST]
    assert kept.stat().st_mtime_ns == before


def test_networks_are_trained_first_where_none_ship(tmp_path, monkeypatch):
    from nlbench.models.training import recipes

    for name in ("vanilla", "adam"):
        quick = replace(getattr(recipes, name), epochs=1)
        monkeypatch.setattr(recipes, name, quick)
    options = {"omegas": (0.0,), "changes": {**CHANGES, "epochs": 1}}
    run = linearise(request(**options), tmp_path / "lin")
    assert list(values(run, "accuracy")) == ["reference-seed0.safetensors", NONE]
    assert (tmp_path / "lin/checkpoints/reference-seed0.safetensors").is_file()
    with pytest.raises(RequestError, match="recipe"):
        linearise(request(**options, base_recipe="adam"), tmp_path / "lin")


def test_network_without_relu_is_refused_before_training(tmp_path):
    refused = request(model="torchvision/mobilenet_v2", base_recipe="vanilla")
    with pytest.raises(RequestError, match="relu6"):
        linearise(refused, tmp_path / "lin")
    assert not (tmp_path / "lin").exists()


class RecordingMonitor(ProgressMonitor):
    def __init__(self):
        super().__init__()
        self.lines = []

    def warn(self, message):
        self.lines.append(message)


def test_other_activations_are_warned_of_once(tmp_path, start, monkeypatch):
    def mixed(in_channels=3, num_classes=10):
        layers = nn.Linear(in_channels * 1024, 4), nn.ReLU(), nn.SiLU(), nn.Linear(4, num_classes)
        return nn.Sequential(nn.Flatten(), *layers)

    monkeypatch.setattr(vgg, "vgg8", mixed)
    monitor = RecordingMonitor()
    linearise(request(omegas=(0.0,), mode="from-start"), tmp_path / "lin", progress=monitor)
    linearise(request(omegas=(0.1,), mode="from-start"), tmp_path / "lin", progress=monitor)
    message = "vgg8: only ReLUs are linearised; 1 call of silu remains"
    assert monitor.lines == [message]


def test_modes_and_close_omegas_use_one_folder(made, tmp_path, start):
    folder = tmp_path / "lin"
    shutil.copytree(made.path, folder)
    run = linearise(request(mode="from-start", omegas=(0.1, 0.1000001)), folder)
    recipes = {s["weights"]: s["weights_metadata"]["recipe"] for s in run.manifest["subjects"]}
    assert recipes[MOST] == "post-training"
    assert recipes[f"start-{MOST}"] == "from-start"
    assert len(list((folder / "checkpoints").glob("start-omega0.1*.safetensors"))) == 2


def test_a_folder_of_another_training_is_refused(made, start):
    changes = {**CHANGES, "epochs": 3}
    with pytest.raises(RequestError, match="epochs"):
        linearise(request(weights=start, changes=changes), made.path)


def test_two_processes_never_train_into_one_folder(tmp_path, start):
    folder = tmp_path / "lin" / "checkpoints" / "omega0-seed0.training"
    folder.mkdir(parents=True)
    with LockedFolder(folder).locked(), pytest.raises(RequestError):
        linearise(request(weights=start), tmp_path / "lin")


def test_cells_of_a_diverged_training_are_skipped(tmp_path, start):
    monitor = RecordingMonitor()
    changes = {**CHANGES, "epochs": 1, "learning_rate": 1e30}
    run = linearise(
        request(weights=start, omegas=(0.0,), changes=changes), tmp_path / "lin", progress=monitor
    )
    assert any("omega0-seed0: " in line and "learning rate" in line for line in monitor.lines)
    table = run.scores[run.scores["measure"] == "accuracy"]
    rows = zip(table["weights"], table["status"], table["reason"], strict=True)
    found = {Path(weights).name: (status, reason) for weights, status, reason in rows}
    status, reason = found.pop(NONE)
    assert status == "skipped"
    assert "their training failed: " in reason
    assert "learning rate" in reason
    assert found == {REFERENCE: ("ok", "")}


def test_dependents_of_a_failed_training_are_skipped(tmp_path, monkeypatch):
    from nlbench.models.training import recipes

    quick = nlbench.registry.load("recipes", "vanilla")
    monkeypatch.setattr(recipes, "vanilla", type(quick)("vanilla", 1, batch_size=16))
    made = parallel.run_training

    def failing(training, file, **options):
        if training.recipe == "vanilla" and training.seed == 0:
            training = replace(training, changes={"learning_rate": 1e30})
        return made(training, file, **options)

    monkeypatch.setattr(parallel, "run_training", failing)
    wanted = request(omegas=(0.0,), seeds=(0, 1), control=True, changes={**CHANGES, "epochs": 1})
    run = linearise(wanted, tmp_path / "lin")
    table = run.scores[(run.scores["measure"] == "accuracy") & (run.scores["statistic"] == "value")]
    reasons = {Path(w).name: r for w, r in zip(table["weights"], table["reason"], strict=True)}
    assert len(reasons) == 6
    for name, reason in reasons.items():
        if "seed1" in name:
            assert reason == ""
        else:
            assert "learning rate" in reason, name
    assert "needs reference-seed0" in reasons[NONE]


def test_layer_slopes_make_whole_layers_linear(tmp_path, start):
    run = linearise(request(weights=start, omegas=(0.1,), layerwise=True), tmp_path / "lin")
    table = run.scores
    layers = table[(table["weights"] == MOST) & (table["place"] != "")]
    shares = layers[(layers["measure"] == "linear-units") & (layers["statistic"] == "value")]
    assert set(shares["value"]) <= {0.0, 1.0}
    lengths = values(run, "pathlength")[MOST]
    assert lengths == pytest.approx(7 - sum(shares["value"]))  # VGG8 is a chain.


def test_non_run_folder_raises(tmp_path, start):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError):
        linearise(request(weights=start), tmp_path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"omegas": (-1.0,)}, "omega"),
        ({"control": True, "layerwise": True}, "per channel"),
        ({"control": True, "mode": "from-start"}, "--post-training"),
        ({"weights": "init"}, "--from-start"),
        ({"weights": "x", "mode": "from-start"}, "--from-start"),
    ],
)
def test_an_invalid_request_is_refused(changes, name):
    with pytest.raises(RequestError, match=name):
        request(**changes)


def test_the_manifest_is_that_of_a_run(made):
    content = json.loads((made.path / "manifest.json").read_text())
    assert content["calls"][0]["command"] == "nlbench linearize …"
    assert set(content["measures"]) == {"accuracy", "linear-units", "pathlength"}


def test_a_translator_is_linearised(tmp_path):
    from nlbench.models.training.train import run_training

    options = (("largest", 99), ("test", 10), ("train", 20))
    file = tmp_path / "words.safetensors"
    run_training(
        TrainingRequest(
            "transformer-tiny", "number-words", "translation", changes={"epochs": 1},
            options=options,
        ),
        file,
    )  # fmt: skip
    training = TrainingRequest(
        "transformer-tiny", "number-words", "post-training", weights=str(file),
        changes={"epochs": 1}, options=options,
    )  # fmt: skip
    grid = LinearisationRequest(training, "translation", omegas=(1.0,))
    run = linearise(grid, tmp_path / "lin")
    accuracies = values(run, "accuracy")
    assert all(0 <= accuracy <= 1 for accuracy in accuracies.values())
    assert len(accuracies) == 2
    about = run.manifest["subjects"][-1]["weights_metadata"]
    assert float(about["bleu"]) >= 0
    trained = float(about["test_accuracy"])
    assert accuracies["omega1-seed0.safetensors"] == pytest.approx(trained, abs=1e-4)
