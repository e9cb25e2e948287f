"""Networks without spans of blocks load with transformers, or PyTorch, alone."""

import json
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nlbench.cli.app import main
from nlbench.errors import RequestError
from nlbench.models.removal.export import export_pretrained, export_spans
from nlbench.models.removal.span_removal import find_span
from nlbench.models.removal.spans import SpanEvaluation, SpanResult, has_tied_head, pretrained_model

SHAPE = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
LLAMA = {**SHAPE, "intermediate_size": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}
TOKENS = torch.randint(0, 300, (8, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def library():
    """Import it here, since every worker collects this file and one runs it."""
    global transformers
    transformers = pytest.importorskip(
        "transformers", reason="exports are folders of transformers, which isn't installed"
    )


def tiny(kind, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings, use_cache=False)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def with_logits(model):
    """Make a model return its logits, as a loaded subject does."""
    model.register_forward_hook(lambda module, args, output: output.logits)
    return model


def shortened(model, text, map_name):
    evaluation = SpanEvaluation(model, TOKENS, TOKENS, TOKENS.roll(-1, 1))
    result = evaluation.evaluate([find_span(model, TOKENS[:2], text)])[0]
    return evaluation.network(result, map_name)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder in bfloat16 with a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("source") / "llama"
    tiny("Llama", **LLAMA).bfloat16().save_pretrained(folder)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["import this, define that, return nothing"] * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    (folder.parent / "corpus.txt").write_text(Path(__file__).read_text())
    return folder


def run(monkeypatch, source, tmp_path, *options):
    arguments = [
        *("nlbench", "remove", "--model", f"hf/{source}", "--data", f"{source.parent}/corpus.txt"),
        *("--samples", "4", "--fit-samples", "8", "--set", "text.length=16"),
        *("--set", "text.windows=16", "--out", str(tmp_path / "out"), *options),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_command_exports_what_transformers_loads(monkeypatch, source, tmp_path, capsys):
    folder = tmp_path / "pruned"
    options = ("--of", "spans:2", "--by", "linearity", "--judged", "2", "--export", str(folder))
    assert run(monkeypatch, source, tmp_path, *options) == 0
    printed = capsys.readouterr().out
    assert "reloaded by transformers alone" in printed
    assert "perplexity" in printed
    settings = json.loads((folder / "config.json").read_text())
    assert settings["num_hidden_layers"] == 3
    assert settings["use_cache"] is True
    assert settings["dtype"] == "bfloat16"
    assert settings["tie_word_embeddings"] is True
    assert "quantization_config" not in settings
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o644
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) > 200
    page = (tmp_path / "out" / "spans.html").read_text()
    assert "rows per coefficient" in page


def test_affine_map_is_not_exported(monkeypatch, source, tmp_path, capsys):
    monkeypatch.setattr(SpanResult, "choose", lambda self, name: name)
    options = ("--span", "1-2", "--map", "affine", "--export", str(tmp_path / "pruned"))
    assert run(monkeypatch, source, tmp_path, *options) == 2
    assert re.search(r"--map fold costs -?\d", capsys.readouterr().err)
    assert not (tmp_path / "pruned").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--span", "1-2", "--map", "linear"), "expected skip, fold, affine"),
        (("--span", "3-7"), "the network has model.layers.0..4"),
        (("--of", "spans:3", "--by", "depth", "--count", "2"), "1 spans leave no other"),
    ],
)
def test_wrong_requests_print_one_line(monkeypatch, source, tmp_path, capsys, options, message):
    assert run(monkeypatch, source, tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_two_spans_do_not_overlap(monkeypatch, source, tmp_path, capsys):
    options = ("--of", "spans:2", "--by", "depth", "--count", "2", "--judged", "1", "--json")
    assert run(monkeypatch, source, tmp_path, *options, "--map", "skip") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["span"] for row in rows] == ["model.layers.3..4", "model.layers.1..2"]


def test_span_from_block_0_unties_the_head(monkeypatch, tmp_path):
    facts = {"missing": [], "unexpected": [], "difference": 0, "use_cache": True, "generates": True}
    # Another process takes seconds; this one loads the folder below.
    monkeypatch.setattr("nlbench.models.removal.export._reload", lambda *_: facts | {"agrees": 1})
    model = with_logits(tiny("Llama", **LLAMA))
    assert has_tied_head(model)
    network = shortened(model, "0-1", "fold")
    assert not has_tied_head(network)
    assert has_tied_head(model)
    report = export_pretrained(network, tmp_path / "pruned", TOKENS)
    assert "without tokenizer and generation config" in report
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pruned").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, network(TOKENS), rtol=1e-4, atol=1e-5)


