import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import nlbench
from nlbench.errors import RequestError
from nlbench.probes.sites import listeners
from nlbench.serialization.hashing import tensor_hash
from nlbench.subjects.samples import Batches, batch_sizes, random_order, rebatched, sample_facts

MODEL = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())


class Endless(IterableDataset):
    """Rows one by one, so many of them."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30), st.booleans())
def test_rebatching_keeps_samples_and_order(lengths, most, is_known):
    rows = torch.arange(float(sum(lengths)))[:, None]
    batches = torch.split(rows, lengths) if lengths else []
    found = list(rebatched(batches, most, sum(lengths) if is_known else None))
    assert torch.equal(torch.cat([torch.zeros(0, 1), *found]), rows)
    sizes = [len(batch) for batch in found]
    assert all(0 < size <= most for size in sizes)
    if is_known:
        assert sizes == list(batch_sizes(len(rows), most))
    else:
        assert all(size == most for size in sizes[:-2])
        assert len(sizes) < 2 or min(sizes) >= most // 2


@given(st.integers(0, 1000), st.integers(1, 300))
def test_known_length_gives_few_nearly_equal_batches(samples, most):
    sizes = batch_sizes(samples, most)
    assert sum(sizes) == samples
    assert len(sizes) == -(-samples // most)
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [40, 258])
@pytest.mark.parametrize("size", [7, 200])
def test_loader_and_tensor_have_equal_scores_and_hash(count, size):
    inputs = torch.randn(count, 4)
    loader = DataLoader(TensorDataset(inputs, torch.zeros(count)), batch_size=size)
    measures = ["affinity", "cka", "r2", "density"]
    whole = nlbench.evaluate(MODEL, inputs, measures)
    streamed = nlbench.evaluate(MODEL, loader, measures)
    assert streamed.scores.equals(whole.scores)
    assert streamed.records[0].subject == whole.records[0].subject
    assert [record.key for record in streamed.records] == [record.key for record in whole.records]
    drawn = inputs[random_order(count, 0)]
    assert whole.records[0].subject.sample_hash == tensor_hash(drawn)


def test_a_generator_is_gone_through_once():
    inputs = torch.randn(300, 4)
    run = nlbench.evaluate(MODEL, (part for part in inputs.split(11)), ["r2", "density"])
    assert run.records[0].subject.samples == 300
    assert set(run["r2"].values[0].statistics) >= {"value"}
    again = nlbench.evaluate(MODEL, iter(inputs.split(60)), ["r2", "density"])
    assert again.scores.equals(run.scores)
    assert again.records[0].subject.sample_hash == run.records[0].subject.sample_hash


def test_other_samples_make_another_key():
    first, second = (nlbench.evaluate(MODEL, torch.randn(50, 4), ["r2"]) for _ in range(2))
    assert first.records[0].key != second.records[0].key


def test_seen_batches_are_not_kept(monkeypatch):
    # Several batches may wait for measures that run in another thread.
    monkeypatch.setattr(listeners, "overlap_pays", lambda device: False)
    alive = []

    def batches():
        for number in range(20):
            if number in (8, 16):
                gc.collect()
                alive.append(
                    sum(
                        type(it) is torch.Tensor and it.shape[1:] == (4,) for it in gc.get_objects()
                    )
                )
            yield torch.randn(64, 4)

    before = sum(type(it) is torch.Tensor and it.shape[1:] == (4,) for it in gc.get_objects())
    run = nlbench.evaluate(MODEL, batches(), ["r2"], settings={"sites.batch": 64})
    assert run["r2"].status == "ok"
    assert run["r2"].n == 20 * 64
    assert len(alive) == 2
    assert max(alive) <= before + 8
    assert alive[1] <= alive[0]


def test_loaders_report_their_number_of_samples():
    data = TensorDataset(torch.zeros(10, 3))
    assert Batches(DataLoader(data, batch_size=3)).known_length == 10
    assert Batches(DataLoader(data, batch_size=3, drop_last=True)).known_length is None
    assert Batches(DataLoader(Endless(torch.zeros(10, 3)), batch_size=3)).known_length is None
    assert Batches([torch.zeros(4, 3), torch.zeros(2, 3)]).known_length == 6
    assert Batches(iter([torch.zeros(4, 3)])).known_length is None


def test_heads_of_streams_come_again():
    stream = Batches(iter(torch.arange(12.0)[:, None].split(5)))
    assert stream.head(7).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert torch.cat(list(stream)).flatten().tolist() == list(range(12))
    assert stream.samples == 12


def test_loaders_that_change_their_form_are_refused():
    def batches():
        yield torch.randn(8, 4)
        yield torch.randn(8, 5)

    with pytest.raises(RequestError, match=r"\(4,\), \(5,\)"):
        nlbench.evaluate(MODEL, batches(), ["r2"])


@given(st.integers(1, 20), st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
def test_sample_hashes_are_those_of_the_tensor(count, dtype):
    samples = torch.arange(3 * count).reshape(count, 3).to(dtype)
    assert sample_facts(samples)["sample_hash"] == tensor_hash(samples)


def test_loaders_may_refill_one_tensor():
    samples = torch.randn(40, 4)

    def filling():
        batch = torch.empty(10, 4)
        for part in samples.split(10):
            yield batch.copy_(part)

    stream = Batches(filling())
    assert torch.equal(torch.cat(list(rebatched(stream, 10, None))), samples)
