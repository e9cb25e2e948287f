import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.serialization.fields import SHARED, extra_fields, from_plain, to_plain


class Facts(TypedDict, total=False):
    kinds: Mapping[str, str]


@dataclass(frozen=True)
class Inner:
    name: str
    size: float = 0.0
    facts: Facts = extra_fields()  # noqa: RUF009 (a field, as the others are)


@dataclass(frozen=True, kw_only=True)
class Outer:
    bounds: tuple[float | None, float | None] | None = None
    inner: Inner
    status: Literal["ok", "failed"] = "ok"
    several: tuple[Inner, ...] = ()
    parts: Mapping[str, Sequence[float] | Mapping[str, float]] = field(default_factory=dict)
    seed: int | None = None


text = st.text(max_size=5)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63 - 1)
inners = st.builds(
    Inner,
    text,
    numbers,
    st.fixed_dictionaries(
        {}, optional={"kinds": st.dictionaries(text, text, max_size=2), "more": st.booleans()}
    ),
)
outers = st.builds(
    Outer,
    bounds=st.none() | st.tuples(st.none() | numbers, st.none() | numbers),
    inner=inners,
    status=st.sampled_from(["ok", "failed"]),
    several=st.lists(inners, max_size=2).map(tuple),
    parts=st.dictionaries(
        text,
        st.lists(numbers, max_size=2).map(tuple) | st.dictionaries(text, numbers, max_size=2),
        max_size=2,
    ),
    seed=st.none() | st.integers(-9, 9),
)


@given(outers)
def test_written_fields_are_read_back(outer):
    assert from_plain(Outer, json.loads(json.dumps(to_plain(outer))), "outer") == outer


def test_none_is_omitted_and_extra_fields_inlined():
    outer = Outer(inner=Inner("a", facts={"kinds": {"x": "relu"}, "more": 1}))
    inner = {"name": "a", "size": 0.0, "kinds": {"x": "relu"}, "more": 1}
    assert to_plain(outer) == {"inner": inner, "status": "ok", "several": [], "parts": {}}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"inner": {}}, "inner.*name"),
        ({"inner": {"name": 3}}, "inner.name"),
        ({"inner": {"name": "a", "kinds": {"x": 1}}}, "inner.kinds.x"),
        ({"several": [{"name": "a"}, 2]}, "several.1"),
        ({"several": {}}, "several"),
        ({"bounds": [1]}, "bounds"),
        ({"bounds": [1, "2"]}, "bounds"),
        ({"parts": {"a": 1}}, "parts.a"),
        ({"seed": True}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"status": "odd"}, "status is 'odd'"),
        ({"other": 1}, "'other'"),
    ],
)
def test_mistyped_field_is_named(change, name):
    content = {"inner": {"name": "a"}, "status": "ok"} | change
    with pytest.raises(ValueError, match=name):
        from_plain(Outer, content, "it")


@pytest.mark.parametrize("missing", ["inner", "status"])
def test_only_neutral_defaults_may_be_missing(missing):
    content: dict[str, Any] = {"inner": {"name": "a"}, "status": "ok"}
    del content[missing]
    with pytest.raises(ValueError, match=missing):
        from_plain(Outer, content, "it")


@dataclass(frozen=True)
class Shared:
    inner: Inner = field(metadata=SHARED)
    own: Inner


def test_equal_values_of_shared_field_are_one_object():
    def read(size):
        content = {"inner": {"name": "a", "size": size}, "own": {"name": "b"}}
        return from_plain(Shared, content, "shared")

    first, second, whole = read(0.5), read(0.5), read(1)
    assert first.inner is second.inner
    assert first.own is not second.own
    assert (whole.inner.size, read(1.0).inner.size) == (1, 1.0)
    assert type(read(1.0).inner.size) is float
    for _ in range(2):  # a failure is not remembered as a value
        with pytest.raises(ValueError, match=r"shared\.inner\.size"):
            read(True)
