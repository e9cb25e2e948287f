import json
from functools import partial

import pytest

from nlbench.errors import NotFinite

TINY = ["--data", "synthetic", "--set", "synthetic.size=32", "--set", "synthetic.test_size=8"]
TINY += ["--model", "vgg8", "--epochs", "1", "--device", "cpu"]


@pytest.fixture
def train(run_command):
    return partial(run_command, "train")


def test_each_seed_gets_a_checkpoint(train, tmp_path):
    done = train(*TINY, "--seeds", "0,1", "--out", "nets")
    assert done.returncode == 0, done.stderr
    files = sorted(file.name for file in (tmp_path / "nets").glob("*.safetensors"))
    assert files == ["vgg8-seed0.safetensors", "vgg8-seed1.safetensors"]
    first, second = ((tmp_path / "nets" / name).read_bytes() for name in files)
    assert first != second


def test_recipe_of_the_model_is_followed_and_recorded(train, tmp_path):
    done = train(*TINY, "--model", "resnet18-w4", "--out", "x.safetensors", "--seeds", "0,00")
    assert done.returncode == 0, done.stderr
    assert "recipe          adam\n" in done.stdout
    manifest = json.loads((tmp_path / "x.training/manifest.json").read_text())
    assert manifest["request"]["recipe"] == manifest["recipe"]["name"] == "adam"
    assert manifest["seconds"] > 0
    assert manifest["seconds"] == pytest.approx(manifest["calls"][0]["seconds"])
    assert (tmp_path / "x.safetensors").is_file()  # One seed, although it is named twice.


def test_missed_threshold_exits_with_status_1(train, tmp_path):
    done = train(*TINY, "--until-train-accuracy", "1", "--out", "x.safetensors")
    assert done.returncode == 1
    assert "the threshold was not reached within 1 epochs" in done.stdout
    assert (tmp_path / "x.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0,1", "--out", "x.safetensors"], "expected a folder for 2 seeds"),
        (["--out", "x"], "expected a name ending in .safetensors"),
        (["--set", "digits.size=3", "--out", "x.safetensors"], "expected synthetic.OPTION=VALUE"),
        (["--omega", "1", "--out", "x.safetensors"], "has no setting 'omega'"),
        (["--recipe", "vanila", "--out", "x.safetensors"], "did you mean 'vanilla'"),
        (["--recipe", "post-training", "--out", "x.safetensors"], "starts from trained weights"),
        (["--model", "transformer-tiny", "--out", "x.safetensors"], "such as number-words"),
        (["--seed", "1", "--seeds", "2", "--out", "x.safetensors"], "can't be combined"),
        (["--seeds", "0,4294967296", "--out", "nets"], "the seed is 4294967296, expected 0 to"),
        (["--model", "vgg", "--seeds", "0,1", "--out", "nets"], "did you mean 'vgg8'"),
        (["--checkpoint-epochs", "1,3", "--out", "x.safetensors"], "3 is beyond the last epoch, 1"),
        (["--learning-rate", "nan", "--out", "x.safetensors"], "--learning-rate: expected at most"),
    ],
)
def test_invalid_command_leaves_nothing(train, tmp_path, arguments, message):
    done = train(*TINY, *arguments)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_data_without_labels_are_refused(train, tmp_path):
    done = train("--model", "redshift-mlp", "--data", "grid", "--out", "x.safetensors")
    assert done.returncode == 2
    assert "grid has no labels, so there is nothing to learn" in done.stderr
    assert not (tmp_path / "x.training").exists()


def test_divergence_is_reported_with_the_epoch(train, tmp_path):
    done = train(*TINY, "--learning-rate", "1e30", "--out", "x.safetensors")
    assert done.returncode == 1  # Nothing was wrong with the request.
    assert "after epoch 1" in done.stderr
    assert "a learning rate below 1e+30 may help" in done.stderr
    # The manifest records the failure and doesn't block another training.
    assert [p.name for p in tmp_path.rglob("*")] == ["x.training", "manifest.json"]
    assert "after epoch 1" in (tmp_path / "x.training" / "manifest.json").read_text()
    assert train(*TINY, "--out", "x.safetensors").returncode == 0


def test_resume_keeps_finished_seeds(train, tmp_path):
    train(*TINY, "--seeds", "0", "--out", "nets/vgg8-seed0.safetensors")
    before = (tmp_path / "nets" / "vgg8-seed0.safetensors").stat().st_mtime_ns
    done = train(*TINY, "--seeds", "0,1", "--out", "nets", "--resume")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "nets" / "vgg8-seed0.safetensors").stat().st_mtime_ns == before
    assert (tmp_path / "nets" / "vgg8-seed1.safetensors").is_file()


def test_a_seed_that_diverges_leaves_the_others_trained(train, tmp_path, monkeypatch):
    from nlbench.models.training import train as training

    whole = training.train

    def diverging(*arguments, seed, **more):
        if seed == 0:
            raise NotFinite("the training loss became nan in epoch 1")
        return whole(*arguments, seed=seed, **more)

    monkeypatch.setattr(training, "train", diverging)
    done = train(*TINY, "--seeds", "0,1", "--out", "nets")
    assert done.returncode == 1
    assert "vgg8-seed0.safetensors: the training loss became nan" in done.stderr
    files = [file.name for file in (tmp_path / "nets").glob("*.safetensors")]
    assert files == ["vgg8-seed1.safetensors"]


@pytest.mark.parametrize("resumed", [False, True])
def test_interrupt_reports_saved_state(train, tmp_path, monkeypatch, resumed):
    from nlbench.models.training import loop

    whole = loop._Training.run_epoch

    def stopped(training):
        if len(training.history) == 2:
            raise KeyboardInterrupt
        return whole(training)

    command = [*TINY, "--epochs", "3", "--out", "x.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(loop._Training, "run_epoch", stopped)
        done = train(*command)
    assert done.returncode == 130
    assert "finished epochs are in x.training" in done.stderr
    assert "--resume" in done.stderr
    assert (tmp_path / "x.training" / "state").is_file()
    done = train(*command, *(["--resume"] if resumed else []))
    assert done.returncode == (0 if resumed else 2)
    assert (tmp_path / "x.safetensors").is_file() == resumed
