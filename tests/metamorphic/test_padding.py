"""Every form of a padding mask that reaches a block selects the same positions."""

import math
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nlbench
from nlbench import Undefined
from nlbench.probes.sites.rows import PositionSelector, _possible_sizes
from nlbench.probes.sites.sites_probe import RowPolicy
from nlbench.registry import expand, load


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, attention_mask=None):
        return self.linear(x)


FORMS = {
    "bool": lambda tokens: tokens,
    "int": lambda tokens: tokens.long(),
    "float": lambda tokens: tokens.float(),
    "infinite": lambda tokens: torch.zeros(tokens.shape).masked_fill(~tokens, -math.inf),
    "large": lambda tokens: torch.zeros(tokens.shape).masked_fill(~tokens, -1e4),
}


SHAPES = {
    "(n, t)": lambda mask: mask,
    "(n, t, 1)": lambda mask: mask[..., None],
    "(n, 1, t, 1)": lambda mask: mask[:, None, :, None],
    "(n, 1, 1, t)": lambda mask: mask[:, None, None],
    "(n, heads, 1, t)": lambda mask: mask[:, None, None].expand(-1, 2, -1, -1),
}


SIDES_AND_FORMS = [("left" if number % 2 else "right", form) for number, form in enumerate(FORMS)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("side", "form"), SIDES_AND_FORMS)
def test_every_form_of_a_mask_selects_the_tokens(form, side, shape):
    tokens = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    tokens = tokens.flip(1) if side == "left" else tokens
    mask = FORMS[form](tokens)
    block, selector, selected = Block(), PositionSelector(RowPolicy()), []
    selector.begin(0, 3)
    block.linear.register_forward_hook(
        lambda module, args, output: selected.append(selector.select(output, 2))
    )
    with selector.hooked(block):
        block(torch.zeros(3, 4, 3), attention_mask=SHAPES[shape](mask))
    assert torch.equal(selected[0].valid, tokens)


def pairs(tokens, kind):
    """Return which position attends to which, (n, q, t)."""
    t = tokens.shape[1]
    keys = tokens[:, None].expand(-1, t, -1)
    if kind.startswith("causal"):
        keys = keys & torch.ones(t, t).tril().bool()
    if kind == "window":
        near = torch.ones(t, t).tril() - torch.ones(t, t).tril(-2)
        keys = keys & near.bool()
    if kind in ("outer", "outer filled"):
        keys = keys & tokens[..., None]
    if kind.endswith("filled"):  # No row may be empty.
        keys = keys | ~keys.any(2, keepdim=True)
    return keys


@pytest.mark.parametrize(
    ("side", "form", "heads"),
    [(*chosen, number % 3) for number, chosen in enumerate(SIDES_AND_FORMS)],
)
@pytest.mark.parametrize(
    "kind", ["keys", "causal", "window", "outer", "outer filled", "causal filled"]
)
def test_masks_of_pairs_select_the_tokens(kind, form, side, heads):
    tokens = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    tokens = tokens.flip(1) if side == "left" else tokens
    mask = FORMS[form](pairs(tokens, kind))
    selector = PositionSelector(RowPolicy())
    selector.begin(0, 3)
    mask = mask[:, None].expand(-1, heads, -1, -1) if heads else mask
    _, padding = selector._padding({"attention_mask": 1}, (None, mask), {})
    assert torch.equal(padding.tokens, tokens)


@pytest.mark.parametrize("kind", ["keys", "causal", "window"])
def test_masks_of_pairs_without_padding_leave_nothing_out(kind):
    selector = PositionSelector(RowPolicy())
    selector.begin(0, 3)
    mask = pairs(torch.ones(3, 5).bool(), kind)[:, None]
    assert selector._padding({"attention_mask": 1}, (None, mask), {})[1] is None
    biases = torch.where(mask, -torch.rand(3, 1, 5, 5), -1e4)
    assert selector._padding({"attention_mask": 1}, (None, biases), {})[1] is None


def test_biases_of_heads_do_not_hide_padding():
    tokens = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    distances = (torch.arange(4) - torch.arange(4)[:, None]).abs()
    biases = -distances * torch.tensor([0.5, 0.25])[:, None, None]
    mask = biases.masked_fill(~tokens[:, None, None], -math.inf)
    selector = PositionSelector(RowPolicy())
    selector.begin(0, 2)
    _, padding = selector._padding({"attention_mask": 1}, (None, mask), {})
    assert torch.equal(padding.tokens, tokens)