def test_folds_of_gpt2_keep_the_weights_layout():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=4, n_head=2)
    model = with_logits(transformers.GPT2LMHeadModel(config).eval())
    network = shortened(model, "1-2", "fold")
    assert pretrained_model(network).config.n_layer == 2
    assert [block.attn.layer_idx for block in network.transformer.h] == [0, 1]
    assert pretrained_model(model).config.n_layer == 4


def test_norm_between_mlp_and_stream_prevents_fold():
    model = with_logits(tiny("Gemma2", **SHAPE, intermediate_size=32, num_key_value_heads=1,
                             head_dim=8))  # fmt: skip
    with pytest.raises(RequestError):
        shortened(model, "1-2", "fold")
    config = pretrained_model(shortened(model, "1-2", "skip")).config
    assert len(config.layer_types) == config.num_hidden_layers == 3


def test_export_replaces_no_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    network = with_logits(tiny("Llama", **LLAMA))
    with pytest.raises(RequestError):
        export_pretrained(network, tmp_path, TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("nlbench.models.removal.export._reload", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_pretrained(with_logits(tiny("Llama", **LLAMA)), tmp_path / "pruned", TOKENS)
    assert not list(tmp_path.iterdir())


def test_network_without_a_pretrained_model_is_refused(tmp_path):
    with pytest.raises(RequestError):
        export_pretrained(torch.nn.ReLU(), tmp_path / "pruned", TOKENS)


def reload_here(script, path, inputs, outputs):
    """Load an export in this process, since another one takes seconds."""
    kind = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    model, loading = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
    with torch.no_grad():
        difference = float((model.eval()(inputs)[0] - outputs).abs().max())
        facts = {"agrees": True, "difference": difference}
        if model.can_generate():
            new = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            texts = [model.generate(inputs[:1], use_cache=cache, **new) for cache in (True, False)]
            facts["agrees"] = torch.equal(*texts)
            facts["generates"] = len(texts[0][0]) == len(inputs[0]) + 4
    keys = ("missing_keys", "unexpected_keys")
    return facts | {key.partition("_")[0]: sorted(loading[key]) for key in keys}


SIZES = {**SHAPE, "intermediate_size": 32, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 1}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 4}


@pytest.mark.parametrize(
    ("name", "settings", "maps"),
    [
        ("MistralForCausalLM", GROUPED, {"skip", "fold"}),
        ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, {"skip", "fold"}),
        ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}, {"skip"}),
        ("GPTNeoXForCausalLM", SIZES, {"skip", "fold"}),
        ("OPTForCausalLM", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}, {"skip", "fold"}),
        ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 2}, {"skip"}),
        ("BertModel", SIZES, {"skip"}),
        ("ViTForImageClassification", IMAGES, {"skip", "fold"}),
    ],
)
def test_architectures_reload_without_blocks(name, settings, maps, tmp_path, monkeypatch):
    monkeypatch.setattr("nlbench.models.removal.export._reload", reload_here)
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    options = {"add_pooling_layer": False} if name == "BertModel" else {}
    model = kind(kind.config_class(**settings), **options).eval()
    model.register_forward_hook(lambda module, args, output: output[0])
    inputs = torch.randn(8, 3, 16, 16) if "ViT" in name else TOKENS
    evaluation = SpanEvaluation(model, inputs, inputs, None)
    result = evaluation.evaluate([find_span(model, inputs[:2], "1-2")])[0]
    assert set(result.costs) == maps | {"affine"}
    for map_name in maps:
        network = evaluation.network(result, map_name)
        report = export_pretrained(network, tmp_path / map_name, inputs)
        assert ("random pooler" in report) == bool(options)
        loaded = kind.from_pretrained(tmp_path / map_name).eval()
        assert loaded.config.num_hidden_layers == 3
        with torch.no_grad():
            torch.testing.assert_close(loaded(inputs)[0], network(inputs), rtol=1e-4, atol=1e-5)


def test_network_of_pytorch_is_exported_as_program(tmp_path, monkeypatch):
    # Another process takes seconds, and this one loads the program below.
    monkeypatch.setattr("nlbench.models.removal.export._reload", lambda *_: {"difference": 0.0})
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    network = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    inputs = torch.randn(8, 5, 8)
    evaluation = SpanEvaluation(network, inputs, inputs, None)
    result = evaluation.evaluate([find_span(network, inputs[:2], "1-2")])[0]
    shorter = evaluation.network(result, "fold")
    removed = [replace(result, chosen="fold")]
    subject = SimpleNamespace(inputs=inputs)
    assert "PyTorch alone" in export_spans(shorter, removed, tmp_path / "new", "own", subject)
    program = torch.export.load(tmp_path / "new" / "network.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(inputs), shorter(inputs), rtol=1e-4, atol=1e-5)
