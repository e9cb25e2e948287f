"""Models in folders of transformers have its weights, its tokenizer, and nothing is downloaded."""

import contextlib
import json
import shutil
from unittest.mock import Mock

import pytest
import torch

import nlbench
from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.datasets import text as datasets_text
from nlbench.models.datasets.text import text_files
from nlbench.models.networks.hugging_face import model_folder
from nlbench.plan import make_plan
from nlbench.subjects.load import load_subject
from nlbench.subjects.model import default_data, model_info
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights_choice import choose_weights

WORDS = 300


@pytest.fixture(scope="module", autouse=True)
def library():
    """Import it here, since every worker collects this file and one runs it."""
    global transformers
    transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def few_files():
    """Read a quarter of the standard library, which a tokenizer does in a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets_text, "text_files", lambda name: text_files(name)[::4])
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write small models of several kinds, with a tokenizer where it matters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    root = tmp_path_factory.mktemp("models")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<eos>", "[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(["import this, define that, return nothing"] * 9, trainer)
    size = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    wide = {**size, "vocab_size": WORDS, "intermediate_size": 32}
    torch.manual_seed(0)
    networks = {
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2)
        ),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide)).bfloat16(),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**wide)),
        "vit": transformers.ViTForImageClassification(
            transformers.ViTConfig(**size, intermediate_size=32, image_size=32, num_labels=10)
        ),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2)
        ),
    }
    for name, network in networks.items():
        network.save_pretrained(root / name, max_shard_size="20KB" if name == "llama" else "1GB")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(
        root / "gpt2"
    )
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(root / "bert")
    return root


def loaded(folder, **spec):
    name = f"hf/{folder}"
    data = spec.pop("data", default_data(name))
    return load_subject(
        SubjectSpec(name, spec.pop("weights", "auto"), data, **spec), torch.device("cpu")
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_folder_is_measured_with_its_weights(folders, name):
    subject = loaded(folders / name, options=(("length", 16),))
    own = transformers.AutoModelForCausalLM if name != "bert" else transformers.AutoModelForMaskedLM
    model = own.from_pretrained(folders / name, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model.eval()(subject.inputs[:4]).logits
        torch.testing.assert_close(subject.model(subject.inputs[:4]), expected, rtol=0, atol=0)
    assert subject.facts.weights == "trained"
    remark = subject.facts.weights_metadata.get("remark", "")
    assert ("bfloat16" in remark) == (name == "llama")


def test_text_is_read_by_tokenizer_of_folder(folders):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "gpt2")
    causal = loaded(folders / "gpt2", options=(("length", 16),))
    source = "\n".join(path.read_text() for path in text_files("python"))
    texts = [tokenizer.decode(row) for row in causal.inputs[:3]]
    assert all(text in source for text in texts)
    # Tokens are longer than bytes.
    assert sum(map(len, texts)) > 3 * 16
    assert causal.labels[:, :-1].equal(causal.inputs[:, 1:])
    masked = loaded(folders / "bert", options=(("length", 16),))
    assert masked.labels is None
    assert masked.inputs[:, 0].unique().item() == 1
    assert masked.inputs[:, -1].unique().item() == 2


def test_a_folder_without_a_tokenizer_reads_bytes(folders):
    subject = loaded(folders / "llama", options=(("length", 16),))
    assert "(bytes)" in subject.facts.preprocessing
    assert subject.inputs.max() < 256


def test_blocks_of_a_folder_are_measured_by_name(folders, tmp_path):
    request = nlbench.Request(
        "linearity,substitution",
        f"hf/{folders}/*t2",
        data="auto",
        settings={"sites.of": "blocks", "text.length": 16},
    )
    run = nlbench.run(request, tmp_path / "run")
    scores = run.scores[run.scores.statistic == "value"]
    places = scores[scores.place != ""]
    assert (places.status == "ok").all()
    blocks = [f"transformer.h.{i}" for i in range(3)]
    assert places.groupby("measure").place.apply(list).to_dict() == {
        "linearity": blocks,
        "substitution": blocks,
    }


def test_blocks_are_measured_on_loader_of_tokenizers_mappings(folders):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "gpt2", pad_token="<eos>")
    texts = [f"define the square of {i} as {i * i}" + " and that" * (i % 3) for i in range(64)]

    def collate(batch):
        pad = {"padding": "max_length", "max_length": 40, "truncation": True}
        encoded = tokenizer(batch, return_tensors="pt", **pad)
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        return {**encoded, "labels": labels}

    loader = torch.utils.data.DataLoader(texts, 8, collate_fn=collate)
    settings = {"sites.of": "blocks"}
    run = nlbench.evaluate(model, loader, ["linearity", "substitution"], settings=settings)
    tokens = sum(len(tokenizer(text)["input_ids"][:40]) for text in texts)
    assert [v.statistics["rows"] for v in run["linearity"].values] == [tokens] * 3
    assert [v.place for v in run["substitution"].values] == [f"transformer.h.{i}" for i in range(3)]
    labelled = run["substitution"].values[0].statistics
    assert {"loss", "kl"} <= labelled.keys()


def test_images_fit_their_model(folders):
    assert loaded(folders / "vit", data="digits", samples=4).inputs.shape == (4, 3, 32, 32)
    with pytest.raises(RequestError, match=r"\(3, 224, 224\)"):
        loaded(folders / "vit", samples=4)
    options = (("classes", 100),)
    with pytest.raises(RequestError, match="classes"):
        loaded(folders / "vit", data="random", samples=4, options=options)


def test_images_follow_the_folders_preprocessing(folders, tmp_path):
    shutil.copytree(folders / "vit", tmp_path / "vit")
    settings = {
        "size": {"height": 32, "width": 32},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }
    file = tmp_path / "vit" / "preprocessor_config.json"
    file.write_text(json.dumps(settings))
    info = model_info(registry.load("models", f"hf/{tmp_path}/vit"))
    assert info.preprocessing(None).text.startswith("resized to 32 pixels on both sides (bicubic")
    assert info.preprocessing(None).mean == (0.1, 0.2, 0.3)
    file.write_text(json.dumps({**settings, "size": {}}))
    with pytest.raises(RequestError):
        info.preprocessing(None)


def test_a_configuration_alone_is_initialised(folders, tmp_path):
    (tmp_path / "config.json").write_bytes((folders / "gpt2" / "config.json").read_bytes())
    options = (("length", 16),)
    first, again, other = (
        loaded(tmp_path, weights="init", seed=seed, options=options).facts.weights_hash
        for seed in (0, 0, 1)
    )
    assert first == again != other
    choice = choose_weights(SubjectSpec(f"hf/{tmp_path}", "auto", "text/python"))
    assert choice.label == "init"
    assert "freshly initialised: the weights of" in choice.note
    with pytest.raises(RequestError):
        choose_weights(SubjectSpec(f"hf/{tmp_path}", "trained", "text/python"))


def test_a_changed_file_is_another_subject(folders, tmp_path):
    shutil.copytree(folders / "llama", tmp_path / "model")
    request = nlbench.Request("r2", f"hf/{tmp_path}/model", weights=("auto", "init"))
    keys = [subject.key for subject in make_plan(request, "cpu", print).subjects]
    assert keys == [subject.key for subject in make_plan(request, "cpu", print).subjects]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for name, changed in (
        ("config.json", json.dumps({**config, "hidden_act": "relu"})),
        ("tokenizer.json", "{}"),
    ):
        (tmp_path / "model" / name).write_text(changed)
        later = [subject.key for subject in make_plan(request, "cpu", print).subjects]
        assert not set(keys) & set(later)
        keys = later


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        "{}",
        '{"model_type": "gpt2", "is_encoder_decoder": true}',
        '{"model_type": "gpt2", "quantization_config": {}}',
    ],
)
def test_unusable_configuration_raises_in_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(RequestError, match=str(tmp_path)) as caught:
        registry.load("models", f"hf/{tmp_path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["AutoConfig", "AutoTokenizer"])
def test_code_in_folder_is_neither_run_nor_offered(folders, tmp_path, part, monkeypatch):
    monkeypatch.setattr("builtins.input", asked := Mock(return_value="y"))
    folder = tmp_path / "gpt2"
    shutil.copytree(folders / "gpt2", folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    name = "config.json" if part == "AutoConfig" else "tokenizer_config.json"
    config = json.loads((folder / name).read_text())
    code = "own.Own" if part == "AutoConfig" else ["own.Own", None]
    changes = {"model_type": "own"} if part == "AutoConfig" else {"tokenizer_class": "Own"}
    (folder / name).write_text(json.dumps({**config, **changes, "auto_map": {part: code}}))
    # A tokenizer has a standard class that takes the place of its own.
    with contextlib.suppress(RequestError):
        loaded(folder, options=(("length", 16),))
    assert not asked.called
    assert not (tmp_path / "ran").exists()


def test_unknown_code_and_missing_tensors_raise(folders, tmp_path):
    shutil.copytree(folders / "gpt2", tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "config.json"
    config = json.loads(file.read_text())
    for change, name in (
        ({"architectures": ["OwnModel"]}, "OwnModel"),
        ({"n_layer": 4}, r"transformer\.h\.3"),
        ({"model_type": "unheard-of"}, "unheard-of"),
    ):
        file.write_text(json.dumps({**config, **change}))
        with pytest.raises(RequestError, match=name):
            loaded(tmp_path / "gpt2", options=(("length", 16),))


def test_encoder_with_a_decoder_is_refused_with_advice(folders):
    with pytest.raises(RequestError):
        registry.load("models", f"hf/{folders}/t5")


def test_mismatched_data_raise(folders):
    with pytest.raises(RequestError):
        loaded(folders / "gpt2", data="digits")


def test_cached_model_is_found_by_name(folders, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a1")
    shutil.copytree(folders / "gpt2", repository / "snapshots" / "a1")
    assert "hf/somebody/small" in registry.entries("models")
    assert model_folder("somebody/small") == repository / "snapshots" / "a1"
    with pytest.raises(RequestError):
        model_folder("somebody/absent")


def test_unmatched_glob_is_refused_with_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RequestError):
        registry.expand("models", ["hf/*"])
