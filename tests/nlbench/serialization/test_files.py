import contextlib
import json
import os
import stat
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.serialization.files import (
    _measure_depth,
    check_is_file,
    make_folder,
    parse_json,
    read_text,
    spreadsheet_safe,
    spreadsheet_text,
    write_atomically,
)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "first")
    write_atomically(path, "ünïcode")
    assert path.read_text(encoding="utf-8") == "ünïcode"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_get_the_permissions_of_any_other_file(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    write_atomically(tmp_path / "ours", "")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_impossible_folder_raises_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(RequestError):
        write_atomically(tmp_path / "missing" / "file", "x")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "absent", "loop", "nul", "long"])
def test_special_file_is_refused_unopened(tmp_path, kind):
    place = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    elif kind == "loop":
        place.symlink_to("it")
    elif kind == "nul":
        place = tmp_path / "a\0b"
    elif kind == "long":
        place = tmp_path / ("x" * 100_000)
    for read in (check_is_file, read_text):
        with pytest.raises(RequestError):
            read(place)


def test_text_is_read_whole_up_to_its_bound(tmp_path):
    place = tmp_path / "text"
    place.write_text("grün", encoding="utf-8")
    assert read_text(place, 5) == "grün"
    with pytest.raises(RequestError):
        read_text(place, 4)
    place.write_bytes(b"\xff")
    with pytest.raises(RequestError):
        read_text(place)


def test_reading_a_small_file_takes_little_memory(tmp_path):
    place = tmp_path / "text"
    place.write_text("x" * 100)
    tracemalloc.start()
    try:
        assert len(read_text(place)) == 100
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("levels", "is_read"), [(32, True), (33, False)])
def test_nesting_is_bounded(levels, is_read):
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        text = opening * levels + "1" + closing * levels
        if is_read:
            parse_json(text, "it")
        else:
            with pytest.raises(RequestError):
                parse_json(text, "it")


nested_json = st.recursive(
    st.text('[]{}",\\\\ é', max_size=6) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('[{"\\\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


def depth(content):
    if not isinstance(content, dict | list):
        return 0
    parts = content.values() if isinstance(content, dict) else content
    return 1 + max(map(depth, parts), default=0)


@given(nested_json, st.booleans())
def test_depth_is_known_without_parsing(content, ascii_only):
    text = json.dumps(content, ensure_ascii=ascii_only)
    assert _measure_depth(text) == depth(content)


HOSTILE = {
    "empty lists": "[]",
    "spaced lists": "[]" + " " * 30,
    "objects": '{"a":0}',
    "numbers": "1.5",
    "long numbers": "12345.678",
    "strings": '"ab"',
    "long strings": '"éléments"',
    "deep": "[" * 40 + "]" * 40,
    "broken": "[" * 9,
}


@pytest.mark.parametrize("item", HOSTILE.values(), ids=HOSTILE)
def test_parsing_takes_memory_in_proportion_to_the_text(item):
    text = f"[{','.join([item] * (400_000 // len(item)))}]"
    tracemalloc.start()
    try:
        with contextlib.suppress(RequestError):
            parse_json(text, "it")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["[" * 50 + "]" * 50, f"[{'[],' * 50_000}[]]"])
def test_structure_is_checked_before_parsing(text, monkeypatch):
    monkeypatch.setattr("json.loads", None)
    with pytest.raises(RequestError):
        parse_json(text, "it")


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux")  # noqa: PTH110
def test_file_of_unknown_size_is_read_to_bound():
    from pathlib import Path

    with pytest.raises(RequestError):
        read_text(Path("/proc/self/maps"), 16)


@given(st.text())
def test_table_cells_are_never_formulas(text):
    safe = spreadsheet_safe(text)
    assert safe[:1] not in tuple("=+-@\t\r\n")
    assert spreadsheet_text(safe) == text
