import argparse
import collections
import hashlib
import json
import os
import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import torch
from checkpoints import SAFETENSORS, linear, network, save_with_torch
from safetensors.torch import load_file, save_file
from torch import nn

from nlbench.errors import RequestError
from nlbench.parsers import parse_paths
from nlbench.serialization.hashing import file_hash, state_hash
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights import load_weights, read_checkpoint, read_metadata, save_weights
from nlbench.subjects.weights_choice import choose_weights


def same_state(first, second):
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


def test_saved_files_load_bit_for_bit(tmp_path):
    first, second = network(), network()
    first[1].running_mean.fill_(0.25)
    path = tmp_path / "net.safetensors"
    save_weights(path, first, {"seed": "3", "data": "dîgits"})
    assert not same_state(first, second)
    assert load_weights(second, path) == {"seed": "3", "data": "dîgits"}
    assert same_state(first, second)
    assert state_hash(first) == state_hash(second)


def test_saved_files_are_read_by_safetensors(tmp_path):
    model = network()
    save_weights(tmp_path / "net.safetensors", model, {})
    found = load_file(tmp_path / "net.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[k], v) for k, v in model.state_dict().items())


def test_saving_twice_gives_the_same_bytes(tmp_path):
    model, metadata = network(), {name: name for name in "zyxwvutsrq"}
    save_weights(tmp_path / "a", model, metadata)
    save_weights(tmp_path / "b", model, dict(reversed(metadata.items())))
    content = (tmp_path / "a").read_bytes()
    assert content == (tmp_path / "b").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert list(json.loads(content[8 : 8 + length])["__metadata__"]) == sorted(metadata)


def test_tied_weights_survive_the_round_trip(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    first, second = tied(), tied()
    save_weights(tmp_path / "tied", first, {})
    load_weights(second, tmp_path / "tied")
    assert torch.equal(second[1].weight, first[0].weight)
    assert second[1].weight is second[0].weight


def test_saving_replaces_a_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_text("old")
    save_weights(path, linear(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]
    load_weights(linear(), path)


def test_unwritable_places_are_refused_in_one_line(tmp_path):
    path = tmp_path / "absent" / "net.safetensors"
    with pytest.raises(RequestError):
        save_weights(path, linear(), {})


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrap", [dict, lambda s: {"state_dict": s}, lambda s: {"model": s, "e": 3}]
)
def test_torch_save_files_load_nested_or_not(tmp_path, zipped, wrap):
    first, second = network(), network()
    content = wrap(first.state_dict())
    path = save_with_torch(tmp_path / "net.pt", content, _use_new_zipfile_serialization=zipped)
    assert load_weights(second, path) == {}
    assert same_state(first, second)


def test_the_content_decides_and_not_the_suffix(tmp_path):
    path = tmp_path / "net.pth"
    path.write_bytes(SAFETENSORS)
    assert load_weights(linear(), path) == {"seed": "4"}
    load_weights(linear(), save_with_torch(tmp_path / "a.safetensors", linear().state_dict()))


@pytest.mark.parametrize("start", [b"PK", b"\x80"])
def test_safetensors_is_recognised_with_any_header_length(tmp_path, start):
    length = int.from_bytes(SAFETENSORS[:8], "little")
    wanted = next(n for n in range(length, 2**17) if n.to_bytes(8, "little").startswith(start))
    header = SAFETENSORS[8 : 8 + length].ljust(wanted)
    path = tmp_path / "net"
    path.write_bytes(wanted.to_bytes(8, "little") + header + SAFETENSORS[8 + length :])
    assert load_weights(linear(), path) == {"seed": "4"}


def test_data_parallel_names_lose_their_prefix(tmp_path):
    first, second = linear(), linear()
    state = collections.OrderedDict(("module." + k, v) for k, v in first.state_dict().items())
    load_weights(second, save_with_torch(tmp_path / "net.pt", {"state_dict": state}))
    assert same_state(first, second)


def test_own_names_that_begin_with_module_stay(tmp_path):
    first, second = (nn.ModuleDict({"module": linear()}) for _ in range(2))
    load_weights(second, save_with_torch(tmp_path / "net.pt", first.state_dict()))
    assert same_state(first, second)


LAYOUTS = {
    "tutorial": lambda s: {"epoch": 3, "model_state_dict": s, "optimizer_state_dict": {"lr": 1}},
    "compiled": lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
    "compiled inside": lambda s: {k.replace("0.", "0._orig_mod.", 1): v for k, v in s.items()},
    "compiled, parallel": lambda s: {f"module._orig_mod.{k}": v for k, v in s.items()},
    "parallel, compiled": lambda s: {"model": {f"_orig_mod.module.{k}": s[k] for k in s}},
    "trainer": lambda s: {"state_dict": {f"net.{k}": v for k, v in s.items()}},
    "lightning": lambda s: {
        "pytorch-lightning_version": "2.4.0",
        "epoch": 1,
        "state_dict": {
            **{f"model.{k}": v for k, v in s.items()},
            "loss.weight": torch.ones(3),
            "metric.model.0.weight": torch.ones(1),
        },
    },
    "deeper": lambda s: {"state_dict": {f"trainer.student.{k}": v for k, v in s.items()}},
}


@pytest.mark.parametrize("wrap", LAYOUTS.values(), ids=LAYOUTS)
def test_checkpoints_load_as_people_write_them(tmp_path, wrap):
    first, second = network(), network()
    load_weights(second, save_with_torch(tmp_path / "net.pt", wrap(first.state_dict())))
    assert same_state(first, second)


def test_prefixes_and_other_names_go_together(tmp_path):
    first, second = linear(), linear()
    state = {f"net.old_{k}": v for k, v in first.state_dict().items()}
    path = save_with_torch(tmp_path / "net.pt", state)
    load_weights(second, path, rename=lambda name: name.removeprefix("old_"))
    assert same_state(first, second)


def test_checkpoints_of_two_networks_are_refused(tmp_path):
    model = network()
    state = {f"{k}.{n}": v for k in ("ema", "model") for n, v in model.state_dict().items()}
    content = {"pytorch-lightning_version": "2.4.0", "state_dict": state}
    with pytest.raises(RequestError, match=r"'ema\.\*'"):
        load_weights(network(), save_with_torch(tmp_path / "net.pt", content))


def test_extra_entries_are_refused_outside_trainer_checkpoints(tmp_path):
    model = network()
    state = {**{f"net.{n}": v for n, v in model.state_dict().items()}, "other": torch.ones(1)}
    before = state_hash(model)
    with pytest.raises(RequestError):
        load_weights(model, save_with_torch(tmp_path / "net.pt", state))
    assert state_hash(model) == before


def test_old_checkpoints_without_the_batch_counter_load(tmp_path):
    first, second = network(), network()
    second[1].num_batches_tracked.fill_(7)
    state = {k: v for k, v in first.state_dict().items() if "tracked" not in k}
    load_weights(second, save_with_torch(tmp_path / "old.pt", state))
    assert torch.equal(second[3].weight, first[3].weight)
    assert second[1].num_batches_tracked == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_take_the_models_precision(tmp_path, dtype):
    weight = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
    save_file({"weight": weight, "bias": torch.zeros(2, dtype=dtype)}, tmp_path / "net")
    model = linear()
    load_weights(model, tmp_path / "net")
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight.detach(), weight.to(torch.float32))


def test_file_hashes_are_the_sha256_of_the_bytes(tmp_path):
    content = os.urandom(3_000_001)
    (tmp_path / "file").write_bytes(content)
    assert file_hash(tmp_path / "file") == hashlib.sha256(content).hexdigest()
    assert file_hash(str(tmp_path / "file")) == hashlib.sha256(content).hexdigest()


def test_hashes_of_missing_files_are_refused(tmp_path):
    with pytest.raises(RequestError):
        file_hash(tmp_path / "absent")


def test_state_hashes_depend_on_values_names_and_types():
    class Holder(nn.Module):
        def __init__(self, name, tensor, persistent=True):
            super().__init__()
            self.register_buffer(name, tensor, persistent=persistent)

    variants = [
        Holder("a", torch.zeros(4)),
        Holder("b", torch.zeros(4)),
        Holder("a", torch.zeros(2, 2)),
        Holder("a", torch.zeros(4, dtype=torch.int32)),
        Holder("a", torch.tensor([0.0, 0.0, 0.0, -0.0])),
        Holder("a", torch.zeros(4, dtype=torch.bfloat16)),
        Holder("a", torch.zeros(()), persistent=False),
        Holder("a", torch.ones((), dtype=torch.bool), persistent=False),
    ]
    assert len({state_hash(variant) for variant in variants}) == len(variants)


def test_state_hashes_ignore_layout_and_order():
    first, second = nn.Module(), nn.Module()
    first.conv, first.head = nn.Conv2d(2, 3, 3), linear()
    second.head, second.conv = first.head, nn.Conv2d(2, 3, 3)
    second.conv.load_state_dict(first.conv.state_dict())
    second.conv.to(memory_format=torch.channels_last)
    assert not second.conv.weight.is_contiguous()
    assert state_hash(first) == state_hash(second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_state_hashes_are_equal_on_the_gpu():
    model = network()
    expected = state_hash(model)
    assert state_hash(model.to("cuda")) == expected


def test_a_checkpoint_loads_from_a_read_only_place(tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(SAFETENSORS)
    copy = shutil.copy(path, tmp_path / "copy")
    Path(copy).chmod(0o444)
    load_weights(linear(), copy)
    assert Path(copy).read_bytes() == SAFETENSORS


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("noisy-seed3.training/epoch0002.safetensors", "noisy-seed3/epoch0002.safetensors"),
        ("seed_4/last.pt", "seed_4/last.pt"),
        ("runs/last.pt", "last.pt"),
    ],
)
def test_checkpoints_are_named_after_their_training(tmp_path, monkeypatch, file, label):
    path = tmp_path / file
    path.parent.mkdir()
    path.touch()
    assert choose_weights(SubjectSpec("vgg8", str(path), "digits")).label == label
    monkeypatch.chdir(path.parent)
    assert choose_weights(SubjectSpec("vgg8", path.name, "digits")).label == label


def wrapped_averages(state):
    return torch.optim.swa_utils.AveragedModel(load_into(network(), state)).state_dict()


def load_into(model, state):
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        wrapped_averages,
        *(
            lambda state, key=key: {key: state, "epoch": 3}
            for key in ("ema", "net", "params", "weights", "network", "generator", "student")
        ),
        lambda state: {"generator": state, "discriminator": linear().state_dict()},
        lambda state: {"ema": {"module": state, "decay": 0.9}},
        lambda state: {
            "state_dict": state,
            "hyper_parameters": {
                "lr": np.float64(0.1),
                "depth": np.int64(3),
                "sizes": np.arange(3),
            },
        },
        lambda state: {"state_dict": state, "args": argparse.Namespace(lr=0.1, mode=np.str_("a"))},
        lambda state: {
            "state_dict": state,
            "args": argparse.Namespace(out=Path("runs/1"), data=PureWindowsPath("c:/x")),
            "time": [datetime.now(), datetime.now(UTC), date.today(), timedelta(1)],
        },
    ],
)
def test_trainers_checkpoints_load(tmp_path, wrap):
    source, target = network(), network()
    torch.save(wrap(source.state_dict()), tmp_path / "net.pt")
    load_weights(target, tmp_path / "net.pt")
    assert same_state(source, target)


