import importlib.metadata
import subprocess
import sys

import pytest

from nlbench import registry
from nlbench.errors import PluginError, RequestError


class Dist:
    def __init__(self, name, version="1.0"):
        self.name, self.version = name, version


def point(name, value, dist, group="nlbench.measures"):
    entry = importlib.metadata.EntryPoint(name, value, group)
    return entry._for(Dist(dist))


@pytest.fixture
def plugins(monkeypatch):
    found = []
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [entry for entry in found if entry.group == group],
    )
    return found


def test_listing_names_and_descriptions_imports_neither_torch_nor_a_plugin():
    code = (
        "import sys; from nlbench import registry\n"
        "for group in registry.GROUPS:\n"
        "    for entry in registry.entries(group).values(): registry.describe(entry)\n"
        "wrong = [m for m in sys.modules if m == 'torch' or m.startswith('nlbench.measures.')]\n"
        "sys.exit(repr(wrong) if wrong else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_built_in_measures_come_through_the_entry_points():
    assert {"affinity", "absdev", "density", "r2", "cka"} <= set(registry.entries("measures"))
    assert registry.load("measures", "affinity").name == "affinity"


def test_every_built_in_is_described_by_the_first_line_of_its_docstring():
    for group in registry.GROUPS:
        for entry in registry.entries(group).values():
            built_in = registry.load(group, entry.name)
            is_instance = not (isinstance(built_in, type) or callable(built_in))
            if "nlbench" in entry.providers[0] and not is_instance:
                assert registry.describe(entry), entry.name
                assert built_in.__doc__.startswith(registry.describe(entry))


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(
        RequestError, match="there is no measure 'afinity'; did you mean 'affinity'"
    ):
        registry.load("measures", "afinity")


def test_a_name_like_no_other_gets_the_list(plugins):
    plugins.append(point("alpha", "nowhere:x", "somebody"))
    with pytest.raises(RequestError, match="there are: alpha"):
        registry.load("measures", "zzzzzz")


def test_two_plugins_with_one_name_is_an_error_that_names_both(plugins):
    plugins += [point("same", "json:dumps", "first-plugin"), point("same", "json:loads", "second")]
    plugins.append(point("fine", "json:dumps", "first-plugin"))
    with pytest.raises(PluginError) as caught:
        registry.load("measures", "same")
    assert "first-plugin" in str(caught.value)
    assert "second" in str(caught.value)
    assert registry.load("measures", "fine")


def test_one_distribution_found_twice_on_the_path_claims_its_names_once(plugins):
    plugins += [point("one", "json:dumps", "plugin"), point("one", "json:dumps", "plugin")]
    assert registry.load("measures", "one")


@pytest.mark.parametrize(
    "body",
    ["raise ValueError('no such luck')", "import sys; sys.exit(3)", "import no_such_module_xyz"],
)
def test_a_broken_plugin_is_named_and_harms_nothing_else(plugins, tmp_path, monkeypatch, body):
    name = f"broken_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    plugins += [point("bad", f"{name}:x", "bad-plugin"), point("good", "json:dumps", "good-plugin")]
    with pytest.raises(PluginError, match=r"measure 'bad' .*bad-plugin.*can't be loaded"):
        registry.load("measures", "bad")
    assert registry.load("measures", "good")
    assert list(registry.entries("measures")) == ["bad", "good"]


def test_a_plugin_that_misses_its_object_is_named(plugins):
    plugins.append(point("gone", "json:no_such_thing", "plugin"))
    with pytest.raises(PluginError, match="no_such_thing"):
        registry.load("measures", "gone")


def test_globs_expand_to_names_once_and_in_order():
    assert registry.expand("measures", ["r2", "a*", "affinity"]) == ["r2", "absdev", "affinity"]


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(RequestError, match=r"no measure matches 'zz\*'"):
        registry.expand("measures", ["zz*"])