def selected_tokens(mask, name="attention_mask"):
    selector = PositionSelector(RowPolicy())
    selector.begin(0, len(mask))
    _, padding = selector._padding({name: None}, (), {name: mask})
    return None if padding is None else padding.tokens


TOKENS = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
OTHER_FORMS = {
    "uint8": 255 * TOKENS.to(torch.uint8),
    "integers that are added": -10000 * (1 - TOKENS),
    "half": ((1 - TOKENS) * torch.finfo(torch.float16).min).half(),
}
UNCLEAR_FORMS = {
    "-1 for padding": 2 * TOKENS - 1,
    "-1 and 0": TOKENS - 1,
    "float -1 for padding": 2.0 * TOKENS - 1,
    "labels": torch.where(TOKENS.bool(), TOKENS, -100),
    "token ids": torch.tensor([[5, 7, 2, 2], [3, 9, 4, 8], [8, 6, 1, 2]]),
    "numbers of sequences": torch.tensor([[1, 2, 0, 0], [1, 1, 2, 2], [1, 1, 1, 0]]),
    "weights": 0.5 + 0.1 * TOKENS,
    "NaN": torch.where(TOKENS.bool(), 0.0, torch.nan),
    "pairs of -1": (2 * TOKENS - 1)[:, None].expand(-1, 4, -1),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_masks_of_other_types_select_the_tokens(form):
    assert torch.equal(selected_tokens(OTHER_FORMS[form]), TOKENS.bool())


@pytest.mark.parametrize("form", UNCLEAR_FORMS)
def test_masks_of_unclear_form_are_undefined(form):
    with pytest.raises(Undefined, match="'attention_mask'"):
        selected_tokens(UNCLEAR_FORMS[form])


def test_a_mask_of_unclear_name_is_undefined():
    for name in ("mask", "padding_mask", "pad_mask"):
        with pytest.raises(Undefined, match=name):
            selected_tokens(TOKENS, name)
        assert selected_tokens(torch.ones(3, 4), name) is None
    assert torch.equal(selected_tokens(TOKENS == 0, "key_padding_mask"), TOKENS.bool())


def test_square_causal_mask_is_not_padding():
    assert selected_tokens(torch.ones(4, 4).tril()) is None


class Signs(nn.Module):
    """Reads a mask of -1 and 1 by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)

    def forward(self, x, attention_mask):
        h = self.last(self.act(self.first(x)))
        return h * (attention_mask > 0)[..., None]


def test_a_mask_of_signs_gives_no_number():
    x, mask = ragged_batch(7.0)
    measures = ["affinity", "r2", "substitution"]
    for signs in (2 * mask.long() - 1, 2.0 * mask - 1):
        run = nlbench.evaluate(Signs(), (x, signs), measures, errors="none")
        for record in run.records:
            assert record.result.status == "undefined"
            assert "1 or True for tokens" in record.result.reason


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_mask_without_padding_leaves_nothing_out(value):
    selector = PositionSelector(RowPolicy())
    selector.begin(0, 3)
    assert (
        selector._padding({"attention_mask": 1}, (None, torch.full((3, 4), value)), {})[1] is None
    )


class Reader(nn.Module):
    """Reads tokens one by one, so that padding can only change its own positions."""

    def __init__(self, outputs=5):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs)

    def forward(self, x, attention_mask):
        return self.last(self.act(self.first(x)))


def ragged_batch(filler):
    """Return tokens (16, 6, 4), of which padding holds the filler, and their mask."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6, 4, generator=generator)
    lengths = torch.arange(16) % 5 + 2
    mask = torch.arange(6) < lengths[:, None]
    return torch.where(mask[..., None], x, filler), mask


@pytest.mark.parametrize(
    ("cost", "labelled"), [("auto", False), ("auto", True), ("kl", False), ("squared", True)]
)
def test_padding_changes_no_substitution(cost, labelled):
    found = []
    for filler in (0.0, -1e3):
        x, mask = ragged_batch(filler)
        # Some label where there is padding, which a model's loss would ignore.
        labels = torch.where(mask, 1, -100) if labelled else None
        run = nlbench.evaluate(
            Reader(),
            (x, mask.to(x.dtype)),
            ["substitution"],
            labels=labels,
            settings={"substitution.cost": cost},
        )
        (value,) = run["substitution"].values
        found.append(value.statistics)
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-9)
    assert found[0]["value"] > 1e-6