class Counting(nn.Linear):
    """Has an extra state, which is no tensor."""

    steps = 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize(
    "wrap", [dict, lambda state: {"model": {f"module.{k}": v for k, v in state.items()}}]
)
def test_extra_states_of_modules_load(tmp_path, wrap):
    source = nn.Sequential(Counting(2, 2), nn.Linear(2, 1))
    source[0].steps = 7
    torch.save(wrap(source.state_dict()), tmp_path / "net.pt")
    target = nn.Sequential(Counting(2, 2), nn.Linear(2, 1))
    load_weights(target, tmp_path / "net.pt")
    assert target[0].steps == 7
    assert torch.equal(target[0].weight, source[0].weight)
    torch.save(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).state_dict(), tmp_path / "old.pt")
    load_weights(target, tmp_path / "old.pt")
    assert target[0].steps == 7
    with pytest.raises(RequestError, match=r"can't hold '0\._extra_state'"):
        save_weights(tmp_path / "net.safetensors", source, {})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state, other: {"state_dict": state, "state_dict_ema": other},
        lambda state, other: {"model": {"state_dict": state}, "state_dict_ema": other},
        lambda state, other: {
            "pytorch-lightning_version": "2",
            "state_dict": {f"net.{n}": t for n, t in state.items()}
            | {f"state_dict_ema.{n}": t for n, t in other.items()},
        },
    ],
)
def test_ambiguous_checkpoint_raises(tmp_path, wrap):
    raw, average, target = network(), network(), network()
    torch.save(wrap(raw.state_dict(), average.state_dict()), tmp_path / "net.pt")
    with pytest.raises(RequestError, match="--weights"):
        load_weights(target, tmp_path / "net.pt")
    load_weights(target, tmp_path / "net.pt", key="state_dict_ema")
    assert same_state(average, target)
    with pytest.raises(RequestError, match="'ema'"):
        load_weights(target, tmp_path / "net.pt", key="ema")


