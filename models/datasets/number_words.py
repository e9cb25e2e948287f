"""Numbers written out in English and French: a parallel corpus that needs no download."""

from __future__ import annotations

import numpy as np

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.subjects.data import dataset

from .parallel_text import ParallelText, make_parallel

LARGEST = 999_999


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ENGLISH = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_FRENCH = _words(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize dix-sept dix-huit dix-neuf"
)
_FRENCH_TENS = _words("vingt trente quarante cinquante soixante")


def spell_out(number: int, language: str) -> str:
    """Spell out a number from 0 to 999,999 in English or French.

    English as in Britain (*one hundred and one*), French as in France, hyphenated as before 1990
    (*soixante et onze*, *quatre-vingt-dix-sept*).

    Examples
    --------
    >>> [spell_out(71, language) for language in ("en", "fr")]
    ['seventy-one', 'soixante et onze']
    """
    if not 0 <= number <= LARGEST:
        raise RequestError(f"number words: got {number}, expected 0 to {LARGEST}")
    if language not in LANGUAGES:
        raise RequestError(f"number words: unknown language '{language}', expected en or fr")
    return LANGUAGES[language](number)


def _english(number: int) -> str:
    if number < 20:
        return _ENGLISH[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return f"{_ENGLISH_TENS[tens - 2]}-{_ENGLISH[ones]}" if ones else _ENGLISH_TENS[tens - 2]
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, unit)
    head = f"{_english(count)} {name}"
    if not rest:
        return head
    return f"{head} {'and ' if rest < 100 else ''}{_english(rest)}"


def _french(number: int, last: bool = True) -> str:
    """Spell out a number.

    The words "cent" and "vingt" take an s only if they are the `last` word.
    """
    if number < 20:
        return _FRENCH[number]
    if number == 80:
        return "quatre-vingts" if last else "quatre-vingt"
    if number < 80:
        tens, ones = divmod(number, 10)
        if tens == 7:
            tens = 6
            ones = ones + 10
        name = _FRENCH_TENS[tens - 2]
        if not ones:
            return name
        return f"{name} et {_FRENCH[ones]}" if ones in (1, 11) else f"{name}-{_FRENCH[ones]}"
    if number < 100:
        return f"quatre-vingt-{_FRENCH[number - 80]}"
    unit, name = (1000, "mille") if number >= 1000 else (100, "cent")
    count, rest = divmod(number, unit)
    head = name if count == 1 else f"{_french(count, last=False)} {name}"
    if rest:
        return f"{head} {_french(rest, last)}"
    return f"{head}s" if unit == 100 and count > 1 and last else head


LANGUAGES = {"en": _english, "fr": _french}


@dataset(
    options={
        "source": Option("en", "language to translate from", choices=("en", "fr")),
        "target": Option("fr", "language to translate to", choices=("en", "fr")),
        "train": Option(4000, "training pairs", minimum=1, maximum=500_000),
        "test": Option(512, "test pairs", minimum=1, maximum=100_000),
        "largest": Option(LARGEST, "largest number", minimum=9, maximum=LARGEST),
        "seed": Option(0, "seed for the numbers and the split", minimum=0, maximum=2**32 - 1),
        "vocabulary": Option(128, "maximum vocabulary size", minimum=16, maximum=2**20),
        "length": Option(
            32, "maximum tokens per sentence; longer pairs are dropped", minimum=2, maximum=2**17
        ),
    }
)
def number_words(
    source: str = "en",
    target: str = "fr",
    train: int = 4000,
    test: int = 512,
    largest: int = LARGEST,
    seed: int = 0,
    vocabulary: int = 128,
    length: int = 32,
) -> ParallelText:
    """Numbers up to 999,999 spelled out in English and French.

    The numbers are drawn without replacement by NumPy's legacy generator, whose stream is frozen.

    Examples
    --------
    >>> data = number_words(train=200, test=20)
    >>> data.classes, len(data.test.sources)
    (128, 20)
    """
    if source == target:
        raise RequestError(f"number-words translates from {source} to itself; choose two languages")
    if train + test > largest + 1:
        raise RequestError(
            f"number-words: {train} + {test} different numbers requested, but there are only "
            f"{largest + 1}"
        )
    numbers = np.random.RandomState(seed).permutation(largest + 1)[: train + test].tolist()
    pairs = [(spell_out(number, source), spell_out(number, target)) for number in numbers]
    return make_parallel(
        "number-words",
        pairs[:train],
        pairs[train:],
        vocabulary=vocabulary,
        length=length,
        bleu_tokens="13a",
        origin=(
            f"numbers 0 to {largest} in words, {source} to {target}; the first {train} of numpy "
            f"RandomState({seed}).permutation for training, the next {test} for test"
        ),
        source=Source("generated by nlbench's own rules"),
    )