def test_padded_samples_are_substituted_by_token():
    # Where every sample has two tokens, four positions of padding are as none.
    x = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) < 2).expand(16, 6).to(x.dtype)
    for cost in ("kl", "squared"):
        settings = {"substitution.cost": cost}
        padded, short = (
            nlbench.evaluate(Reader(), inputs, ["substitution"], settings=settings)
            for inputs in ((x, mask), (x[:, :2], mask[:, :2]))
        )
        values = [run["substitution"].values[0].statistics for run in (padded, short)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)


class Rearranged(Reader):
    """The same function with its tokens on other axes."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def forward(self, x, attention_mask):
        n, t, d = x.shape
        if self.layout == "folded":
            return super().forward(x.reshape(n * t, d), None).reshape(n, t, -1)
        x = x.transpose(0, 1)
        if self.layout == "folded, time first":
            return super().forward(x.reshape(t * n, d), None).reshape(t, n, -1).transpose(0, 1)
        if self.layout == "time first":
            return super().forward(x, None).transpose(0, 1)
        heads = self.act(self.first(x)).reshape(t, n * 2, 4).transpose(0, 1)
        heads = self.act(heads - 1).transpose(0, 1).reshape(t, n, 8)
        return self.last(heads).transpose(0, 1)


class Residual(Rearranged):
    def __init__(self, layout):
        super().__init__(layout)
        del self.act
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def act(self, h):
        return h + self.mlp(h)

    def forward(self, x, attention_mask):
        if self.layout == "plain":
            return Reader.forward(self, x, None)
        return super().forward(x, attention_mask)


def substitution_score(model, filler, maps="channel"):
    x, mask = ragged_batch(filler)
    settings = {"replacement.maps": maps}
    run = nlbench.evaluate(model, (x, mask.to(x.dtype)), ["substitution"], settings=settings)
    return run["substitution"].summary


@pytest.mark.parametrize(
    ("layout", "maps"),
    [
        ("folded", "affine"),
        ("folded, time first", "channel"),
        ("time first", "poly2"),
        ("heads", "channel"),
        ("heads", "affine"),
    ],
)
def test_padding_changes_no_substitution_in_any_layout(layout, maps):
    expected, other = (substitution_score(Rearranged(layout), x, maps) for x in (0.0, 50.0))
    assert other == pytest.approx(expected, rel=1e-5, abs=1e-9)
    if layout != "heads":
        plain = substitution_score(Reader(), 0.0, maps)
        assert expected == pytest.approx(plain, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("layout", "maps"),
    [("plain", "affine"), ("folded", "channel"), ("folded, time first", "affine"),
     ("time first", "channel")],
)  # fmt: skip
def test_padding_changes_no_substitution_of_modules(layout, maps):
    settings = {"replacement.maps": maps, "replacement.of": "modules:mlp"}
    scores = []
    for filler in (0.0, 50.0):
        x, mask = ragged_batch(filler)
        inputs = x, mask.to(x.dtype)
        run = nlbench.evaluate(Residual(layout), inputs, ["substitution"], settings=settings)
        scores.append(run["substitution"].summary)
    assert scores[0] == pytest.approx(scores[1], rel=1e-5, abs=1e-9)
    plain = nlbench.evaluate(Residual("plain"), inputs, ["substitution"], settings=settings)
    assert scores[0] == pytest.approx(plain["substitution"].summary, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("is_padded", [True, False])
def test_modules_with_rows_of_unknown_samples_are_undefined(is_padded):
    class Mixed(Residual):
        def forward(self, x, attention_mask):
            rows = self.first(x).reshape(-1, 8)
            rows = (rows + self.mlp(rows + rows.flip(0))).reshape(*x.shape[:2], 8)
            return self.last(rows)

    x, mask = ragged_batch(0.0)
    settings = {"replacement.of": "modules:mlp"}
    inputs = x, mask.to(x.dtype) * is_padded
    run = nlbench.evaluate(Mixed("plain"), inputs, ["substitution"], settings=settings)
    assert run["substitution"].status == "undefined"
    assert "which rows belong to which sample is unknown" in run["substitution"].reason


def test_substitution_refuses_outputs_with_padding_on_another_axis():
    class ChannelsFirst(Reader):
        def forward(self, x, attention_mask):
            return super().forward(x, attention_mask).transpose(1, 2)

    x, mask = ragged_batch(0.0)
    run = nlbench.evaluate(ChannelsFirst(), (x, mask.to(x.dtype)), ["substitution"], errors="none")
    assert run["substitution"].status == "undefined"
    assert "(tokens, channels)" in run["substitution"].reason


SITE_MEASURES = [
    name
    for name in expand("measures", ["*"])
    if load("measures", name).probe == "sites" and name != "influence"
]


def site_results(filler, as_pairs, settings):
    x, mask = ragged_batch(filler)
    mask = mask[:, None, None].expand(-1, 1, 6, -1) if as_pairs else mask
    run = nlbench.evaluate(
        Reader(), (x, mask.to(x.dtype)), SITE_MEASURES, settings=settings, errors="none"
    )
    return {record.measure.name: record.result for record in run.records}


@pytest.mark.parametrize(
    ("settings", "as_pairs"), [({}, True), ({"sites.rows": "tokens"}, False)], ids=str
)
def test_padding_changes_no_measure_of_sites(settings, as_pairs):
    expected, found = (site_results(filler, as_pairs, settings) for filler in (0.0, 50.0))
    assert sum(result.status == "ok" for result in expected.values()) > 5
    for name, result in expected.items():
        other = found[name]
        assert (other.status, other.n) == (result.status, result.n), name
        assert other.summary == pytest.approx(result.summary, rel=1e-5, abs=1e-7), name


class ByLength(Reader):
    """The same function on samples sorted by length, on the longest sample's tokens, or both."""

    def __init__(self, way):
        super().__init__(outputs=5)
        self.way = way

    def forward(self, x, lengths):
        order = torch.arange(len(x))
        if "sorted" in self.way:
            order = lengths.argsort(descending=True)
            x = x[order]
        longest = int(lengths.max()) if "trimmed" in self.way else x.shape[1]
        y = torch.zeros(*x.shape[:2], 5)
        y[:, :longest] = super().forward(x[:, :longest], None)
        return (
            y[order.argsort()]
            if "index" in self.way
            else torch.zeros_like(y).index_copy(0, order, y)
        )


