"""Files that are no state dict, or not this network's: one line, and nothing is run."""

import io
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import SAFETENSORS, linear, network, save_with_torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.serialization.hashing import file_hash, state_hash
from nlbench.subjects.weights import load_weights


def assert_refused(path, name="", model=None):
    """One line that names the file, and a model that is as it was."""
    model = model or linear()
    before = state_hash(model)
    with pytest.raises(RequestError, match=name) as caught:
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


class Strike:
    """Unpickled, it makes a folder: what a hostile checkpoint would do."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_missing_files_folders_and_empty_files_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    assert_refused(tmp_path / "absent.pt")
    assert_refused(tmp_path)
    assert_refused(tmp_path / "empty")
    assert_refused(tmp_path / ("x" * 300))


def test_pipes_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission_are_refused(tmp_path):
    path = tmp_path / "secret.pt"
    path.write_bytes(SAFETENSORS)
    path.chmod(0)
    assert_refused(path)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(5, "I/O error")]
)
def test_system_errors_are_passed_on(tmp_path, monkeypatch, error):
    path = tmp_path / "net.pt"
    path.write_bytes(SAFETENSORS)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(Path, "open", fail)
    assert_refused(path, error.strerror)
    with pytest.raises(RequestError):
        file_hash(path)


@pytest.mark.parametrize(
    "content", [b"a", b"hello, this is text", b"\x89PNG\r\n\x1a\n" + bytes(40)]
)
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "net.pt").write_bytes(content)
    assert_refused(tmp_path / "net.pt")


def test_a_zip_archive_of_another_kind_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    assert_refused(tmp_path / "net.pt")


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    for cut in range(1, len(SAFETENSORS)):
        path.write_bytes(SAFETENSORS[:cut])
        assert_refused(path)


@pytest.mark.parametrize("zipped", [True, False])
@given(share=st.floats(0.0, 0.999))
def test_a_torch_file_cut_anywhere_is_refused(tmp_path, zipped, share):
    buffer = io.BytesIO()
    torch.save(linear().state_dict(), buffer, _use_new_zipfile_serialization=zipped)
    content = buffer.getvalue()
    path = tmp_path / "net.pt"
    path.write_bytes(content[: max(1, int(share * len(content)))])
    assert_refused(path)


@settings(max_examples=150)
@given(
    tail=st.binary(max_size=200), head=st.sampled_from([b"PK\x03\x04", b"\x80", b"\x80\x02", b""])
)
def test_noise_is_refused_in_one_line(tmp_path, head, tail):
    path = tmp_path / "noise"
    path.write_bytes(head + tail or b"x")
    assert_refused(path)


@settings(max_examples=150)
@given(place=st.integers(0, len(SAFETENSORS) - 33), value=st.integers(0, 255))
def test_damaged_header_loads_fully_or_raises(tmp_path, place, value):
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
def test_pickles_that_run_code_are_refused(tmp_path, how):
    target, path = tmp_path / "struck", tmp_path / "net.pt"
    strike = Strike(target)
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(strike))
    elif how == "old plain pickle":
        path.write_bytes(pickle.dumps(strike, protocol=2))
    elif how == "nested":
        save_with_torch(path, {"state_dict": linear().state_dict(), "extra": strike})
    else:
        save_with_torch(path, strike, _use_new_zipfile_serialization=how == "zip")
    assert_refused(path, "code")
    assert not target.exists()


def test_trusted_pickles_do_run_code(tmp_path):
    path = save_with_torch(tmp_path / "net.pt", Strike(tmp_path / "struck"))
    torch.load(path, weights_only=False)
    assert (tmp_path / "struck").is_dir()


def test_a_whole_pickled_model_is_refused(tmp_path):
    path = save_with_torch(tmp_path / "net.pt", linear())
    assert_refused(path, "torch.nn.modules.linear.Linear")


def test_a_torchscript_program_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(linear(), torch.zeros(1, 3)), tmp_path / "net.pt")
        assert_refused(tmp_path / "net.pt", "TorchScript")


def test_an_exported_program_is_refused(tmp_path):
    program = torch.export.export(linear(), (torch.zeros(1, 3),))
    torch.export.save(program, tmp_path / "net.pt2")
    assert_refused(tmp_path / "net.pt2", "exported program")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (torch.zeros(3), "Tensor"),
        ([1, 2], "list"),
        ({"weight": 1.0}, "'weight' with a float"),
        ({3: torch.zeros(1)}, "3 with a Tensor"),
        ({"model": {"weight": None}}, "'weight' with a NoneType"),
        ({}, "'weight' and 1 more"),
    ],
)
def test_non_state_dict_raises(tmp_path, content, name):
    assert_refused(save_with_torch(tmp_path / "net.pt", content), name)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"bias": None}, "'bias'$"),
        ({"bias": None, "weight": None}, "'weight' and 1 more"),
        ({"x": torch.ones(1)}, "'x'$"),
        ({"x": torch.ones(1), "y": torch.ones(1)}, "'x' and 1 more"),
        ({"bias": None, "x": torch.ones(1)}, "'bias'.*'x'"),
        ({"weight": torch.zeros(3, 2)}, r"'weight' .*\(3, 2\).*\(2, 3\)"),
        ({"bias": torch.zeros(2, 1)}, r"'bias' .*\(2, 1\).*\(2,\)"),
        ({"bias": torch.tensor(1.0)}, r"'bias' .*\(\).*\(2,\)"),
        ({"bias": torch.ones(2).int()}, "'bias' .*int32.*float32"),
        ({"bias": torch.ones(2).bool()}, "'bias' .*bool.*float32"),
        ({"bias": torch.ones(2) * 1j}, "'bias' .*complex64.*float32"),
        ({"bias": torch.tensor([0.0, torch.nan])}, "'bias'.*NaN"),
        ({"bias": torch.tensor([0.0, -torch.inf])}, "'bias'.*NaN"),
        ({"bias": torch.tensor([0.0, 1e300]).double()}, "'bias'.*NaN"),
        ({"bias": torch.ones(2).to_sparse()}, "'bias'.*dense"),
        ({"bias": torch.ones(2, device="meta")}, "'bias'.*dense"),
    ],
)
def test_mismatched_state_dict_copies_nothing(tmp_path, change, name):
    state = {"weight": torch.full((2, 3), 9.0), "bias": torch.ones(2), **change}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    assert_refused(save_with_torch(tmp_path / "net.pt", state), name)


def test_fractions_in_place_of_a_counter_are_refused(tmp_path):
    state = {**network().state_dict(), "1.num_batches_tracked": torch.tensor(0.5)}
    path = save_with_torch(tmp_path / "net.pt", state)
    assert_refused(path, "float32.*int64", network())
