"""Faults that language models showed: axes, masks, kinds and roles of their activations."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.probes.sites.site import SiteBatch
from nlbench.probes.sites.sites_observation import observe_sites

IDS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def _observed(model: nn.Module, tokens=IDS, **options) -> dict[str, SiteBatch]:
    seen: dict[str, SiteBatch] = {}
    observe_sites(model, [tokens], lambda batch: seen.setdefault(batch.place, batch), **options)
    return seen


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))


def _llama(**options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def test_a_batch_of_one_sequence_is_one_sample():
    one, two = _observed(_gpt2(), IDS[:1]), _observed(_gpt2(), IDS)
    place = "transformer.h.0.mlp.act"
    assert one[place].x.shape == (1, 128)
    assert torch.allclose(one[place].x[0], two[place].x[0], atol=1e-6)


def test_gelu_written_out_has_the_kind_gelu():
    (batch,) = _observed(_gpt2(), select="kind:gelu").values()
    assert (batch.place, batch.site.kind) == ("transformer.h.0.mlp.act", "gelu")


def test_mambas_step_size_channels_are_not_tokens():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    model = transformers.MambaModel(transformers.MambaConfig(**sizes))
    seen = _observed(model, select="kind:softplus")
    (batch,) = seen.values()
    assert batch.x.shape == (2, 64)
    assert (batch.site.channel_axis, batch.site.assumed) == (1, False)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masked_softmaxes_leave_the_other_places_alone(attention):
    model = _llama(attn_implementation=attention)
    tokens = torch.randint(1, 64, (128, 6), generator=torch.Generator().manual_seed(0))
    settings = {"sites.attention": True}
    result = nlbench.evaluate(model, tokens, ["cka"], settings=settings)["cka"]
    softmax, activation = sorted(result.values, key=lambda value: value.status == "ok")
    assert softmax.status == "undefined"
    assert "masked" in softmax.reason
    assert activation.status == result.status == "ok"


def test_a_network_of_masked_softmaxes_only_is_undefined():
    model = _llama(attn_implementation="eager")
    settings = {"sites.attention": True, "sites.select": "role:attention"}
    result = nlbench.evaluate(model, IDS, ["cka"], settings=settings)["cka"]
    assert (result.status, result.reason) == ("undefined", "masked logits have no mean")


def test_gated_mlps_gate_has_role_gate():
    (batch,) = _observed(_llama()).values()
    assert (batch.place, batch.site.role) == ("model.layers.0.mlp.act_fn", "gate")
    reason = nlbench.evaluate(_llama(), IDS, ["cka"])["cka"].reason
    assert "gate products are not measured (at model.layers.0.mlp.act_fn" in reason


def test_padding_does_not_enter_means_of_language_model():
    model, place = _gpt2(), "transformer.h.0.mlp.act"
    padded = torch.cat([IDS[:, :10], torch.zeros(2, 6, dtype=torch.long)], 1)
    settings = {"sites.select": place}
    seen: list[SiteBatch] = []

    class Rows(nlbench.Measure):
        """Keeps the observation."""

        probe = "sites"

        def update(self, observation):
            seen.append(observation)

        def compute(self):
            return nlbench.Result.of({place: 0.0})

    mask = torch.arange(16).expand(2, -1) < 10
    inputs = {"input_ids": padded, "attention_mask": mask.long()}
    nlbench.evaluate(model, inputs, [Rows], settings=settings)
    nlbench.evaluate(model, IDS[:, :10], [Rows], settings=settings)
    assert torch.allclose(seen[0].x, seen[1].x, atol=1e-5)


def test_tokens_sorted_by_experts_are_undefined():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    result = nlbench.evaluate(transformers.MixtralModel(config), IDS, ["cka"])["cka"]
    assert result.status == "undefined"
    assert "which rows belong to which sample is unknown" in result.reason


def test_long_sequences_have_r2_with_tokens_as_rows():
    model = _llama()
    tokens = torch.randint(1, 64, (4, 200), generator=torch.Generator().manual_seed(0))
    result = nlbench.evaluate(model, tokens, ["r2"])["r2"]
    assert result.status == "undefined"
    assert "sites.rows=tokens" in result.reason
    settings = {"sites.rows": "tokens"}
    result = nlbench.evaluate(model, tokens, ["r2"], settings=settings)["r2"]
    assert (result.status, result.n) == ("ok", 4)


def test_calls_inside_recurrent_kernels_are_counted():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.lstm(x)[0][:, -1])

    result = nlbench.evaluate(Recurrent(), torch.randn(32, 240, 4), ["cka"])["cka"]
    assert result.reason == "activations not captured: lstm of lstm (2400 calls)"


def test_mapping_loader_is_measured_at_blocks():
    mask = torch.ones(8, 16, dtype=torch.long)
    mask[::2, 9:] = 0
    tokens = torch.randint(1, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    loader = [{"input_ids": tokens[i : i + 4], "attention_mask": mask[i : i + 4]} for i in (0, 4)]
    run = nlbench.evaluate(
        _llama(), loader, ["linearity", "influence"], settings={"sites.of": "blocks"}
    )
    (value,) = run["linearity"].values
    assert value.place == "model.layers.0"
    assert (value.n, value.statistics["rows"]) == (8, int(mask.sum()))
    assert 0 < value.statistics["in_sample"] <= 1
    assert run["influence"].values[0].statistics["value"] > 0
