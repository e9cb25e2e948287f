import os
import stat

import pytest

from nlbench.errors import RequestError
from nlbench.files import make_folder, write_atomically


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "first")
    write_atomically(path, "ünïcode")
    assert path.read_text(encoding="utf-8") == "ünïcode"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_get_the_permissions_of_any_other_file(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    write_atomically(tmp_path / "ours", "")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="can't write to"):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(RequestError, match="can't write"):
        write_atomically(tmp_path / "missing" / "file", "x")
