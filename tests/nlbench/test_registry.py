import importlib.metadata
import inspect
import sys

import pytest
import torch
from distributions import METADATA, entry_point, write_distribution

from nlbench import registry
from nlbench.errors import PluginError, RequestError
from nlbench.execution.machine import describe_environment
from nlbench.registry import Family


@pytest.fixture
def plugins(monkeypatch):
    found = []
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [entry for entry in found if entry.group == group]
    )
    return found


def test_built_in_measures_come_through_the_entry_points():
    assert {"affinity", "absdev", "density", "r2", "cka"} <= set(registry.entries("measures"))
    assert registry.load("measures", "affinity").name == "affinity"


def test_builtins_are_described_by_their_docstrings():
    for group in registry.GROUPS:
        for entry in registry.entries(group).values():
            if entry.family is not None:
                assert registry.describe(entry), entry.name
                continue
            built_in = registry.load(group, entry.name)
            is_instance = not (isinstance(built_in, type) or callable(built_in))
            if "nlbench" in entry.providers[0] and not is_instance:
                assert registry.describe(entry), entry.name
                # What a function made is described by the text below its name in the source.
                is_made = f"{entry.claims[0].attr} = " in inspect.getsource(
                    sys.modules[entry.claims[0].module]
                )
                assert is_made or built_in.__doc__.startswith(registry.describe(entry))


def test_unknown_name_lists_available_names(plugins):
    plugins.append(entry_point("alpha", "nowhere:x", "somebody"))
    with pytest.raises(RequestError):
        registry.load("measures", "zzzzzz")


def test_name_conflict_of_plugins_names_both(plugins):
    plugins += [
        entry_point("same", "json:dumps", "first-plugin"),
        entry_point("same", "json:loads", "second"),
    ]
    plugins.append(entry_point("fine", "json:dumps", "first-plugin"))
    with pytest.raises(PluginError) as caught:
        registry.load("measures", "same")
    assert "first-plugin" in str(caught.value)
    assert "second" in str(caught.value)
    assert registry.load("measures", "fine")


def test_distribution_found_twice_counts_once(plugins):
    plugins += [
        entry_point("one", "json:dumps", "plugin"),
        entry_point("one", "json:dumps", "plugin"),
    ]
    assert registry.load("measures", "one")


@pytest.mark.parametrize(
    "body",
    ["raise ValueError('no such luck')", "import sys; sys.exit(3)", "import no_such_module_xyz"],
)
def test_broken_plugin_is_named_alone(plugins, tmp_path, monkeypatch, body):
    name = f"broken_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    plugins += [
        entry_point("bad", f"{name}:x", "bad-plugin"),
        entry_point("good", "json:dumps", "good-plugin"),
    ]
    with pytest.raises(PluginError, match=r"'bad' .*bad-plugin"):
        registry.load("measures", "bad")
    assert registry.load("measures", "good")
    assert list(registry.entries("measures")) == ["bad", "good"]


def test_a_plugin_that_misses_its_object_is_named(plugins):
    plugins.append(entry_point("gone", "json:no_such_thing", "plugin"))
    with pytest.raises(PluginError):
        registry.load("measures", "gone")


def test_globs_expand_to_names_once_and_in_order():
    names = registry.expand("measures", ["r2", "a[bf]*[vy]", "affinity"])
    assert names == ["r2", "absdev", "affinity"]


class Zoo(Family):
    description = "animals"

    def names(self):
        return ("ape", "bee")

    def load(self, name):
        if name not in ("ape", "bee", "cow"):
            raise RequestError(f"there is no model 'zoo/{name}'")
        return lambda: name

    def describe(self, name):
        return f"the {name}"

    def providers(self):
        return ("zoo 2.0",)


class CostlyZoo(Zoo):
    costly = True


def family(kind, name="zoo/*", dist="zoo-plugin"):
    entry = entry_point(name, f"{__name__}:{kind.__name__}", dist, "models")
    return entry


