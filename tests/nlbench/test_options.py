import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.options import Option, resolve_options

OPTIONS = {
    "ridge": Option(1e-6, minimum=0.0),
    "anchors": Option(8, minimum=2),
    "debiased": Option(False),
    "shrinkage": Option("ledoit-wolf", choices=("ledoit-wolf", "none")),
}


def test_defaults_apply_without_values():
    assert resolve_options(OPTIONS, {}, owner="m") == {
        "ridge": 1e-6,
        "anchors": 8,
        "debiased": False,
        "shrinkage": "ledoit-wolf",
    }


@pytest.mark.parametrize(
    ("name", "given_value", "expected"),
    [("ridge", "1e-3", 1e-3), ("ridge", 2, 2.0), ("anchors", "12", 12), ("anchors", 12.0, 12),
     ("debiased", "true", True), ("debiased", "Off", False), ("debiased", True, True),
     ("shrinkage", " none ", "none")],
)  # fmt: skip
def test_values_are_brought_to_type_of_default(name, given_value, expected):
    value = resolve_options(OPTIONS, {name: given_value}, owner="m")[name]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given_value", "says"),
    [
        ("ridge", "-1", "out of bounds"),
        ("ridge", "nan", "expected a number"),
        ("ridge", "much", "expected a number, got 'much'"),
        ("anchors", "2.5", "expected a whole number"),
        ("anchors", "inf", "expected a whole number"),
        ("anchors", "1", "out of bounds"),
        ("debiased", "perhaps", "expected true or false"),
        ("shrinkage", "ledoit", "did you mean 'ledoit-wolf'"),
        ("rigde", "1", "did you mean 'ridge'"),
    ],
)
def test_mistyped_value_is_refused(name, given_value, says):
    with pytest.raises(RequestError) as caught:
        resolve_options(OPTIONS, {name: given_value}, owner="affinity")
    message = str(caught.value)
    assert says in message
    assert "affinity" in message
    assert "\n" not in message


@given(st.sampled_from(sorted(OPTIONS)), st.text(max_size=20))
def test_any_text_is_converted_or_refused(name, text):
    try:
        value = resolve_options(OPTIONS, {name: text}, owner="m")[name]
    except RequestError:
        return
    assert type(value) is type(OPTIONS[name].default)
