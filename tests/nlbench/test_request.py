import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.parsers import parse_seeds, parse_size
from nlbench.request import (
    ExecutionOptions,
    Request,
    RunOptions,
    list_options,
    read_config,
    to_toml,
    write_request,
)

NAMES = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters=",\0"), min_size=1)
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
def test_request_written_and_read_asks_for_the_same(
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
        ("measures = [", "is not TOML"),
        ("mesures = ['r2']", "unknown key 'mesures'; did you mean 'measures'?"),
        ("measures = 3", "measures: expected names, got 3"),
        ("measures = []", "measures: expected at least one"),
        ("measures = ['']", "expected names"),
        ("seeds = ['one']", "seeds: expected non-negative integers"),
        ("seeds = [true]", "seeds: expected non-negative integers"),
        ("seeds = [-1]", "seeds: -1 is out of bounds"),
        ("samples = 'many'", "samples: expected a whole number, got 'many'"),
        ("samples = true", "samples: expected a whole number, got True"),
        ("model = 'a'\nmodels = 'b'", "'model' and 'models' are the same"),
        ("set = 3", "set: expected a table"),
        ("[set]\n'a.b' = [1]", "a.b: expected text, a number or true"),
        ("[[set]]", "set: expected a table"),
        ("x = " + "[" * 5000, "is not TOML"),
        ("samples = " + "9" * 5000, "is not TOML"),
        ("samples = 9223372036854775808", "out of bounds, expected 0 to 1e+09"),
        ("set." + "a." * 5000 + "b = 1", "nested too deeply"),
        ("[set]\n'a.b' = 1\na.b = 2", "a.b is set twice"),
        ("measures = 'r2'\nmeasure = 'cka'", "'measures' and 'measure' are the same"),
        ("threads = 100000", "threads: 100000 is out of bounds, expected 1 to 1024"),
        ("timeout = 1e300", "timeout: 1e+300 is out of bounds"),
        ("rerun = 'al'", "rerun: unknown 'al'; did you mean 'all'?"),
        ("precision = 'float8'", "precision: unknown 'float8'; did you mean 'float"),
        ("seeds = '5-1'", "seeds: '5-1' runs backwards"),
        ("seeds = '0-999999999999'", "seeds: too many"),
        ("report = 1", "report: expected true or false, got 1"),
        ("dry_run = true", "unknown key 'dry_run'"),
        ("config = 'c.toml'", "config"),
        ("seeds = 1979-05-27", "seeds: expected"),
        ("seeds = []", "seeds: expected"),
        ("seeds = [1.5]", "seeds: expected"),
        ("samples = nan", "samples: expected"),
        ("timeout = inf", "timeout:"),
        ("timeout = nan", "timeout:"),
        ("timeout = -1", "timeout:"),
        ("memory = true", "memory:"),
        ("memory = 'lots'", "memory:"),
        ("weights = [1]", "weights:"),
        ("data = {}", "data:"),
        ("model = ['a', ['b']]", "model:"),
        ("sites = true", "sites:"),
        ("[run]\nmeasures = 'r2'", "run"),
    ],
)
def test_invalid_request_file_raises_with_name(tmp_path, text, says):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(RequestError) as caught:
        read_config(path)
    assert says in str(caught.value)
    assert "c.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "c.toml").write_text("measures = 'r2'", encoding="utf-8-sig")
    assert read_config(tmp_path / "c.toml") == {"measures": ("r2",)}


def test_unreadable_file_raises_in_one_line(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"data = 'caf\xe9'")
    for path in (tmp_path, tmp_path / "absent.toml", tmp_path / "latin.toml"):
        with pytest.raises(RequestError):
            read_config(path)


def test_options_may_stand_in_their_own_tables(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[set.affinity]\nshrinkage = 'none'\n[set]\n'sites.batch' = 8\n")
    assert read_config(path)["settings"] == {"affinity.shrinkage": "none", "sites.batch": 8}


def test_sizes_are_decimal_or_binary():
    assert parse_size("2k") == 2000
    assert parse_size("2KiB") == 2048
    assert parse_size("1T") == 10**12


@given(seeds=st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_seeds_are_read_in_order_without_duplicates(seeds):
    expected = tuple(dict.fromkeys(seeds))
    assert parse_seeds([",".join(map(str, seeds))]) == expected
    assert parse_seeds([f"0{seed}" for seed in seeds]) == expected
    low, high = min(seeds), max(seeds)
    for text in (f"{low}-{high}", f" {low} .. {high} ", f"{low}-{high},{low}"):
        assert parse_seeds([text]) == tuple(range(low, high + 1))


def test_glob_of_checkpoints_is_files_that_it_matches(tmp_path, monkeypatch):
    for name in ("b.pt", "a.pt", "c.txt", "with,comma.pt", "star*.pt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.pt").mkdir()
    monkeypatch.chdir(tmp_path)
    weights = list_options(Request)["weights"]

    def read(*texts):
        return weights.parse_flags(texts, "--weights")

    assert read("*.pt") == ("a.pt", "b.pt", "star*.pt", "with,comma.pt")
    assert read("*") == read("*.pt")
    assert read(f"{tmp_path}/[ab].pt") == (f"{tmp_path}/a.pt", f"{tmp_path}/b.pt")
    assert read("init,a.pt", "a.pt") == ("init", "a.pt")
    assert read("with,comma.pt") == ("with,comma.pt",)
    assert read("star*.pt") == ("star*.pt",)
    with pytest.raises(RequestError):
        read("*.safetensors")
    with pytest.raises(RequestError):
        read("")


VALID = {
    "measures": "r2,cka", "models": "vgg8", "data": "digits", "weights": "init", "seeds": "0-2",
    "samples": "7", "split": "train", "device": "cpu", "settings": "r2.folds=3",
    "precision": "float64", "rerun": "all", "timeout": "2.5", "memory": "1GB",
    "executor": "processes", "workers": "2", "address": "", "threads": "3", "sites": "kind:relu",
    "out": "here", "progress": "plain",
}  # fmt: skip


@pytest.mark.parametrize("kind", [Request, ExecutionOptions, RunOptions])
def test_flags_files_and_arguments_are_read_alike(tmp_path, kind):
    flags = list_options(kind)
    typed = {name: VALID[name] for name in flags if name in VALID}
    asked = {
        name: flags[name].parse_flags([text], f"--{name}")
        if flags[name].is_repeatable
        else flags[name].parse(text, f"--{name}")
        for name, text in typed.items()
    }
    lines, tables = [], []
    for name, text in typed.items():
        key = flags[name].names[-1]
        if flags[name].kind in ("integer", "number"):
            lines.append(f"{key} = {text}")
        elif flags[name].kind == "settings":
            tables.append(f"[{key}]\n{text.replace('=', ' = ')}")
        else:
            lines.append(f"{key} = '{text}'")
    (tmp_path / "c.toml").write_text("\n".join([*lines, *tables]))
    read = read_config(tmp_path / "c.toml")
    settings = read.get("settings", {})
    assert {name: str(value) for name, value in settings.items()} == asked.get("settings", {})
    assert kind(**{**read, "settings": asked["settings"]} if settings else read) == kind(**asked)
    python = {n: typed[n] for n in typed if flags[n].kind not in ("integer", "number", "settings")}
    rest = {name: asked[name] for name in typed if name not in python}
    assert kind(**python, **rest) == kind(**asked)


def test_help_prints_every_default_and_flag_text():
    for kind in (Request, ExecutionOptions, RunOptions):
        for name, one in list_options(kind).items():
            assert one.help, name
            if one.default not in (None, "") and one.kind != "settings":
                assert one.default_text, name
