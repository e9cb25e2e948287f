"""Text files become packed windows, and other files are held out."""

import platform
from itertools import pairwise

import pytest
import torch

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.datasets.text import text_files
from nlbench.subjects.data import dataset_info
from nlbench.subjects.load import load_dataset
from nlbench.subjects.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    """Write 100 files, each of one letter, and files that don't count."""
    for number in range(100):
        letter = chr(0x100 + number)
        (tmp_path / f"{number:03}.txt").write_text(letter * (60 + number), encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("hidden")
    return tmp_path


LETTERS = Tokenizer(
    "letters", lambda texts: [[ord(c) - 0x100 for c in text] for text in texts], 200
)
NEXT = Tokenizer("letters", LETTERS.encode, 200, predicts_next=True)


def windows(folder, tokenizer=LETTERS, split="test", count=None, seed=0, **options):
    text = load_dataset(f"text/{folder}", {"length": 16, **options}).tokenized(tokenizer)
    return text.sample(count, split=split, seed=seed)


@pytest.mark.parametrize("folds", [2, 4, 5])
def test_folds_hold_different_files(folder, folds):
    rows = windows(folder).inputs
    assert rows.shape == (40, 16)
    files = [set(rows[i::folds].flatten().tolist()) for i in range(folds)]
    assert all(files)
    assert len(set.union(*files)) == sum(map(len, files))


def test_every_fourth_file_is_for_test(folder):
    test, train = (
        set(windows(folder, split=split, windows=1000).inputs.flatten().tolist())
        for split in ("test", "train")
    )
    assert all(number % 4 == 0 for number in test)
    assert not test & train
    assert len(test) == 25
    assert len(train) == 75


def test_windows_are_packed_from_all_files_without_overlap(folder):
    for number in range(100):
        (folder / f"{number:03}.txt").write_text(chr(0x100 + number) * 3, encoding="utf-8")
    rows = windows(folder, windows=1000, length=4).inputs
    # 25 test files of three letters in groups: with 20 groups no group would fill two windows.
    assert rows.unique(return_counts=True)[1].max() <= 3
    assert rows.numel() > 60


def test_files_are_separated_and_windows_marked(folder):
    marked = Tokenizer("marked", LETTERS.encode, 200, (150,), (151, 152), separator=(153,))
    rows = windows(folder, marked, windows=1000).inputs
    assert (rows[:, 0] == 150).all()
    assert rows[:, -2:].unique(dim=0).tolist() == [[151, 152]]
    inner = rows[:, 1:-2]
    changes = (inner[:, 1:] != inner[:, :-1]) & (inner[:, 1:] != 153) & (inner[:, :-1] != 153)
    assert not changes.any()
    assert (inner == 153).any()


def test_labels_are_the_next_tokens(tmp_path):
    alphabet = "".join(chr(0x100 + i % 150) for i in range(4000))
    (tmp_path / "one.txt").write_text(alphabet, encoding="utf-8")
    sample = windows(tmp_path / "one.txt", NEXT)
    assert sample.inputs.shape == sample.labels.shape
    assert sample.labels.equal((sample.inputs + 1) % 150)
    assert windows(tmp_path / "one.txt").labels is None


def test_seeds_draw_other_windows_of_the_same_files(folder):
    files = [{*row.tolist()} for row in windows(folder, count=20, windows=1000).inputs]
    first, again, other = (
        windows(folder, count=20, windows=1000, seed=seed).inputs for seed in (0, 0, 1)
    )
    assert first.equal(again)
    assert len(files) == 20
    assert {*first.flatten().tolist()} | {*other.flatten().tolist()} <= {*range(0, 100, 4)}
    assert not first.equal(other)


def test_text_is_file_folder_or_glob(folder, monkeypatch):
    assert len(text_files(str(folder))) == 100
    assert [path.name for path in text_files(f"{folder}/00[12]*.txt")] == ["001.txt", "002.txt"]
    monkeypatch.chdir(folder)
    assert [path.name for path in text_files("007.txt")] == ["007.txt"]
    assert registry.expand("datasets", ["text/00?.txt"]) == ["text/00?.txt"]
    with pytest.raises(RequestError):
        registry.expand("datasets", ["text/x*"])
    with pytest.raises(RequestError, match="text/missing"):
        load_dataset("text/missing")


def test_empty_or_short_text_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(1000))
    with pytest.raises(RequestError, match=r"a\.bin"):
        load_dataset(f"text/{tmp_path}/a.bin").sample(1)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(RequestError):
        load_dataset(f"text/{tmp_path}/b.txt").sample(1)
    with pytest.raises(RequestError):
        load_dataset("text/python").sample(1, split="dev")


def test_a_changed_file_changes_the_fingerprint(folder):
    def fingerprint():
        return dataset_info(registry.load("datasets", f"text/{folder}")).fingerprint(windows=1)

    before = fingerprint()
    assert fingerprint() == before
    (folder / "000.txt").write_text("changed")
    assert fingerprint() != before


def test_standard_library_is_a_text_of_every_machine():
    info = dataset_info(registry.load("datasets", "text/python"))
    assert info.version == f"Python {platform.python_version()}"
    text = load_dataset("text/python")
    sample = text.sample(None)
    assert text.classes == 256
    assert sample.inputs.shape == text.sample(None, split="train").inputs.shape == (40, 64)
    assert "20 groups of files" in text.preprocessing
    source = b"".join(path.read_bytes() for path in text_files("python"))
    assert all(bytes(row.tolist()) in source for row in sample.inputs[:3])
    overlap = [torch.equal(a, b) for a, b in pairwise(sample.inputs)]
    assert not any(overlap)