class ByMask(ByLength):
    def forward(self, x, attention_mask):
        return super().forward(x, attention_mask.sum(1).long())


@pytest.mark.parametrize(
    ("form", "way"),
    [("lengths", ""), ("lengths", "sorted"), ("lengths", "sorted, trimmed"),
     ("attention_mask", "trimmed"), ("attention_mask", "sorted, index")],
)  # fmt: skip
def test_padding_is_known_by_length_in_any_order(form, way):
    settings = {"sites.rows": "tokens"} if form == "lengths" else {}
    expected = site_results(0.0, False, settings)
    x, mask = ragged_batch(50.0)
    # Two positions more, which are padding in all samples.
    x, mask = (torch.cat([side, side[:, :2] * 0 + end], 1) for side, end in ((x, 50.0), (mask, 0)))
    second = mask.sum(1) if form == "lengths" else mask
    model = ByLength(way) if form == "lengths" else ByMask(way)
    run = nlbench.evaluate(model, (x, second), SITE_MEASURES, settings=settings, errors="none")
    for name, result in expected.items():
        other = run[name]
        assert (other.status, other.n) == (result.status, result.n), (name, other.reason)
        assert other.summary == pytest.approx(result.summary, rel=1e-5, abs=1e-7), name


def scores_with_mask(mask):
    x, _ = ragged_batch(7.0)
    arguments = nlbench.Arguments(x, mask)
    run = nlbench.evaluate(Reader(), arguments, ["r2", "substitution"], errors="none")
    return [record.result for record in run.records]


def test_one_mask_of_all_samples_applies_to_each():
    one = torch.tensor([1, 1, 1, 1, 0, 0])
    expected = [result.summary for result in scores_with_mask(one.expand(16, 6))]
    for mask in (one, one[None], one[None, None], one[None].expand(6, 6)):
        assert [result.summary for result in scores_with_mask(mask)] == expected


@pytest.mark.parametrize("shape", [(16, 4), (16, 1, 8), (16, 4, 4), (16, 2, 4, 4)])
def test_a_mask_of_other_positions_is_remarked(shape):
    mask = torch.ones(shape)
    mask[..., 2] = 0
    for result in scores_with_mask(mask):
        assert result.status == "ok"
        assert "act" in result.reason
        assert "mask" in result.reason


