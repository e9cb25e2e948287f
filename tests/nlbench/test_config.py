import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.request import Request, parse_size, read_config, to_toml, write_request

NAMES = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters=","), min_size=1)
    .map(str.strip)
    .filter(bool),
    min_size=1,
    max_size=3,
    unique=True,
).map(tuple)
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
KEYS = st.from_regex(r"[a-z]{1,8}\.[a-z_]{1,8}", fullmatch=True)


@given(
    names=NAMES,
    weights=NAMES,
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3, unique=True).map(tuple),
    settings=st.dictionaries(KEYS, VALUES, max_size=3),
)
def test_a_request_written_and_read_asks_for_the_same(
    tmp_path_factory, names, weights, seeds, settings
):
    request = Request(names, names, names, weights=weights, seeds=seeds, settings=settings)
    path = tmp_path_factory.mktemp("config") / "request.toml"
    write_request(path, request)
    read = read_config(path)
    assert Request(**{**read, "settings": read.pop("settings", {})}) == request


@given(number=st.floats(allow_nan=True))
def test_every_number_is_written_as_toml_has_it(number):
    text = to_toml(Request(("a",), ("b",), ("c",), settings={"a.b": number}))
    read = tomllib.loads(text)["set"]["a.b"]
    assert read == number or (math.isnan(read) and math.isnan(number))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("measures = [", "is no TOML"),
        ("mesures = ['r2']", "unknown key 'mesures'; did you mean 'measures'?"),
        ("measures = 3", "measures: expected names, got 3"),
        ("measures = []", "measures: expected at least one"),
        ("measures = ['']", "expected names"),
        ("seeds = ['one']", "seeds: expected whole numbers"),
        ("seeds = [true]", "seeds: expected whole numbers"),
        ("seeds = [-1]", "seeds: -1 is out of bounds"),
        ("samples = 'many'", "samples: expected a whole number, got 'many'"),
        ("samples = true", "samples: expected a whole number, got True"),
        ("timeout = '3'", "timeout: expected a whole number, got '3'"),
        ("model = 'a'\nmodels = 'b'", "'model' and 'models' are the same"),
        ("set = 3", "set: expected a table"),
        ("[set]\n'a.b' = [1]", "a.b: expected text, a number or true"),
        ("[[set]]", "set: expected a table"),
        ("x = " + "[" * 5000, "is no TOML"),
    ],
)
def test_a_file_that_makes_no_request_is_one_line_with_its_name(tmp_path, text, says):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(RequestError) as caught:
        read_config(path)
    assert says in str(caught.value)
    assert "c.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"data = 'caf\xe9'")
    for path in (tmp_path, tmp_path / "absent.toml", tmp_path / "latin.toml"):
        with pytest.raises(RequestError, match="can't read"):
            read_config(path)


def test_options_may_stand_in_tables_of_their_own(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[set.affinity]\nshrinkage = 'none'\n[set]\n'sites.batch' = 8\n")
    assert read_config(path)["settings"] == {"affinity.shrinkage": "none", "sites.batch": 8}


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e3", "4XB", "0", "9999TB", "1.2.3", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RequestError, match="--memory"):
        parse_size(text)


def test_sizes_are_decimal_or_binary():
    assert parse_size("2k") == 2000
    assert parse_size("2KiB") == 2048
    assert parse_size("1T") == 10**12