@pytest.fixture
def loaded(monkeypatch):
    """Let entry points of this file load what they name."""
    here = {"Zoo": Zoo, "CostlyZoo": CostlyZoo, "int": int}
    load = importlib.metadata.EntryPoint.load
    monkeypatch.setattr(
        importlib.metadata.EntryPoint,
        "load",
        lambda self: here[self.attr] if self.module == __name__ else load(self),
    )


def test_family_members_are_listed_found_and_described(plugins, loaded):
    plugins += [family(Zoo), entry_point("vgg", "json:dumps", "other", "models")]
    known = registry.entries("models")
    assert list(known) == ["vgg", "zoo/ape", "zoo/bee"]
    assert registry.load("models", "zoo/bee")() == "bee"
    assert registry.describe(known["zoo/ape"]) == "the ape"
    assert known["zoo/ape"].providers == ("zoo-plugin 1.0", "zoo 2.0")


def test_unlisted_member_can_be_requested(plugins, loaded):
    plugins.append(family(Zoo))
    assert registry.load("models", "zoo/cow")() == "cow"
    assert registry.find("models", "zoo/cow").providers == ("zoo-plugin 1.0", "zoo 2.0")
    with pytest.raises(RequestError):
        registry.load("models", "zoo/dog")


def test_globs_match_members_only_after_a_slash(plugins, loaded):
    plugins += [family(Zoo), entry_point("ant", "json:dumps", "other", "models")]
    assert registry.expand("models", ["*"]) == ["ant"]
    assert registry.expand("models", ["zoo/*"]) == ["zoo/ape", "zoo/bee"]
    assert registry.expand("models", ["*/a*", "a*"]) == ["zoo/ape", "ant"]


def test_costly_family_is_listed_only_by_name(plugins, loaded, monkeypatch):
    plugins += [family(CostlyZoo), entry_point("ant", "json:dumps", "other", "models")]
    assert registry.expand("models", ["zoo/b*"]) == ["zoo/bee"]

    def names(self):
        raise AssertionError("it costs")

    monkeypatch.setattr(CostlyZoo, "names", names)
    assert list(registry.entries("models")) == ["ant"]
    assert registry.expand("models", ["*", "zoo/ape"]) == ["ant", "zoo/ape"]


def test_name_conflict_with_family_member_names_both(plugins, loaded):
    plugins += [family(Zoo), entry_point("zoo/ape", "json:dumps", "rival", "models")]
    with pytest.raises(PluginError, match=r"'zoo/ape' .*rival .*zoo-plugin"):
        registry.load("models", "zoo/ape")
    assert registry.load("models", "zoo/bee")() == "bee"


def test_family_conflict_names_both(plugins, loaded):
    plugins += [family(Zoo), family(CostlyZoo, dist="rival")]
    with pytest.raises(PluginError, match=r"'zoo/ape' .*zoo-plugin .*rival"):
        registry.load("models", "zoo/ape")
    assert "claimed by" in registry.families("models")["zoo"].conflict


def test_broken_family_is_named_when_used(plugins):
    plugins += [
        entry_point("broken/*", "no_such_module_xyz:Family", "bad-plugin", "models"),
        entry_point("fine", "json:dumps", "good-plugin", "models"),
    ]
    assert list(registry.entries("models")) == ["fine"]
    assert registry.families("models")["broken"].family is None
    with pytest.raises(PluginError, match=r"'broken/x' .*bad-plugin"):
        registry.load("models", "broken/x")


def test_invalid_family_raises(plugins, loaded):
    plugins.append(family(int))
    with pytest.raises(PluginError):
        registry.load("models", "zoo/ape")


def test_distribution_installed_at_runtime_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "late" not in registry.entries("measures")
    write_distribution(tmp_path, "late-plugin", {"measures": ["late = late_plugin:late"]})
    assert registry.entries("measures")["late"].providers == ("late-plugin 1.0",)


