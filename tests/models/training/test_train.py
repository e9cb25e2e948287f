import csv
import json
import shutil
from dataclasses import replace

import pytest
from safetensors import safe_open

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.training.train import TrainingFolder, run_training
from nlbench.models.training.training_request import TrainingRequest, load_recipe, resolve_recipe
from nlbench.serialization.hashing import file_hash

QUICK = TrainingRequest(
    "vgg8",
    "synthetic",
    "vanilla",
    seed=3,
    changes={"epochs": 3, "batch_size": 16},
    options=(("size", 48), ("test_size", 16)),
    device="cpu",
)


def header(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def epochs(file):
    with file.with_suffix(".training").joinpath("epochs.csv").open() as table:
        return list(csv.DictReader(table))


def manifest(file):
    return json.loads((file.with_suffix(".training") / "manifest.json").read_text())


def stopped(request, file, after):
    def stop(epoch):
        if epoch.number == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(request, file, progress=stop)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    file = tmp_path_factory.mktemp("trained") / "net.safetensors"
    trained = run_training(QUICK, file, keep_epochs={1}, keep_every=2, command="nlbench train …")
    return file, trained


def test_a_finished_training_leaves_no_state(finished):
    file, _ = finished
    assert sorted(entry.name for entry in file.with_suffix(".training").iterdir()) == [
        "epoch0001.safetensors",
        "epoch0002.safetensors",
        "epochs.csv",
        "manifest.json",
    ]


def test_the_log_has_a_row_per_epoch(finished):
    file, trained = finished
    rows = epochs(file)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1]["test_accuracy"]) == trained.test_accuracy
    assert all(float(row["loss"]) > 0 for row in rows)


def test_the_log_has_training_accuracy_where_measured(finished):
    rows = epochs(finished[0])
    assert [row["train_accuracy"] for row in rows[:2]] == ["", ""]
    assert float(rows[2]["train_accuracy"]) == finished[1].train_accuracy
    assert all(0 <= float(row["running_accuracy"]) <= 1 for row in rows)
    assert "train_accuracy" not in header(
        finished[0].with_suffix(".training") / "epoch0001.safetensors"
    )


def test_the_manifest_records_what_decided_the_weights(finished):
    file, _ = finished
    content = manifest(file)
    assert content["command"] == "nlbench train …"
    assert content["request"]["options"] == [["size", 48], ["test_size", 16]]
    assert content["seeds"] == [3]
    assert content["recipe"]["learning_rate"] == 0.02
    assert content["environment"]["packages"]["torch"]
    assert content["result"]["file_hash"] == file_hash(file)
    kept = file.with_suffix(".training")
    assert content["checkpoints"] == {
        name: file_hash(kept / name) for name in ("epoch0001.safetensors", "epoch0002.safetensors")
    }


def test_kept_checkpoints_record_their_epoch(finished):
    file, _ = finished
    folder = file.with_suffix(".training")
    assert header(folder / "epoch0002.safetensors")["epochs"] == "2"
    assert header(file)["epochs"] == "3"
    accuracy = float(epochs(file)[1]["test_accuracy"])
    assert float(header(folder / "epoch0002.safetensors")["test_accuracy"]) == pytest.approx(
        accuracy, abs=1e-4
    )


def test_a_resumed_training_writes_the_same_file(finished, tmp_path):
    file = tmp_path / "net.safetensors"
    stopped(QUICK, file, 2)
    run_training(QUICK, file, resume=True, command="nlbench train …")
    assert file_hash(file) == file_hash(finished[0])
    assert epochs(file) == epochs(finished[0])
    assert len(manifest(file)["calls"]) == 2


def test_a_finished_training_is_not_repeated_on_resuming(finished):
    file, trained = finished
    before = file.stat().st_mtime_ns
    assert run_training(QUICK, file, resume=True) == trained
    assert file.stat().st_mtime_ns == before


def test_an_interrupted_training_is_not_overwritten(tmp_path):
    file = tmp_path / "net.safetensors"
    stopped(QUICK, file, 1)
    with pytest.raises(RequestError, match="--resume"):
        run_training(QUICK, file)


@pytest.mark.parametrize("resume", [False, True])
def test_another_request_does_not_overwrite_checkpoint(finished, resume):
    with pytest.raises(RequestError):
        run_training(replace(QUICK, seed=4), finished[0], resume=resume)


def test_training_starts_from_a_checkpoint(finished, tmp_path, monkeypatch):
    file = tmp_path / "more.safetensors"
    request = replace(QUICK, weights=str(finished[0]), changes={"epochs": 1, "batch_size": 16})
    run_training(request, file)
    assert float(epochs(file)[0]["loss"]) < float(epochs(finished[0])[0]["loss"])
    # The same start under another path is the same; another start is not.
    monkeypatch.chdir(finished[0].parent)
    before = file_hash(file)
    assert run_training(replace(request, weights=finished[0].name), file, resume=True).epochs == 1
    assert file_hash(file) == before
    with pytest.raises(RequestError):
        run_training(replace(request, weights=str(file)), file, resume=True)
    # Nor is another file under the same path the same.
    held = finished[0].read_bytes()
    try:
        finished[0].write_bytes(file.read_bytes())
        with pytest.raises(RequestError):
            run_training(request, file, resume=True)
    finally:
        finished[0].write_bytes(held)