@pytest.mark.parametrize("shape", [(15, 6), (16,)])
def test_a_mask_of_other_samples_is_undefined(shape):
    mask = torch.ones(shape)
    mask[-1] = 0
    for result in scores_with_mask(mask):
        assert result.status == "undefined"
        assert "attention_mask" in result.reason


class Pooled(nn.Module):
    """Averages tokens, whose padding it leaves out by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)

    def pool(self, x, is_token):
        weights = is_token[..., None].to(x.dtype)
        h = self.act(self.first(x)) * weights
        return self.last(h.sum(1) / weights.sum(1).clamp(min=1))

    def forward(self, x, attention_mask):
        return self.pool(x, attention_mask)


class TwoMasks(Pooled):
    def forward(self, x, attention_mask, key_padding_mask):
        allowed = attention_mask.any(1) if attention_mask.ndim == 3 else attention_mask.bool()
        return self.pool(x, allowed & ~key_padding_mask)


class WithLengths(Pooled):
    def forward(self, x, lengths, attention_mask=None):
        is_token = torch.arange(x.shape[1]) < lengths.reshape(-1, 1)
        return self.pool(x, is_token if attention_mask is None else is_token & attention_mask)


class OfMapping(Pooled):
    def forward(self, batch):
        return self.pool(batch["x"], batch["attention_mask"])


class NoSubmodules(nn.Module):
    def __init__(self):
        super().__init__()
        reference = Pooled()
        for name in ("first", "last"):
            self.register_parameter(name, getattr(reference, name).weight)
            self.register_parameter(f"{name}_bias", getattr(reference, name).bias)

    def forward(self, x, attention_mask):
        weights = attention_mask[..., None].to(x.dtype)
        h = nn.functional.gelu(nn.functional.linear(x, self.first, self.first_bias)) * weights
        return nn.functional.linear(h.sum(1) / weights.sum(1), self.last, self.last_bias)


def replaced():
    """Return a network whose forward method is replaced by one of any arguments."""
    model = Pooled()
    forward = model.forward
    model.forward = lambda *args: forward(*args)
    return model


def pooled_scores(model, inputs):
    run = nlbench.evaluate(model, inputs, ["norm", "affinity"], errors="none")
    assert all(record.result.status == "ok" for record in run.records)
    return [record.result.summary["value"] for record in run.records]


ONES = torch.ones(16, 6).bool()
WAYS_TO_MASK = {
    "pairs and keys": (TwoMasks, lambda x, m: (x, torch.ones(16, 6, 6).bool(), ~m)),
    "two parts": (
        TwoMasks,
        lambda x, m: (x, m | (torch.arange(6) < 3), ~(m | (ONES.cumsum(1) > 3))),
    ),
    "ones and lengths": (WithLengths, lambda x, m: (x, m.sum(1), ONES)),
    "lengths (n, 1)": (WithLengths, lambda x, m: (x, m.sum(1, keepdim=True))),
    "floats": (WithLengths, lambda x, m: (x, m.sum(1).to(x.dtype))),
    "mapping": (OfMapping, lambda x, m: {"x": x, "attention_mask": m}),
    "replaced": (replaced, lambda x, m: (x, m)),
    "no submodules": (NoSubmodules, lambda x, m: (x, m)),
}


@pytest.mark.parametrize("way", WAYS_TO_MASK)
def test_padding_is_left_out_however_masks_arrive(way):
    model, arguments = WAYS_TO_MASK[way]
    expected = pooled_scores(Pooled(), ragged_batch(0.0))
    assert pooled_scores(model(), arguments(*ragged_batch(5.0))) == pytest.approx(expected)


def test_fractions_are_not_lengths():
    x = torch.zeros(2, 6, 3)
    for lengths in ([0.5, 1.0], [1.0, 1.0], [2.5, 6.0], [-1.0, 6.0], [math.nan, 6.0]):
        assert not _possible_sizes(torch.tensor(lengths), [x], 2)


class ChannelsFirst(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.conv = nn.Conv1d(features, 4, 1)
        self.activation = nn.SiLU()

    def forward(self, x, lengths):
        return self.activation(self.conv(x)).mean(2)


@pytest.mark.parametrize(
    ("features", "lengths"),
    [(6, [6]), (6, [3, 6]), (12, [6]), (12, [3, 7]), (12, [3, 9]), (9, [9]), (12, [9])],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_lengths_count_positions_not_features(is_first, features, lengths):
    lengths = torch.tensor(lengths * 16)
    model = ChannelsFirst(features).requires_grad_(False)
    inputs = torch.randn(len(lengths), features, 9)
    is_token = (torch.arange(9) < lengths[:, None])[:, None]
    x = model.conv(inputs)
    y = model.activation(x)
    means = [(each * is_token).sum(2) / is_token.sum(2) for each in (x, y)]
    expected = (means[0] - means[1]).norm() / means[0].norm()
    if not is_first:
        inputs = inputs.transpose(1, 2)
        model = nn.Sequential(model)
        model.forward = lambda x, lengths: model[0](x.transpose(1, 2), lengths)
    run = nlbench.evaluate(model, {"x": inputs, "lengths": lengths}, ["norm"], errors="none")
    assert run.records[0].result.summary["value"] == pytest.approx(expected.item(), rel=1e-5)
    assert not run.records[0].result.reason


def test_lengths_of_square_spectrograms_are_unclear():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    model.forward = lambda x, lengths: model[1](model[0](x)).mean((2, 3))
    lengths = torch.arange(8) + 1
    run = nlbench.evaluate(model, {"x": torch.randn(8, 1, 9, 12), "lengths": lengths}, ["norm"])
    assert "lengths count" in run.records[0].result.reason


@pytest.mark.parametrize("form", ["attention_mask", "lengths"])
def test_a_sample_without_tokens_gives_no_mean(form):
    x, mask = ragged_batch(0.0)
    mask[5] = False
    model, second = (Pooled(), mask) if form == "attention_mask" else (WithLengths(), mask.sum(1))
    names = ["affinity", "sparsity", "r2", "norm"]
    run = nlbench.evaluate(model, (x, second), names, errors="none")
    for record in run.records:
        assert record.result.status == "undefined"
        assert "a sample without tokens has no mean (1 of 16" in record.result.reason


@pytest.mark.parametrize("form", ["attention_mask", "lengths"])
def test_a_sample_without_tokens_has_no_rows(form):
    scores = []
    for filler in (0.0, 5.0):
        x, mask = ragged_batch(filler)
        mask[5] = False
        x[5] = filler
        is_mask = form == "attention_mask"
        model, second = (Pooled(), mask) if is_mask else (WithLengths(), mask.sum(1))
        settings = {"sites.rows": "tokens"}
        run = nlbench.evaluate(model, (x, second), ["affinity", "norm"], settings=settings)
        scores.append([record.result.summary["value"] for record in run.records])
    assert scores[0] == pytest.approx(scores[1])


def test_batches_without_tokens_are_not_unmasked():
    selector = PositionSelector(RowPolicy())
    selector.begin(0, 2)
    x = torch.zeros(2, 3, 4)
    for name, value in (
        ("attention_mask", torch.zeros(2, 3).bool()),
        ("key_padding_mask", torch.ones(2, 3)),
        ("lengths", torch.zeros(2).long()),
    ):
        _, padding = selector._padding({name: 1}, (x, value), {}, is_model=True)
        assert padding is not None, name
        assert not padding.tokens.any(), name


class TokenMask(Pooled):
    def forward(self, x, token_mask):
        return self.pool(x, token_mask)


class AttnMask(Pooled):
    def forward(self, x, attn_mask):
        return self.pool(x, attn_mask)


class UnknownEntry(Pooled):
    def forward(self, batch):
        return self.pool(batch["x"], batch["valid"])


@pytest.mark.parametrize(
    ("model", "name"), [(TokenMask, "token_mask"), (AttnMask, "attn_mask"), (UnknownEntry, "valid")]
)
def test_a_mask_of_unknown_name_is_remarked(model, name):
    x, mask = ragged_batch(0.0)
    for value in (mask, mask.long(), mask.to(x.dtype)):
        inputs = {"x": x, name: value} if model is UnknownEntry else (x, value)
        run = nlbench.evaluate(model(), inputs, ["norm", "substitution"])
        for record in run.records:
            assert f"'{name}' may be a padding mask" in record.result.reason
            assert "attention_mask" in record.result.reason


def test_arguments_of_two_values_need_no_remark():
    class Typed(Pooled):
        def forward(self, x, attention_mask, token_type_ids, is_question):
            offset = (token_type_ids + is_question)[..., None].to(x.dtype)
            return self.pool(x + offset, attention_mask)

    x, mask = ragged_batch(0.0)
    types = (torch.arange(6) > 1).expand(16, 6).long()
    flags = types.flip(1).bool()
    assert "mask" not in nlbench.evaluate(Typed(), (x, mask, types, flags), ["norm"])["norm"].reason
    full = (x, ONES, types, types[:, :1].bool())
    assert "mask" not in nlbench.evaluate(Typed(), full, ["norm"])["norm"].reason


class TwoSequences(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"batch_first": True, "dropout": 0}
        layer = nn.TransformerEncoderLayer(4, 2, 8, **options)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, **options), 1)

    def forward(self, src, tgt, src_key_padding_mask):
        memory = self.encoder(src, src_key_padding_mask=src_key_padding_mask)
        out = self.decoder(tgt, memory, memory_key_padding_mask=src_key_padding_mask)
        return out.mean(1)


def test_a_mask_of_one_sequence_leaves_the_other():
    tgt = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(1))
    scores = []
    for filler in (0.0, 5.0):
        x, mask = ragged_batch(filler)
        result = nlbench.evaluate(TwoSequences(), (x, tgt, ~mask), ["norm"])["norm"]
        assert "'src_key_padding_mask' is only applied in the modules" in result.reason
        scores.append(result.summary["value"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    rows = []
    model = TwoSequences().eval()
    model.decoder.layers[0].linear1.register_forward_hook(lambda m, a, out: rows.append(out))
    with torch.no_grad():
        model(x, tgt, ~mask)
    before, after = rows[0].mean(1), rows[0].relu().mean(1)
    expected = (before - after).norm() / before.norm()
    (value,) = [v for v in result.values if v.place.startswith("decoder")]
    assert value.statistics["value"] == pytest.approx(float(expected), rel=1e-5)


def test_a_mask_of_targets_leaves_the_sources():
    class TargetsMasked(TwoSequences):
        def forward(self, src, tgt, tgt_key_padding_mask):
            out = self.decoder(tgt, self.encoder(src), tgt_key_padding_mask=tgt_key_padding_mask)
            weights = (~tgt_key_padding_mask)[..., None].to(out.dtype)
            return (out * weights).sum(1) / weights.sum(1)

    src = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(1))
    scores = []
    for filler in (0.0, 5.0):
        x, mask = ragged_batch(filler)
        result = nlbench.evaluate(TargetsMasked(), (src, x, ~mask), ["norm"])["norm"]
        assert "'tgt_key_padding_mask' is only applied in the modules" in result.reason
        scores.append([value.statistics["value"] for value in result.values])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    model = TargetsMasked().encoder
    unmasked = nlbench.evaluate(model, src, ["norm"])["norm"].values[0].statistics["value"]
    assert scores[0][0] == pytest.approx(unmasked, rel=1e-5)


def test_padding_is_left_out_of_pairs():
    class Pairs(Pooled):
        def forward(self, x, attention_mask):
            pairs = (x[:, :, None] + x[:, None]).flatten(1, 2)
            h = self.act(self.first(pairs).unflatten(1, (6, 6))).flatten(1, 2)
            mask = attention_mask.to(x.dtype)
            weights = (mask[:, :, None] * mask[:, None]).flatten(1)[..., None]
            return self.last((h * weights).sum(1) / weights.sum(1))

    scores = [pooled_scores(Pairs(), ragged_batch(filler)) for filler in (0.0, 5.0)]
    assert scores[0] == pytest.approx(scores[1])


class Token(Pooled):
    """Takes its mask in an argument that holds more than it."""

    def __init__(self, unpack):
        super().__init__()
        self.unpack = unpack

    def forward(self, batch):
        return self.pool(*self.unpack(batch))


Pair = namedtuple("Pair", "x attention_mask")


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x, m: {"text": {"x": x, "attention_mask": m}}, lambda b: b["text"].values()),
        (lambda x, m: [{"x": x}, {"attention_mask": m}], lambda b: (b[0]["x"], *b[1].values())),
        (Pair, lambda b: b),
        (lambda x, m: SimpleNamespace(x=x, attention_mask=m), lambda b: (b.x, b.attention_mask)),
    ],
)
def test_masks_in_nested_arguments_are_found(pack, unpack):
    scores = []
    for filler in (0.0, 5.0):
        x, mask = ragged_batch(filler)
        result = nlbench.evaluate(Token(unpack), (pack(x, mask.long()),), ["norm"])["norm"]
        scores.append(result.summary["value"])
        assert "mask" not in result.reason
    assert scores[0] == pytest.approx(scores[1])


@pytest.mark.parametrize("name", ["lengths", "seq_len", "x_lengths", "valid_lens", "word_lens"])
@pytest.mark.parametrize("form", [torch.as_tensor, list])
def test_lengths_are_read_or_remarked(name, form):
    counts = f"torch.as_tensor({name})[:, None]"
    body = f"lambda self, x, {name}: self.pool(x, torch.arange(x.shape[1]) < {counts})"
    counted = type("Counted", (Pooled,), {"forward": eval(body)})()
    scores = []
    for filler in (0.0, 5.0):
        x, mask = ragged_batch(filler)
        inputs = {"x": x, name: form(mask.sum(1).tolist())}
        result = nlbench.evaluate(counted, inputs, ["norm"])["norm"]
        scores.append(result.summary["value"])
        assert (f"'{name}' may be the lengths" in result.reason) == (name == "word_lens")
    assert (scores[0] == pytest.approx(scores[1])) == (name != "word_lens")


@pytest.mark.parametrize(
    "form",
    [
        lambda mask: mask[..., None],
        lambda mask: mask[:, None, None],
        lambda mask: torch.where(mask, 0.0, -1e9),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_possible_masks_of_any_form_are_remarked(form, is_first):
    class Formed(Pooled):
        def forward(self, *arguments):
            x, valid = arguments[::-1] if is_first else arguments
            valid = valid == 0 if valid.is_floating_point() else valid
            return self.pool(x, valid.reshape(len(x), -1))

    x, mask = ragged_batch(0.0)
    arguments = (form(mask), x) if is_first else (x, form(mask))
    reason = nlbench.evaluate(Formed(), arguments, ["norm"])["norm"].reason
    assert "may be a padding mask" in reason


def test_masks_that_only_reach_a_part_are_remarked():
    class Attention(Pooled):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            mask = (x != 0).any(-1)
            return self.pool(self.attention(x, x, x, key_padding_mask=~mask)[0], mask)

    x, _ = ragged_batch(0.0)
    reason = nlbench.evaluate(Attention(), x, ["norm"])["norm"].reason
    assert "'key_padding_mask' is only applied in the modules" in reason


class Shared(nn.Module):
    """One encoder of two sequences, each with its own mask."""

    class Encoder(Pooled):
        def forward(self, x, attention_mask):
            return self.pool(x, attention_mask)

    def __init__(self):
        super().__init__()
        self.encoder = self.Encoder()

    def forward(self, x, attention_mask, other, other_mask):
        return self.encoder(x, attention_mask) + self.encoder(other, other_mask)


def test_a_mask_without_padding_hides_that_of_another_sequence():
    x, mask = ragged_batch(0.0)
    other = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(1))
    result = nlbench.evaluate(Shared(), (x, mask, other, ONES), ["norm"])["norm"]
    alone = nlbench.evaluate(Shared().encoder, (other, ONES), ["norm"])["norm"]
    values = [value.statistics["value"] for value in result.values]
    assert values[1] == pytest.approx(alone.summary["value"])
    assert "mask" not in result.reason


@pytest.mark.parametrize("measure", ["norm", "substitution"])
def test_positions_in_another_order_than_the_mask_are_remarked(measure):
    class Reversed(Pooled):
        def forward(self, x, attention_mask):
            return self.pool(x.flip(1), attention_mask.flip(1))

    x, mask = ragged_batch(0.0)
    reason = nlbench.evaluate(Reversed(), (x, mask), [measure])[measure].reason
    assert "padding counts at" in reason
    reason = nlbench.evaluate(Pooled(), (x, mask), [measure])[measure].reason
    assert "padding" not in reason


def test_causal_masks_inside_keep_the_padding_around_them():
    class Causal(Pooled):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, attention_mask):
            pairs = torch.ones(len(x), 1, 6, 6).tril()
            return self.pool(self.block(x, attention_mask=pairs), attention_mask)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, attention_mask):
            return self.linear(x).relu()

    scores = []
    for filler in (0.0, 5.0):
        run = nlbench.evaluate(Causal(), ragged_batch(filler), ["norm"])
        scores.append([value.statistics["value"] for value in run["norm"].values])
    assert scores[0] == pytest.approx(scores[1])
