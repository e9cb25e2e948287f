import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.models.datasets.number_words import number_words, spell_out
from nlbench.subjects.load import load_dataset

# Written out by hand from the usual grammars; French as before the spelling of 1990.
KNOWN = {
    "en": {
        0: "zero",
        13: "thirteen",
        40: "forty",
        99: "ninety-nine",
        100: "one hundred",
        101: "one hundred and one",
        342: "three hundred and forty-two",
        1000: "one thousand",
        1066: "one thousand and sixty-six",
        1100: "one thousand one hundred",
        612_345: "six hundred and twelve thousand three hundred and forty-five",
    },
    "fr": {
        0: "zéro",
        21: "vingt et un",
        22: "vingt-deux",
        61: "soixante et un",
        70: "soixante-dix",
        71: "soixante et onze",
        77: "soixante-dix-sept",
        80: "quatre-vingts",
        81: "quatre-vingt-un",
        91: "quatre-vingt-onze",
        99: "quatre-vingt-dix-neuf",
        100: "cent",
        101: "cent un",
        200: "deux cents",
        201: "deux cent un",
        280: "deux cent quatre-vingts",
        1000: "mille",
        1001: "mille un",
        80_000: "quatre-vingt mille",
        200_000: "deux cent mille",
        321_671: "trois cent vingt et un mille six cent soixante et onze",
    },
}


@pytest.mark.parametrize(
    ("language", "number", "words"),
    [(language, *entry) for language, known in KNOWN.items() for entry in known.items()],
)
def test_numbers_are_spelled_out(language, number, words):
    assert spell_out(number, language) == words


UNITS = {
    "en": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize",
}
MORE = {
    "en": "twenty=20 thirty=30 forty=40 fifty=50 sixty=60 seventy=70 eighty=80 ninety=90",
    "fr": "vingt=20 trente=30 quarante=40 cinquante=50 soixante=60 quatre-vingt=80",
}
HUNDRED = {"en": "hundred", "fr": "cents?"}
THOUSAND = {"en": "thousand", "fr": "mille"}


def read(words, language):
    """Read a number word back: cut it into known words and add up, as a child would."""
    values = {word: value for value, word in enumerate(UNITS[language].split())}
    values |= {k: int(v) for k, v in (pair.split("=") for pair in MORE[language].split())}
    longest = sorted(values, key=len, reverse=True)
    glue = "|".join((f"({HUNDRED[language]})", f"({THOUSAND[language]})", "(and|et|s|[ -])"))
    total = group = 0
    while words:
        found = re.match(rf"({'|'.join(longest)})|{glue}", words)
        assert found, words
        words = words[found.end() :]
        if found[1]:
            group += values[found[1]]
        elif found[2]:
            group = group // 100 * 100 + max(group % 100, 1) * 100
        elif found[3]:
            total, group = max(group, 1) * 1000, 0
    return total + group


@given(number=st.integers(0, 999_999), language=st.sampled_from(["en", "fr"]))
def test_every_number_can_be_read_back(number, language):
    assert read(spell_out(number, language), language) == number


@pytest.mark.parametrize(("number", "language"), [(-1, "en"), (10**6, "en"), (1, "nl")])
def test_unsupported_number_is_refused(number, language):
    with pytest.raises(RequestError):
        spell_out(number, language)


def test_corpus_pairs_the_same_number_in_both_languages():
    data = number_words(train=50, test=10)
    for split in (data.train, data.test):
        for source, target in zip(split.sources, split.targets, strict=True):
            assert read(source, "en") == read(target, "fr")


def test_splits_share_no_number():
    data = number_words(train=60, test=40, largest=99)
    assert not set(data.train.sources) & set(data.test.sources)
    assert len(set(data.train.sources) | set(data.test.sources)) == 100


def test_the_seed_decides_the_corpus():
    first, again, other = (number_words(train=30, test=5, seed=seed) for seed in (1, 1, 2))
    assert first.train.sources == again.train.sources
    assert first.vocabulary.text == again.vocabulary.text
    assert first.train.sources != other.train.sources


def test_the_options_come_from_the_command_line():
    data = load_dataset(
        "number-words", {"train": "20", "test": "4", "source": "fr", "target": "en"}
    )
    assert (len(data.train.sources), data.train.targets[0].isascii()) == (20, True)
