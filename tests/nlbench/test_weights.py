import collections
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import nn

from nlbench.errors import RequestError
from nlbench.weights import file_hash, load_weights, save_weights, state_hash

SAFETENSORS = save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, {"seed": "4"})


def network():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))


def linear():
    return nn.Linear(3, 2)


def same_state(first, second):
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


def assert_refused(path, message, model=None):
    """One line that names the file, and a model that is as it was."""
    model = model or linear()
    before = state_hash(model)
    with pytest.raises(RequestError, match=message) as caught:
        load_weights(model, path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert state_hash(model) == before


def refusal_of(path, model):
    """What is said against the file; None if it loads."""
    try:
        load_weights(model, path)
    except RequestError as error:
        return str(error)
    return None


def saved_with_torch(path, content, **options):
    torch.save(content, path, **options)
    return path


class Strike:
    """Unpickled, it makes a folder: what a hostile checkpoint would do."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_what_is_saved_loads_bit_for_bit_with_its_metadata(tmp_path):
    first, second = network(), network()
    first[1].running_mean.fill_(0.25)
    path = tmp_path / "net.safetensors"
    save_weights(path, first, {"seed": "3", "data": "dîgits"})
    assert not same_state(first, second)
    assert load_weights(second, path) == {"seed": "3", "data": "dîgits"}
    assert same_state(first, second)
    assert state_hash(first) == state_hash(second)


def test_what_is_saved_is_read_by_the_safetensors_library(tmp_path):
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


def test_saving_replaces_a_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_text("old")
    save_weights(path, linear(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]
    load_weights(linear(), path)


def test_saving_where_nothing_can_be_written_is_refused_in_one_line(tmp_path):
    path = tmp_path / "absent" / "net.safetensors"
    with pytest.raises(RequestError, match=r"can't write .*net.safetensors: No such file"):
        save_weights(path, linear(), {})


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrap", [dict, lambda s: {"state_dict": s}, lambda s: {"model": s, "e": 3}]
)
def test_files_of_torch_save_load_nested_or_not_in_both_formats(tmp_path, zipped, wrap):
    first, second = network(), network()
    content = wrap(first.state_dict())
    path = saved_with_torch(tmp_path / "net.pt", content, _use_new_zipfile_serialization=zipped)
    assert load_weights(second, path) == {}
    assert same_state(first, second)


def test_the_content_decides_and_not_the_suffix(tmp_path):
    path = tmp_path / "net.pth"
    path.write_bytes(SAFETENSORS)
    assert load_weights(linear(), path) == {"seed": "4"}
    load_weights(linear(), saved_with_torch(tmp_path / "a.safetensors", linear().state_dict()))


@pytest.mark.parametrize("start", [b"PK", b"\x80"])
def test_a_header_whose_length_looks_like_another_format_is_still_safetensors(tmp_path, start):
    length = int.from_bytes(SAFETENSORS[:8], "little")
    wanted = next(n for n in range(length, 2**17) if n.to_bytes(8, "little").startswith(start))
    header = SAFETENSORS[8 : 8 + length].ljust(wanted)
    path = tmp_path / "net"
    path.write_bytes(wanted.to_bytes(8, "little") + header + SAFETENSORS[8 + length :])
    assert load_weights(linear(), path) == {"seed": "4"}


def test_names_of_a_data_parallel_model_lose_their_prefix(tmp_path):
    first, second = linear(), linear()
    state = collections.OrderedDict(("module." + k, v) for k, v in first.state_dict().items())
    load_weights(second, saved_with_torch(tmp_path / "net.pt", {"state_dict": state}))
    assert same_state(first, second)


def test_a_model_whose_own_names_begin_with_module_keeps_them(tmp_path):
    first, second = (nn.ModuleDict({"module": linear()}) for _ in range(2))
    load_weights(second, saved_with_torch(tmp_path / "net.pt", first.state_dict()))
    assert same_state(first, second)


def test_old_checkpoints_without_the_batch_counter_load(tmp_path):
    first, second = network(), network()
    second[1].num_batches_tracked.fill_(7)
    state = {k: v for k, v in first.state_dict().items() if "tracked" not in k}
    load_weights(second, saved_with_torch(tmp_path / "old.pt", state))
    assert torch.equal(second[3].weight, first[3].weight)
    assert second[1].num_batches_tracked == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_are_converted_to_the_precision_of_the_model(tmp_path, dtype):
    weight = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
    save_file({"weight": weight, "bias": torch.zeros(2, dtype=dtype)}, tmp_path / "net")
    model = linear()
    load_weights(model, tmp_path / "net")
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight.detach(), weight.to(torch.float32))


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    assert_refused(tmp_path / "absent.pt", "there is no such file")
    assert_refused(tmp_path, "it is a directory")
    assert_refused(tmp_path / "empty", "is empty")
    assert_refused(tmp_path / ("x" * 300), "File name too long")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = tmp_path / "secret.pt"
    path.write_bytes(SAFETENSORS)
    path.chmod(0)
    assert_refused(path, "Permission denied")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(5, "I/O error")]
)
def test_what_the_system_says_against_reading_is_passed_on(tmp_path, monkeypatch, error):
    path = tmp_path / "net.pt"
    path.write_bytes(SAFETENSORS)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(Path, "open", fail)
    assert_refused(path, error.strerror)
    with pytest.raises(RequestError, match=error.strerror):
        file_hash(path)


@pytest.mark.parametrize(
    "content", [b"a", b"hello, this is text", b"\x89PNG\r\n\x1a\n" + bytes(40)]
)
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "net.pt").write_bytes(content)
    assert_refused(tmp_path / "net.pt", "neither a safetensors nor a PyTorch checkpoint")


def test_a_zip_archive_of_another_kind_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    assert_refused(tmp_path / "net.pt", "truncated or damaged PyTorch file, or none")


@pytest.mark.parametrize("cut", range(1, len(SAFETENSORS)))
def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path, cut):
    (tmp_path / "net.safetensors").write_bytes(SAFETENSORS[:cut])
    assert_refused(tmp_path / "net.safetensors", "cut short" if cut < 9 else "truncated or damaged")


@pytest.mark.parametrize("zipped", [True, False])
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(share=st.floats(0.0, 0.999))
def test_a_torch_file_cut_anywhere_is_refused(tmp_path, zipped, share):
    buffer = io.BytesIO()
    torch.save(linear().state_dict(), buffer, _use_new_zipfile_serialization=zipped)
    content = buffer.getvalue()
    path = tmp_path / "net.pt"
    path.write_bytes(content[: max(1, int(share * len(content)))])
    assert_refused(path, "truncated|damaged|cut short|refused")


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    tail=st.binary(max_size=200), head=st.sampled_from([b"PK\x03\x04", b"\x80", b"\x80\x02", b""])
)
def test_noise_is_refused_in_one_line_whatever_it_begins_with(tmp_path, head, tail):
    path = tmp_path / "noise"
    path.write_bytes(head + tail or b"x")
    assert_refused(path, "truncated|damaged|cut short|refused")


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(place=st.integers(0, len(SAFETENSORS) - 33), value=st.integers(0, 255))
def test_a_damaged_header_never_leads_to_anything_but_a_full_load_or_one_line(
    tmp_path, place, value
):
    content = bytearray(SAFETENSORS)
    content[place] = value
    path = tmp_path / "damaged"
    path.write_bytes(content)
    model = linear()
    before = state_hash(model)
    refusal = refusal_of(path, model)
    if refusal is None:
        assert torch.isfinite(model.weight).all()
        assert state_hash(model) != before
    else:
        assert "\n" not in refusal
        assert state_hash(model) == before


@pytest.mark.parametrize("how", ["zip", "legacy", "nested", "plain pickle", "old plain pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, how):
    target, path = tmp_path / "struck", tmp_path / "net.pt"
    strike = Strike(target)
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(strike))
    elif how == "old plain pickle":
        path.write_bytes(pickle.dumps(strike, protocol=2))
    elif how == "nested":
        saved_with_torch(path, {"state_dict": linear().state_dict(), "extra": strike})
    else:
        saved_with_torch(path, strike, _use_new_zipfile_serialization=how == "zip")
    assert_refused(path, "refused: it holds more than tensors and could run code on loading")
    assert not target.exists()


def test_the_pickles_of_the_test_above_do_strike_when_trusted(tmp_path):
    path = saved_with_torch(tmp_path / "net.pt", Strike(tmp_path / "struck"))
    torch.load(path, weights_only=False)
    assert (tmp_path / "struck").is_dir()


def test_a_whole_pickled_model_is_refused(tmp_path):
    path = saved_with_torch(tmp_path / "net.pt", linear())
    assert_refused(path, r"could run code on loading \(torch.nn.modules.linear.Linear\)")


def test_a_torchscript_program_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(linear(), torch.zeros(1, 3)), tmp_path / "net.pt")
        assert_refused(tmp_path / "net.pt", "it is a TorchScript program")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "holds a Tensor, expected a state dict"),
        ([1, 2], "holds a list, expected a state dict"),
        ({"weight": 1.0}, "not a state dict: .* found 'weight' with a float"),
        ({3: torch.zeros(1)}, "not a state dict: .* found 3 with a Tensor"),
        ({"model": {"weight": None}}, "not a state dict: .* found 'weight' with a NoneType"),
        ({}, "lacks 'weight' and 1 more"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path, content, message):
    assert_refused(saved_with_torch(tmp_path / "net.pt", content), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, "fit the model: it lacks 'bias'$"),
        ({"bias": None, "weight": None}, "it lacks 'weight' and 1 more"),
        ({"x": torch.ones(1)}, "it has the unexpected 'x'$"),
        ({"x": torch.ones(1), "y": torch.ones(1)}, "it has the unexpected 'x' and 1 more"),
        ({"bias": None, "x": torch.ones(1)}, "it lacks 'bias'; it has the unexpected 'x'"),
        (
            {"weight": torch.zeros(3, 2)},
            r"'weight' has shape \(3, 2\), expected \(2, 3\)",
        ),
        ({"bias": torch.zeros(2, 1)}, r"'bias' has shape \(2, 1\), expected \(2,\)"),
        ({"bias": torch.tensor(1.0)}, r"'bias' has shape \(\), expected \(2,\)"),
        ({"bias": torch.ones(2).int()}, "'bias' holds torch.int32, expected torch.float32"),
        ({"bias": torch.ones(2).bool()}, "'bias' holds torch.bool, expected torch.float32"),
        ({"bias": torch.ones(2) * 1j}, "'bias' holds torch.complex64, expected torch.float32"),
        ({"bias": torch.tensor([0.0, torch.nan])}, "'bias' holds NaN or infinities"),
        ({"bias": torch.tensor([0.0, -torch.inf])}, "'bias' holds NaN or infinities"),
        ({"bias": torch.tensor([0.0, 1e300]).double()}, "'bias' holds NaN or infinities"),
        ({"bias": torch.ones(2).to_sparse()}, "'bias' is not a dense tensor"),
        ({"bias": torch.ones(2, device="meta")}, "'bias' is not a dense tensor"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_copied(tmp_path, change, message):
    state = {"weight": torch.full((2, 3), 9.0), "bias": torch.ones(2), **change}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    assert_refused(saved_with_torch(tmp_path / "net.pt", state), message)


def test_a_counter_in_place_of_which_there_are_fractions_is_refused(tmp_path):
    state = {**network().state_dict(), "1.num_batches_tracked": torch.tensor(0.5)}
    path = saved_with_torch(tmp_path / "net.pt", state)
    assert_refused(path, "holds torch.float32, expected torch.int64", network())


def test_a_file_hash_is_the_sha256_of_its_bytes(tmp_path):
    content = os.urandom(3_000_001)
    (tmp_path / "file").write_bytes(content)
    assert file_hash(tmp_path / "file") == hashlib.sha256(content).hexdigest()
    assert file_hash(str(tmp_path / "file")) == hashlib.sha256(content).hexdigest()


def test_the_hash_of_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"can't read .*absent: there is no such file"):
        file_hash(tmp_path / "absent")


def test_a_state_hash_depends_on_values_names_shapes_and_dtypes():
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


def test_a_state_hash_does_not_depend_on_layout_or_order_of_registration():
    first, second = nn.Module(), nn.Module()
    first.conv, first.head = nn.Conv2d(2, 3, 3), linear()
    second.head, second.conv = first.head, nn.Conv2d(2, 3, 3)
    second.conv.load_state_dict(first.conv.state_dict())
    second.conv.to(memory_format=torch.channels_last)
    assert not second.conv.weight.is_contiguous()
    assert state_hash(first) == state_hash(second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_hash_is_the_same_on_the_gpu():
    model = network()
    expected = state_hash(model)
    assert state_hash(model.to("cuda")) == expected


def test_importing_the_module_does_not_import_torch():
    code = "import sys, nlbench.weights; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_a_checkpoint_loads_from_a_read_only_place(tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(SAFETENSORS)
    copy = shutil.copy(path, tmp_path / "copy")
    Path(copy).chmod(0o444)
    load_weights(linear(), copy)
    assert Path(copy).read_bytes() == SAFETENSORS