def test_a_key_above_one_network_names_it(tmp_path):
    raw, average, target = network(), network(), network()
    content = {"model": raw.state_dict(), "ema": {"module": average.state_dict(), "decay": 0.9}}
    torch.save(content, tmp_path / "net.pt")
    load_weights(target, tmp_path / "net.pt", key="ema")
    assert same_state(average, target)


@pytest.mark.parametrize("names", [("teacher", "student"), ("student", "loss")])
@pytest.mark.parametrize("outer", ["", "module."])
def test_part_that_fits_is_named(tmp_path, names, outer):
    first, second = network(), network()
    state = {f"{outer}{names[0]}.{k}": v for k, v in first.state_dict().items()}
    others = second.state_dict() if names[1] == "student" else {"weight": torch.ones(3)}
    state |= {f"{outer}{names[1]}.{k}": v for k, v in others.items()}
    path = save_with_torch(tmp_path / "net.pt", {"state_dict": state})
    with pytest.raises(RequestError, match=rf"--weights '{path}#{outer}student'$"):
        load_weights(network(), path)
    target = network()
    load_weights(target, path, key=f"{outer}student")
    assert same_state(target, first if names[0] == "student" else second)


def test_keys_are_part_of_label_and_identity(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({}, "net.pt")
    choices = [
        choose_weights(SubjectSpec("vgg8", weights, "digits"))
        for weights in ("net.pt", "net.pt#ema", "net.pt#model")
    ]
    assert [choice.label for choice in choices] == ["net.pt", "net.pt#ema", "net.pt#model"]
    assert len({choice.identity for choice in choices}) == 3
    assert parse_paths("*.pt#ema", "--weights") == ["net.pt#ema"]


def test_adapter_folders_are_named(tmp_path):
    with pytest.raises(RequestError):
        choose_weights(SubjectSpec("vgg8", str(tmp_path), "digits"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RequestError):
        choose_weights(SubjectSpec("vgg8", str(tmp_path), "digits"))


def test_metadata_are_read_in_one_order(tmp_path):
    # safetensors returns them in another order at each call.
    names = [f"name{index}" for index in range(20)]
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, file, dict.fromkeys(reversed(names), "text"))
    assert list(read_metadata(file)) == list(read_checkpoint(file)[1]) == sorted(names)