def test_installed_packages_are_read_once_per_path(monkeypatch):
    registry.entries("measures")
    calls = []
    monkeypatch.setattr(registry.metadata, "distributions", lambda: calls.append(1))
    registry.entries("measures")
    registry.entries("datasets")
    assert not calls


@pytest.mark.parametrize(
    "text",
    [b"[nlbench.measures]\nno equals sign\n", b"[nlbench.measures]\nx = \xff\n"],
    ids=["no equals sign", "not UTF-8"],
)
@pytest.mark.parametrize("metadata", [METADATA, ""])
def test_unreadable_entry_points_hide_no_others(tmp_path, monkeypatch, text, metadata):
    write_distribution(tmp_path, "crooked", text, metadata)
    write_distribution(tmp_path, "straight", b"[nlbench.measures]\nfine = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = registry.entries("measures")
    assert {"fine", "affinity", "r2"} <= known.keys()
    (problem,) = registry.installed()[1]
    assert "crooked" in problem
    assert "entry_points.txt" in problem


@pytest.mark.parametrize("value", [":::", "a b", "1:2:3", "mod:ob ject", "[x]"])
def test_malformed_entry_point_is_named_with_its_package(tmp_path, monkeypatch, value):
    text = f"[nlbench.measures]\nodd = {value}\n[nlbench.models]\nodd/* = {value}\n"
    write_distribution(tmp_path, "crooked", text.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = registry.entries("measures")["odd"]
    assert registry.describe(entry) == ""
    assert "measure 'odd' of crooked 1.0 has the malformed entry point" in entry.conflict
    for group, name in (("measures", "odd"), ("models", "odd/x")):
        with pytest.raises(PluginError, match="crooked"):
            registry.load(group, name)
    assert "malformed" in registry.families("models")["odd"].conflict
    assert registry.load("measures", "r2")


def test_first_of_two_equal_packages_counts(tmp_path, monkeypatch):
    for place, text in (("old", b"[nlbench.measures]\ngone = json:dumps\n"), ("new", b"")):
        (tmp_path / place).mkdir()
        write_distribution(tmp_path / place, "twice", text)
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert "gone" not in registry.entries("measures")


def test_spelling_variants_of_a_package_are_one(tmp_path, monkeypatch):
    for name in ("my_pkg", "my.pkg"):
        (tmp_path / name).mkdir()
        write_distribution(tmp_path / name, name, b"[nlbench.measures]\nmine = json:dumps\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert len(registry.entries("measures")["mine"].providers) == 1


def test_eggs_are_packages_each(tmp_path, monkeypatch):
    for name in ("alpha", "beta"):
        folder = tmp_path / f"{name}-1.0-py3.11.egg" / "EGG-INFO"
        folder.mkdir(parents=True)
        (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[nlbench.measures]\n{name} = json:dumps\n")
        monkeypatch.syspath_prepend(str(folder.parent))
    assert {"alpha", "beta"} <= set(registry.entries("measures"))


def test_package_without_metadata_is_named_by_its_folder(tmp_path, monkeypatch):
    write_distribution(tmp_path, "nameless", b"[nlbench.measures]\nmine = json:dumps\n", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "nameless" in registry.entries("measures")["mine"].providers[0]
    assert "nameless-1.0" in describe_environment(torch.device("cpu"))["plugins"]


def test_loading_a_name_imports_and_lists_no_family(plugins, loaded, monkeypatch):
    def names(self):
        raise AssertionError("listed")

    monkeypatch.setattr(Zoo, "names", names)
    plugins += [family(Zoo), entry_point("vgg", "json:dumps", "other", "models")]
    plugins += [entry_point("broken/*", "no_such_module_xyz:Family", "bad-plugin", "models")]
    assert registry.load("models", "vgg")
    assert registry.find("models", "vgg").name == "vgg"
    assert registry.expand("models", ["vgg"]) == ["vgg"]
    assert registry.load("models", "zoo/bee")() == "bee"
