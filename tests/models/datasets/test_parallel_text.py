import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.models.datasets.parallel_text import END, PAD, START, Vocabulary, parallel
from nlbench.models.networks.transformer import TransformerTiny
from nlbench.models.training.recipes import augmented, noisy_labels, vanilla
from nlbench.models.training.tasks import get_task
from nlbench.subjects.weights import save_weights

ENGLISH = [f"the {size} {animal} sleeps" for size in ("big", "small") for animal in "abcde"]
GERMAN = [f"das {size} {animal} schläft" for size in ("große", "kleine") for animal in "abcde"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "en").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(GERMAN) + "\n", encoding="utf-8")
    return str(tmp_path / "en"), str(tmp_path / "de")


def test_two_files_become_pairs_in_two_splits(files):
    data = parallel(*files, test=0.3, vocabulary=60)
    pairs = {
        pair
        for split in (data.train, data.test)
        for pair in zip(split.sources, split.targets, strict=True)
    }
    assert pairs == set(zip(ENGLISH, GERMAN, strict=True))
    assert (len(data.train.sources), len(data.test.sources)) == (7, 3)


def test_inputs_are_the_source_and_the_shifted_target(files):
    data = parallel(*files, vocabulary=60, length=20)
    assert data.shape == (2, 21)
    assert data.train.inputs.shape == (len(data.train.sources), 2, 21)
    for i, (source, target) in enumerate(zip(data.train.sources, data.train.targets, strict=True)):
        given, shifted = data.train.inputs[i].tolist()
        wanted = data.train.target_tokens[i].tolist()
        words, other = data.vocabulary.encode([source, target])
        assert given[: len(words) + 1] == [*words, END]
        assert set(given[len(words) + 1 :]) <= {PAD}
        assert shifted[: len(other) + 1] == [START, *other]
        assert wanted[: len(other) + 1] == [*other, END]
        assert data.vocabulary.decode([wanted]) == [target]


def test_sample_is_the_same_for_the_same_seed(files):
    data = parallel(*files, test=0.5, vocabulary=60)
    first, again, other = (data.sample(4, seed=seed).inputs for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(data.sample(None).inputs) == 5
    sample = data.sample(None)
    targets = {tuple(row) for row in data.test.target_tokens.tolist()}
    assert {tuple(row) for row in sample.labels.tolist()} == targets


def test_long_pairs_are_skipped_and_counted(files, tmp_path):
    (tmp_path / "en").write_text("\n".join([*ENGLISH, "sleeps " * 40]), encoding="utf-8")
    (tmp_path / "de").write_text("\n".join([*GERMAN, "schläft"]), encoding="utf-8")
    data = parallel(*files, vocabulary=60, length=30, seed=1)
    assert len(data.train.sources) + len(data.test.sources) == 10
    assert "1 pairs left out" in data.preprocessing


def test_lines_end_only_at_line_feeds(tmp_path):
    (tmp_path / "en").write_bytes("a\u2028b\r\nc\r\n".encode() * 5)
    (tmp_path / "de").write_bytes(b"d\ne\n" * 5)
    data = parallel(str(tmp_path / "en"), str(tmp_path / "de"), test=0.2, vocabulary=60)
    assert {"a\u2028b", "c"} == set(data.train.sources) | set(data.test.sources)


def test_the_vocabulary_of_a_checkpoint_is_used_again(files, tmp_path):
    known = Vocabulary.learn(["entirely other words"], 40)
    file = tmp_path / "net.safetensors"
    save_weights(file, torch.nn.Linear(1, 1), {"vocabulary": known.text})
    data = parallel(*files, vocabulary_of=str(file))
    assert data.vocabulary.text == known.text
    assert data.classes == known.size


@given(st.lists(st.text(alphabet="abcdé ", min_size=1), min_size=1, max_size=5))
def test_decoding_inverts_encoding_up_to_spaces(sentences):
    words = Vocabulary.learn(["abcdé", "é d c b a"], 40)
    tidy = [" ".join(sentence.split()) for sentence in sentences]
    found = words.decode([[*row, END, 7] for row in words.encode(tidy)])
    assert found == tidy


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"source": ""}, r"parallel\.source"),
        ({"target": "no-such-file"}, "no-such-file"),
        ({"test": 0.0}, "test split"),
        ({"length": 2}, "2 tokens"),
        ({"vocabulary_of": "no-such-file"}, "no-such-file"),
    ],
)
def test_unusable_files_are_refused(files, change, name):
    arguments = {"source": files[0], "target": files[1], "vocabulary": 60, **change}
    with pytest.raises(RequestError, match=name):
        parallel(**arguments)


def test_files_of_different_length_are_refused(files, tmp_path):
    (tmp_path / "de").write_text("\n".join(GERMAN[:-1]), encoding="utf-8")
    with pytest.raises(RequestError):
        parallel(*files)


def test_non_utf8_text_raises(files, tmp_path):
    (tmp_path / "de").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError):
        parallel(*files)


@pytest.mark.parametrize("recipe", [augmented, noisy_labels])
def test_image_only_options_are_refused(files, recipe):
    with pytest.raises(RequestError):
        get_task(parallel(*files, vocabulary=60), recipe, 0)


def test_plain_recipes_are_fine(files):
    data = parallel(*files, vocabulary=60)
    assert get_task(data, vanilla, 0).size == len(data.train.sources)


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RequestError, match=r"nlbench\[translation\]"):
        Vocabulary.learn(["a"], 40)


def test_invalid_vocabulary_file_raises(tmp_path):
    (tmp_path / "v.json").write_text("{}")
    with pytest.raises(RequestError):
        Vocabulary.load(tmp_path / "v.json")


def test_weights_of_another_vocabulary_are_refused(files, tmp_path):
    from nlbench.subjects.load import load_subject
    from nlbench.subjects.spec import SubjectSpec

    data = parallel(*files, vocabulary=60)
    other = parallel(*reversed(files), vocabulary=60, seed=1, test=0.5)
    assert other.classes == data.classes
    file = tmp_path / "words.safetensors"
    save_weights(file, TransformerTiny(60), {"vocabulary": other.vocabulary.text})
    options = (("source", files[0]), ("target", files[1]), ("vocabulary", 60))
    spec = SubjectSpec("transformer-tiny", str(file), "parallel", samples=1, options=options)
    with pytest.raises(RequestError):
        load_subject(spec, torch.device("cpu"))
    known = replace(spec, options=(*options, ("vocabulary_of", str(file))))
    assert load_subject(known, torch.device("cpu")).facts.weights == "words.safetensors"


def test_unknown_tokenizer_is_refused_before_training(files):
    with pytest.raises(RequestError, match="'words'"):
        get_task(parallel(*files, vocabulary=60, bleu="words"), vanilla, 0)
