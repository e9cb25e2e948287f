"""Rows are samples or tokens, and padding never counts."""

import pytest
import torch
from torch import Tensor, nn

import nlbench
from nlbench.probes.sites.rows import draw_rows
from nlbench.probes.sites.site import SiteBatch
from nlbench.probes.sites.sites_observation import list_sites, observe_sites
from nlbench.probes.sites.sites_probe import RowPolicy


class Masked(nn.Module):
    """Two residual layers on tokens; id 0 is padding."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.act, self.out = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

        def forward(self, x, attention_mask=None):
            return x + self.out(self.act(self.mix(x)))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Masked.Block(), Masked.Block()])

        def forward(self, x, attention_mask=None):
            for layer in self.layers:
                x = layer(x, attention_mask)
            return x

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.stack = nn.Embedding(9, 4), Masked.Stack()

    def forward(self, tokens):
        mask = tokens != 0
        return self.stack(self.embedding(tokens), attention_mask=mask.long())


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 1, 2, 0, 0], [3, 3, 4, 5, 0]])


def _observed(batches: list[Tensor], **options) -> dict[str, list[SiteBatch]]:
    seen: dict[str, list[SiteBatch]] = {}
    observe_sites(Masked(), batches, lambda b: seen.setdefault(b.place, []).append(b), **options)
    return seen


def _joined(batches: list[SiteBatch], name: str) -> Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


def test_means_leave_out_padding():
    (batch,) = _observed([TOKENS])["stack.layers.0.act"]
    model = Masked()
    for row, tokens in zip(batch.x, TOKENS, strict=True):
        x = model.stack.layers[0].mix(model.embedding(tokens[tokens != 0]))
        assert torch.allclose(row, x.mean(0), atol=1e-6)


def test_functions_of_whole_tensor_do_not_see_padding():
    numbers = {"peak": lambda x: x.flatten(1).amax(1)}
    (batch,) = _observed([TOKENS], functions=numbers)["stack.layers.0.act"]
    model = Masked()
    rows = (model.stack.layers[0].mix(model.embedding(t[t != 0])) for t in TOKENS)
    peaks = torch.stack([row.max() for row in rows])
    assert torch.allclose(batch.unreduced["peak"][0], peaks)


def test_tokens_are_rows_without_padding():
    (batch,) = _observed([TOKENS], of="blocks")["stack.layers.0"]
    assert batch.sample_index.tolist() == [0] * 5 + [1] * 2 + [2] * 3 + [3] * 4
    assert (batch.count, len(batch.x)) == (4, 14)
    assert torch.equal(batch.x, Masked().embedding(TOKENS[TOKENS != 0]))


def test_block_and_branch():
    model = Masked()
    (batch,) = _observed([TOKENS], of="blocks")["stack.layers.1"]
    layer = model.stack.layers[1]
    branch = layer.out(layer.act(layer.mix(batch.x)))
    assert torch.allclose(batch.y - batch.x, branch, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "skip", "kept"),
    [
        ("last", 0, [4, 6, 9, 13]),
        ("tokens", 1, [1, 2, 3, 4, 6, 8, 9, 11, 12, 13]),
        ("last", 3, [4, 13]),
    ],
)
def test_last_and_skipped_positions(rows, skip, kept):
    (every,) = _observed([TOKENS], of="blocks")["stack.layers.0"]
    (batch,) = _observed([TOKENS], of="blocks", rows=rows, skip=skip)["stack.layers.0"]
    assert torch.equal(batch.x, every.x[kept])


@pytest.mark.parametrize("rows", ["tokens", "tokens:2", "last"])
def test_rows_do_not_depend_on_batches(rows):
    parts = [TOKENS[:1], TOKENS[1:3], TOKENS[3:]]
    whole, split = (_observed(b, of="blocks,mlp", rows=rows) for b in ([TOKENS], parts))
    assert len(whole) == 4
    for place, batches in whole.items():
        assert torch.equal(_joined(batches, "x"), _joined(split[place], "x"))
        assert torch.equal(_joined(batches, "y"), _joined(split[place], "y"))


def test_drawn_tokens_are_some_of_each_sample():
    (batch,) = _observed([TOKENS], of="blocks", rows="tokens:2")["stack.layers.0"]
    assert batch.sample_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_microbatches_have_the_rows_of_the_batch():
    whole = _observed([TOKENS], of="blocks")
    # In microbatches of one or two samples.
    split = _observed([TOKENS], of="blocks", memory=1)
    for place, (batch,) in whole.items():
        assert torch.equal(batch.sample_index, split[place][0].sample_index)
        assert torch.allclose(batch.y, split[place][0].y, atol=1e-6)


def test_samples_are_counted_and_rows_next_to_them():
    run = nlbench.evaluate(Masked(), TOKENS, ["cka"], settings={"sites.of": "blocks"})
    (first, _) = run["cka"].values
    assert (first.n, first.statistics["rows"]) == (4, 14)
    assert "computed over tokens, not sequences" in run["cka"].reason


def test_functions_of_all_rows_take_a_drawn_part():
    seen = []

    def size(x, y):
        """Count rows."""
        seen.append(len(x))
        return 0.5

    measure = nlbench.site_measure()(size)
    tokens = torch.randint(1, 9, (64, 40))
    settings = {"sites.of": "blocks"}
    run = nlbench.evaluate(Masked(), tokens, [measure], settings=settings, errors="none")
    assert seen == [1024, 1024]
    assert run["size"].values[0].statistics["rows"] == 1024
    assert len(draw_rows(64 * 40, 1024, 0).unique()) == 1024


def test_the_default_depends_on_the_place():
    assert not RowPolicy.parse("auto", 0, "activations").tokens
    assert not RowPolicy.parse("auto", 0, "modules:*").tokens
    assert RowPolicy.parse("auto", 0, "blocks").tokens


@pytest.mark.parametrize("rows", ["token", "tokens:0", "tokens:x", "last:2", ""])
def test_unknown_rows_are_refused(rows):
    with pytest.raises(nlbench.RequestError):
        RowPolicy.parse(rows, 0, "blocks")


def test_places_with_other_positions_are_undefined():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.keep, self.pool = nn.Conv2d(3, 3, 1), nn.MaxPool2d(2)

        def forward(self, x):
            return self.pool(self.keep(x))

    settings = {"sites.of": "modules:*", "sites.rows": "tokens"}
    run = nlbench.evaluate(Pooled(), torch.randn(4, 3, 4, 4), ["cka"], settings=settings)
    statuses = {value.place: value.status for value in run["cka"].values}
    assert statuses == {"keep": "ok", "pool": "undefined"}
    assert len(list_sites(Pooled(), torch.randn(2, 3, 4, 4), of="modules:*")) == 2
