"""What measures share: computed once, the same numbers as alone, and nothing that others write."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import NotFinite
from nlbench.measure import Measure, Result
from nlbench.measures.statistics import moments, prepared
from nlbench.measures.statistics.prepared import prepare_batch
from nlbench.probes.sites import site
from nlbench.probes.sites.site import SharedBatch, Site, SiteBatch

SITE_MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def network(request):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh()]
    return nn.Sequential(*layers).to(request.param)


def observed(network, measures, errors="groups"):
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    dtype = next(network.parameters()).dtype
    run = nlbench.evaluate(
        network, inputs.to(dtype), measures, settings={"sites.batch": 8}, errors=errors
    )
    return {record.measure.name: record.result for record in run.records}


WAYS = {
    "torch": lambda tensor: tensor.fill_(7),
    "numpy": lambda tensor: tensor.numpy().fill(7),
    "data": lambda tensor: tensor.data.fill_(7),
    "storage": lambda tensor: tensor.untyped_storage().fill_(7),
    "resize": lambda tensor: tensor.data.resize_(0),
}


def writer(way):
    class Writer(Measure):
        """Writes into all that it gets hold of, in a package of its own."""

        __module__ = f"strangers_{way}.measures"
        name = f"writer_{way}"
        probe = "sites"
        unreduced = {"first": lambda x: x.flatten(1)[:, 0]}  # noqa: RUF012

        def reset(self):
            self.found = {}

        def update(self, batch):
            # What it was shown before it wrote.
            self.found[batch.place] = float(batch.x.sum() + batch.y.sum())
            got = [batch.x, batch.y, *batch.unreduced["first"]]
            for side in batch.shared(prepare_batch):
                got += [side.values, side.varying, side.centered, side.scaled]
            for tensor in got:
                WAYS[way](tensor)

        def compute(self):
            return Result.of(self.found)

    return Writer


def test_in_place_measure_does_not_affect_others(network):
    alone = observed(network, SITE_MEASURES)
    writers = [writer(way) for way in WAYS]
    beside = observed(network, [*writers, *SITE_MEASURES, *map(writer_again, WAYS)])
    assert {name: beside[name] for name in SITE_MEASURES} == alone
    shown = [beside[one.name] for one in (*writers, *map(writer_again, WAYS))]
    assert all(one == shown[0] for one in shown)
    assert shown[0].status == "ok"


def writer_again(way):
    again = writer(way)
    again.name = f"again_{way}"
    return again


def test_measures_are_bit_equal_alone_and_together(network):
    together = observed(network, SITE_MEASURES)
    for name in SITE_MEASURES:
        assert observed(network, [name])[name] == together[name]
    assert observed(network, SITE_MEASURES[::-1]) == together


def test_samples_and_moments_are_computed_once(network, monkeypatch):
    calls = {"as_samples": 0, "of": 0}

    def counted(name, function):
        def count(*args):
            calls[name] += 1
            return function(*args)

        return count

    monkeypatch.setattr(prepared, "as_samples", counted("as_samples", prepared.as_samples))
    monkeypatch.setattr(moments.Moments, "of", counted("of", moments.Moments.of))
    observed(network, SITE_MEASURES, errors="none")
    sites, batches = 2, 5
    assert calls == {"as_samples": 2 * sites * batches, "of": sites * batches}


def batch_of(x):
    return SiteBatch(Site("act", "relu", 0, (1,), 1), 0, x, torch.ones_like(x))


def test_an_error_is_raised_for_each_that_asks():
    pair = SharedBatch(batch_of(torch.tensor([[torch.nan]])))
    for _ in range(2):
        with pytest.raises(NotFinite):
            replace(batch_of(torch.ones(1, 1)), borrowed=pair).shared(prepare_batch)


def test_function_is_called_each_time_outside_a_pass():
    batch = batch_of(torch.ones(3, 1))
    assert batch.shared(prepare_batch) is not batch.shared(prepare_batch)


def test_seconds_exclude_other_measures(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(site.time, "perf_counter", lambda: now[0])

    def inner(pair):
        now[0] += 1

    def outer(pair):
        pair.shared(inner)
        now[0] += 10

    pair = SharedBatch(batch_of(torch.ones(1, 1)))
    first, second, third = (replace(batch_of(torch.ones(1, 1)), borrowed=pair) for _ in range(3))
    first.shared(inner)
    # Its own ten seconds are its own, the one before is lent.
    second.shared(outer)
    third.shared(outer)
    third.shared(outer)
    assert [each.borrowed_seconds for each in (first, second, third)] == [0, 1, 11]
    assert now[0] == 11