def test_a_threshold_ends_training(tmp_path):
    changes = {**QUICK.changes, "until_train_accuracy": 0.01}
    early = run_training(replace(QUICK, changes=changes), tmp_path / "early.safetensors")
    assert (early.epochs, early.is_reached) == (1, True)
    changes = {**QUICK.changes, "epochs": 1, "until_loss": 1e-9}
    late = run_training(replace(QUICK, changes=changes), tmp_path / "late.safetensors")
    assert (late.epochs, late.is_reached) == (1, False)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [("vgg8", "vanilla"), ("resnet18-w64", "adam"), ("transformer-tiny", "translation")],
)
def test_a_model_names_the_recipe_that_suits_it(model, recipe):
    assert resolve_recipe(model) == recipe
    assert resolve_recipe(model, "noisy-labels") == "noisy-labels"


def test_every_model_names_a_registered_recipe():
    for name in registry.entries("models"):
        if "/" not in name:
            registry.find("recipes", resolve_recipe(name))


def test_label_noise_overrides_the_recipe():
    assert (
        load_recipe(TrainingRequest("vgg8", "digits", "vanilla", label_noise=0.2)).label_noise
        == 0.2
    )
    assert load_recipe(TrainingRequest("vgg8", "digits", "noisy-labels")).label_noise == 0.4


def test_a_foreign_file_is_not_overwritten_on_resuming(tmp_path):
    file = tmp_path / "mine.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(RequestError):
        run_training(QUICK, file, resume=True)
    assert file.read_bytes() == b"mine"


def test_training_killed_during_final_write_is_resumed(finished, tmp_path, monkeypatch):
    file = tmp_path / "net.safetensors"
    save = TrainingFolder.finish

    def killed(folder, result):
        file.write_bytes(b"half")
        (folder.path / ".state.x1.part").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingFolder, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        run_training(QUICK, file)
    monkeypatch.setattr(TrainingFolder, "finish", save)
    monkeypatch.setattr("nlbench.models.training.loop._Training.run_epoch", None)  # No epoch again.
    run_training(QUICK, file, resume=True, command="nlbench train …")
    assert file_hash(file) == file_hash(finished[0])
    assert {entry.name for entry in file.with_suffix(".training").iterdir()} == {
        "epochs.csv",
        "manifest.json",
    }


def copied(finished, folder):
    file = folder / "net.safetensors"
    shutil.copyfile(finished[0], file)
    shutil.copytree(finished[0].with_suffix(".training"), file.with_suffix(".training"))
    return file


@pytest.mark.parametrize(
    ("place", "value"),
    [(["result"], []), (["result"], 1e308), (["result"], {"a": 1}), (["result", "scores"], None),
     (["request"], "x"), (["calls"], [7]), (["calls"], [{"seconds": "x"}]), (["checkpoints"], [1]),
     (["start"], {})],
)  # fmt: skip
def test_tampered_manifest_raises_in_one_line(finished, tmp_path, place, value):
    file = copied(finished, tmp_path)
    content = part = manifest(file)
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (file.with_suffix(".training") / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=r"manifest\.json") as caught:
        run_training(QUICK, file, resume=True)
    assert "\n" not in str(caught.value)


def test_damaged_checkpoint_is_retrained_after_removal(finished, tmp_path):
    file = copied(finished, tmp_path)
    file.write_text("weights go here\n")
    with pytest.raises(RequestError):
        run_training(QUICK, file, resume=True)
    file.unlink()
    run_training(QUICK, file, resume=True, command="nlbench train …")
    assert file_hash(file) == file_hash(finished[0])


def test_interrupted_training_on_other_data_is_not_resumed(tmp_path):
    file = tmp_path / "net.safetensors"
    stopped(QUICK, file, 1)
    other = replace(QUICK, options=(*QUICK.options, ("seed", 7)))
    with pytest.raises(RequestError):
        run_training(other, file, resume=True)


@pytest.mark.parametrize("error", [RuntimeError("overflow"), KeyboardInterrupt()])
def test_a_training_without_an_epoch_leaves_no_folder(tmp_path, monkeypatch, error):
    def fail(*arguments, **more):
        raise error

    monkeypatch.setattr("nlbench.models.training.train.train", fail)
    with pytest.raises(type(error)):
        run_training(QUICK, tmp_path / "net.safetensors")
    assert list(tmp_path.iterdir()) == []
