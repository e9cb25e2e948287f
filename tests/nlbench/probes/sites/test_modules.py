"""Blocks, attention and MLPs are found by structure, counted from the architecture."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer, resnet18, swin_t

import nlbench
from nlbench.introspection.module_stack import CallId, ModuleCall
from nlbench.models.networks.transformer import TransformerTiny
from nlbench.probes.sites.modules import ModulePlace, find_places
from nlbench.probes.sites.sites_observation import observe_sites

IDS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _by_kind(model: nn.Module, x: Tensor) -> dict[str, list[str]]:
    torch.manual_seed(0)
    kinds: dict[str, list[str]] = {"block": [], "attention": [], "mlp": []}
    for place in find_places(model, x, "blocks,attention,mlp"):
        kinds[place.kind].append(place.name)
    return kinds


HUGGING_FACE = [
    ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}, "h.{}", ".attn", ".mlp"),
    ("Llama", {"num_key_value_heads": 1}, "layers.{}", ".self_attn", ".mlp"),
    ("Gemma2", {"num_key_value_heads": 1, "head_dim": 8}, "layers.{}", ".self_attn", ".mlp"),
    (
        "Mixtral",
        {"num_key_value_heads": 1, "num_local_experts": 4},
        "layers.{}",
        ".self_attn",
        ".mlp",
    ),
    ("Bert", {}, "encoder.layer.{}", ".attention", ".intermediate.dense..output.dense"),
    ("ViT", {"image_size": 32, "patch_size": 8}, "layers.{}", ".attention", ".mlp"),
]


@pytest.mark.parametrize(
    ("family", "options", "block", "attention", "mlp"), HUGGING_FACE, ids=lambda v: str(v)[:8]
)
def test_hugging_face_blocks_have_attention_and_mlp(family, options, block, attention, mlp):
    transformers = pytest.importorskip("transformers")
    sizes = options if family == "GPT2" else {**SIZES, **options}
    if family == "ViT":
        sizes.pop("vocab_size")
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}Model")(config)
    blocks = [block.format(number) for number in range(2)]
    assert _by_kind(model, IMAGES if family == "ViT" else IDS) == {
        "block": blocks,
        "attention": [name + attention for name in blocks],
        "mlp": [name + mlp for name in blocks],
    }


def test_decoder_blocks_of_t5_have_two_attentions():
    transformers = pytest.importorskip("transformers")

    class Decoding(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
            self.t5 = transformers.T5Model(transformers.T5Config(vocab_size=64, **sizes))

        def forward(self, tokens):
            output = self.t5(input_ids=tokens, decoder_input_ids=tokens[:, :10])
            return output.last_hidden_state

    kinds = _by_kind(Decoding(), IDS)
    assert len(kinds["block"]) == 4
    assert len(kinds["attention"]) == 2 + 2 * 2
    assert kinds["mlp"][-1] == "t5.decoder.block.1.layer.2"


def test_mamba_blocks_have_no_mlp():
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    model = transformers.MambaModel(config)
    assert [p.name for p in find_places(model, IDS)] == ["layers.0", "layers.1"]
    assert find_places(model, IDS, "attention")[0].name == "layers.0.mixer"
    with pytest.raises(nlbench.Undefined):
        find_places(model, IDS, "mlp")


def test_each_pass_through_shared_block_is_place():
    transformers = pytest.importorskip("transformers")
    model = transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=8))
    group = "encoder.albert_layer_groups.0"
    kinds = _by_kind(model, IDS)
    assert kinds["block"] == [group, f"{group}:1"]
    assert kinds["mlp"][1] == f"{group}.albert_layers.0.ffn..ffn_output:1"


def test_pytorch_layers_have_an_mlp_of_two_children():
    kinds = _by_kind(TransformerTiny(64), torch.randint(1, 60, (2, 2, 9)))
    assert len(kinds["block"]) == 4
    assert len(kinds["attention"]) == 2 + 2 * 2
    assert kinds["mlp"][0] == "transformer.encoder.layers.0.linear1..linear2"


def test_vision_transformers_of_torchvision():
    kinds = _by_kind(VisionTransformer(32, 8, 2, 2, 16, 24), IMAGES)
    assert kinds["mlp"] == [f"encoder.layers.encoder_layer_{i}.mlp" for i in range(2)]
    assert len(kinds["attention"]) == 2


def test_stages_are_not_blocks():
    model = swin_t(num_classes=2)
    places = find_places(model, torch.randn(2, 3, 32, 32))
    assert len(places) == 2 + 2 + 6 + 2
    assert {place.before.channel for place in places} == {3}


def test_residual_blocks_of_convolutional_network_keep_shape():
    places = find_places(resnet18(num_classes=2), IMAGES)
    names = [place.name for place in places]
    assert names == ["layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1"]
    assert places[0].shape == (64, 8, 8)
    assert places[0].before.channel == 1
    with pytest.raises(nlbench.Undefined):
        find_places(resnet18(num_classes=2), IMAGES, "attention")


def test_a_network_without_residual_stream_has_no_blocks():
    with pytest.raises(nlbench.Undefined):
        find_places(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()), IMAGES)


def test_modules_by_glob():
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 2)))
    places = find_places(model, torch.randn(3, 4), "modules:1*")
    assert [place.name for place in places] == ["1", "1.0", "1.1"]
    assert {place.kind for place in places} == {"module"}
    with pytest.raises(nlbench.RequestError):
        find_places(model, torch.randn(3, 4), "modules:2")


@pytest.mark.parametrize("of", ["block", "", "activations,blocks", "modules:"])
def test_unknown_places_are_refused(of):
    with pytest.raises(nlbench.RequestError):
        find_places(nn.ReLU(), torch.zeros(1, 2), of)


def test_causal_convolution_mixes_positions_and_mlp_does_not():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv1d(6, 6, 2, padding=1)

        def forward(self, x):
            return self.inner(x.mT)[..., :-1].mT

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)

        def forward(self, x):
            return self.down(self.gate(x).sigmoid() * self.up(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Gated(), Mixer()

        def forward(self, x):
            x = x + self.first(x)
            return x + self.second(x)

    model = nn.Sequential(nn.Linear(6, 6), Block(), Block())
    kinds = _by_kind(model, torch.randn(2, 5, 6))
    assert kinds == {
        "block": ["1", "2"],
        "attention": ["1.second", "2.second"],
        "mlp": ["1.first", "2.first"],
    }


def test_output_is_replaced_in_what_the_module_returns():
    place = find_places(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2), "modules:0")[0]
    x, y = torch.zeros(1, 2), torch.ones(1, 2)
    assert place.set_output(x, y) is y
    second = ModulePlace(**{**vars(place), "result": 1})
    assert second.set_output((0, x), y) == (0, y)
    assert second.get_output([0, y]) is y
    keyed = ModulePlace(**{**vars(place), "result": "out", "argument": "hidden"})
    returned = {"out": x, "cache": 3}
    assert keyed.set_output(returned, y) == {"out": y, "cache": 3}
    assert returned["out"] is x
    call = ModuleCall(keyed.module, CallId("0", 0), keyed.module.forward, (), {"hidden": x})
    assert keyed.get_input(call) is x


def test_input_and_output_of_each_call_are_observed():
    shared = nn.Linear(3, 3)
    model, x = nn.Sequential(shared, nn.ReLU(inplace=True), shared), torch.randn(2, 3)
    seen = []
    observe_sites(model, [x, x], lambda b: seen.append((b.place, b.x, b.y.clone())), of="modules:0")
    assert [place for place, *_ in seen] == ["0", "0:1"] * 2
    with torch.no_grad():
        hidden = shared(x).relu()
        for (_, source, _), (_, inner, output) in zip(seen[::2], seen[1::2], strict=True):
            assert torch.equal(source, x)
            assert torch.equal(inner, hidden)
            assert torch.equal(output, shared(hidden))


def test_overlapping_places_are_both_observed():
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    of = "mlp,modules:layers.?.linear1"
    seen = {}
    observe_sites(model, [torch.randn(2, 5, 4)], lambda b: seen.setdefault(b.place, b), of=of)
    assert len(seen) == 4
    for mlp, layer in (("layers.0.linear1..linear2", "layers.0.linear1"),):
        assert torch.equal(seen[mlp].x, seen[layer].x)
        assert seen[mlp].y.shape != seen[layer].y.shape


def test_passes_in_several_threads_see_their_own_calls():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(4, 5, 3)

    def seen(number):
        values = []
        options = {"of": "modules:1", "rows": "tokens"}
        observe_sites(model, [x + number] * 3, lambda b: values.append(b.y.clone()), **options)
        return values

    expected = [model(x + number).flatten(0, 1).detach() for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for outputs, rows in zip(pool.map(seen, range(8)), expected, strict=True):
            assert len(outputs) == 3
            assert all(torch.allclose(output, rows, atol=1e-6) for output in outputs)


class Pair(nn.Module):
    """A block that returns its stream after another tensor of the same shape."""

    def __init__(self, is_last_first):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.is_last_first = is_last_first

    def forward(self, x):
        pair = 2 * x, x + self.mlp(x)
        return pair[::-1] if self.is_last_first else pair


@pytest.mark.parametrize("position", [0, 1])
def test_stream_equals_input_of_next_block(position):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Pair(position == 0) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)[position]
            return x

    places = find_places(Net(), torch.randn(2, 5, 4), "blocks")
    assert [place.result for place in places] == [position] * 3
