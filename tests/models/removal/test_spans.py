"""Spans of blocks: maps, costs, and plain networks that compute the same."""

import math

import pytest
import torch
from torch import nn

from nlbench.errors import RequestError
from nlbench.models.removal.commands import remove
from nlbench.models.removal.span_removal import find_span, parse_span
from nlbench.models.removal.spans import Span, SpanEvaluation, StreamFit, cut_config, last_linear
from nlbench.probes.replacement import find_calls


class Block(nn.Module):
    def __init__(self, width, is_affine=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.Identity() if is_affine else nn.GELU()

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width=6, blocks=4, is_affine=False, norm=None):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width, is_affine) for _ in range(blocks))
        self.norm = norm or nn.Identity()
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.head(x)


TOKENS = torch.randint(0, 11, (24, 10), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.roll(-1, 1)


def decoder(**settings):
    torch.manual_seed(0)
    return Decoder(**settings).eval()


def judged(model, text, labels=LABELS):
    evaluation = SpanEvaluation(model, TOKENS, TOKENS, labels)
    return evaluation, evaluation.evaluate([find_span(model, TOKENS[:2], text)])[0]


def test_affine_blocks_are_replaced_exactly():
    model = decoder(is_affine=True)
    _, result = judged(model, "1-2")
    fitted = result.maps["affine"]
    eye = torch.eye(6)
    matrices = [eye + (b.down.weight @ b.up.weight).T for b in model.layers[1:3]]
    torch.testing.assert_close((fitted.weight + eye).float(), matrices[0] @ matrices[1],
                               rtol=1e-3, atol=1e-4)  # fmt: skip
    assert fitted.r2 == pytest.approx(1)
    assert result.costs["affine"].mean == pytest.approx(0, abs=1e-5)


def test_penalty_prefers_the_identity():
    # Noise that no map predicts: few rows, so the largest penalty is the best.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 12, generator=generator)
    fit = StreamFit(has_bias=True)
    fit.add(x, x, x + torch.randn(x.shape, generator=generator))
    assert fit.fit().ridge == 1.0


@pytest.mark.parametrize("has_bias", [True, False])
def test_fit_without_penalty_is_least_squares(has_bias):
    generator = torch.Generator().manual_seed(0)
    u, x = torch.randn(2, 40, 30, 4, generator=generator).double()
    y = x + (u + 0.1 * u.tanh()) @ torch.randn(4, 4, generator=generator).double() + has_bias
    fit = StreamFit(has_bias)
    fit.add(u[:7], x[:7], y[:7])
    fit.add(u[7:], x[7:], y[7:])
    fitted = fit.fit()
    assert fitted.ridge == 0
    rows = u.flatten(0, 1)
    if has_bias:
        rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)
    expected = torch.linalg.lstsq(rows, (y - x).flatten(0, 1)).solution
    torch.testing.assert_close(fitted.weight, expected[:4])
    assert fitted.rows_per_coefficient == 1200 / (4 + has_bias)


def test_first_positions_are_fitted_but_not_scored():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 60, 24, generator=generator)
    y = x + 0.5 * x.relu()
    plain = StreamFit(has_bias=True)
    plain.add(x, x, y)
    sink = 1000 * torch.randn(24, generator=generator)
    x, y = x.clone(), y.clone()
    x[:, 0] = sink
    y[:, 0] = 2 * sink
    planted = StreamFit(has_bias=True)
    planted.add(x, x, y)
    fitted = planted.fit()
    torch.testing.assert_close(x[0, 0] + fitted(x[0, 0]), y[0, 0], rtol=1e-3, atol=1)
    assert fitted.r2 == pytest.approx(plain.fit().r2, abs=0.05)
    assert fitted.r2_with_first > 0.999 > fitted.r2


@pytest.mark.parametrize("map_name", ["skip", "fold", "affine"])
def test_plain_network_computes_the_replacement(map_name):
    model = decoder()
    evaluation, result = judged(model, "layers.1..2")
    network = evaluation.network(result, map_name)
    with torch.no_grad():
        outputs, original = network(TOKENS), model(TOKENS)
    expected = evaluation.outputs(result, map_name, TOKENS)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    cost = (
        nn.functional.cross_entropy(outputs.flatten(0, 1), LABELS.flatten())
        - nn.functional.cross_entropy(original.flatten(0, 1), LABELS.flatten())
    )  # fmt: skip
    assert result.costs[map_name].mean == pytest.approx(float(cost), abs=1e-5)
    assert len(network.layers) == (3 if map_name == "affine" else 2)
    if map_name == "skip":
        del model.layers[1:3]
        torch.testing.assert_close(model(TOKENS), outputs)


