import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import error_text, first_line, nearest, one_line, shorten, system_text
from nlbench.introspection.memory import is_out_of_memory


@given(st.text(), st.integers(1, 50))
def test_control_characters_are_removed_from_messages(text, most):
    line = one_line(text, most)
    assert len(line) <= most
    assert one_line(line, most) == line
    assert len(line.splitlines()) <= 1
    assert not [c for c in line if unicodedata.category(c) in ("Cc", "Cs", "Co", "Cn")]
    assert not set(line) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@given(st.text(st.characters(categories=["L", "N", "P"]), max_size=30))
def test_plain_words_are_unchanged(text):
    assert one_line(text) == text
    assert shorten(text) == text


def test_joiners_of_scripts_and_emoji_stay():
    for text in ("نمی\u200cخواهم", "👩\u200d🔬"):
        assert one_line(text) == text


def test_unwritable_value_is_named():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert shorten(nested) == "a list"
    assert shorten(10**5000) == "an int"


def test_nearest_name_is_found_quickly():
    names = [f"model{number}" for number in range(200)]
    assert nearest("x" * 100_000, names).startswith("; available: ")
    assert nearest("model1", names, "zoo/") == "; did you mean 'zoo/model1'?"


def test_error_with_an_unreadable_message_has_a_text():
    class Mute(RuntimeError):
        def __str__(self):
            raise GeneratorExit

    assert error_text(Mute()) == "Mute: its message can't be printed (GeneratorExit)"
    assert first_line(Mute()) == system_text(Mute())
    assert not is_out_of_memory(Mute())