class PairBlock(Block):
    """A block that receives positions before the stream, and returns the stream second."""

    def forward(self, positions, x):
        return 2 * x, super().forward(x)


class PairDecoder(Decoder):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            _, x = layer(x[:, :, :1].sigmoid(), x)
        return self.head(x)


@pytest.mark.parametrize("map_name", ["skip", "fold", "affine"])
def test_stream_among_arguments_and_outputs_is_mapped(map_name):
    pairs = PairDecoder().eval()
    for layer in pairs.layers:
        layer.__class__ = PairBlock
    pairs.load_state_dict(decoder().state_dict())
    outputs = []
    for model in (decoder(), pairs):
        evaluation, result = judged(model, "layers.1..2")
        outputs.append(evaluation.network(result, map_name)(TOKENS))
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("labels", [LABELS, None])
def test_costs_of_probabilities_are_those_of_logits(labels):
    model = decoder()
    _, expected = judged(model, "1-2", labels)
    model.head = nn.Sequential(model.head, nn.Softmax(-1))
    _, result = judged(model, "1-2", labels)
    for name, cost in expected.costs.items():
        assert result.costs[name].mean == pytest.approx(cost.mean, rel=1e-4)


def test_cost_without_labels_is_a_divergence():
    assert judged(decoder(), "1-2", None)[1].costs["skip"].mean > 0


def test_ignored_labels_do_not_count():
    labels = LABELS.clone()
    labels[:, 5:] = -100
    costs = judged(decoder(), "1-2", labels)[1].costs
    with torch.no_grad():
        model = decoder()
        original = model(TOKENS)[:, :5]
        del model.layers[1:3]
        shorter = model(TOKENS)[:, :5]
    loss, base = (
        nn.functional.cross_entropy(logits.flatten(0, 1), LABELS[:, :5].flatten())
        for logits in (shorter, original)
    )
    assert costs["skip"].mean == pytest.approx(float(loss - base), abs=1e-5)


def test_norm_after_the_stream_prevents_fold():
    evaluation, result = judged(decoder(norm=nn.LayerNorm(6)), "1-2")
    assert set(result.costs) == {"skip", "affine"}
    assert result.choose("fold") == "skip"
    with pytest.raises(RequestError, match="--map fold"):
        evaluation.network(result, "fold")


def test_maps_worse_than_skipping_are_not_chosen():
    _, result = judged(decoder(), "1-2")
    worse = dict(result.costs) | {"affine": type(result.costs["skip"])(math.inf, 0.0)}
    assert type(result)(result.span, result.maps, worse).choose("affine") == "skip"
    assert result.choose("skip") == "skip"


def test_block_0_has_no_layer_to_fold_into():
    _, result = judged(decoder(), "0-1")
    assert set(result.costs) == {"skip", "affine"}
    assert result.choose("fold") == "skip"


@pytest.mark.parametrize("text", ["2-1", "1:2", "2-4", "layer.1..2"])
def test_wrong_spans_are_refused(text):
    with pytest.raises(RequestError, match="--span"):
        find_span(decoder(), TOKENS[:2], text)


def test_span_of_one_block_is_a_number():
    assert parse_span("3") == ("", 3, 3)
    assert find_span(decoder(), TOKENS[:2], "3").place.name == "layers.3"


def test_shared_blocks_are_refused():
    model = decoder()
    model.layers[2] = model.layers[1]
    place = find_calls(model, TOKENS[:2], of="spans:1")[0]
    with pytest.raises(RequestError):
        Span.at(place, model)


def test_lists_in_a_configuration_are_cut():
    class Config:
        num_hidden_layers = 3

    config = Config()
    config.layer_types = ["full", "sliding", "full"]
    config.eos_token_id = [1, 2, 3]
    cut_config(config, 3, slice(1, 2))
    assert config.num_hidden_layers == 2
    assert config.layer_types == ["full", "full"]
    assert config.eos_token_id == [1, 2, 3]


def test_last_linear_has_the_width_of_the_stream():
    assert last_linear(Block(6), 6, ["up", "act", "down"]) == "down"
    assert last_linear(Block(6), 7, ["up", "act", "down"]) is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"span": "1-2", "keep": 0.3}, "--keep"),
        ({"span": "1-2", "share": "units"}, "--share"),
        ({"of": "spans:2", "keep_relus": 4}, "--keep-relus"),
        ({"count": 2}, "--count"),
        ({"map_name": "skip"}, "--map"),
        ({"of": "blocks", "judged": 1}, "--judged"),
        ({"of": "blocks,spans:2"}, "expected spans:2 alone"),
    ],
)
def test_options_without_effect_are_refused(options, name):
    with pytest.raises(RequestError, match=name):
        remove("vgg8", **options)
