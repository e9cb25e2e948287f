"""The plugin: scores per batch, statistics over batches, the signature over sites."""

import math
import statistics

import pytest
import torch

from nlbench.measures.affinity import Affinity, affinity_score

from streams import site_batch


def batch(seed, n=40, d=3):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def result(observations, **settings):
    measure = Affinity(**settings)
    measure.reset()
    for index, (place, x, y) in enumerate(observations):
        measure.update(site_batch(place, x, y, index))
    return measure.compute()


def test_value_is_mean_and_deviation_over_batches():
    xs = [batch(s) for s in range(3)]
    found = result([("act", x, x.relu()) for x in xs]).values[0]
    scores = [affinity_score(x, x.relu()).item() for x in xs]
    assert found.statistics["value"] == pytest.approx(statistics.fmean(scores), abs=1e-12)
    assert found.statistics["std"] == pytest.approx(statistics.pstdev(scores), abs=1e-12)
    assert found.statistics["batches"] == 3
    assert (found.status, found.reason, found.n) == ("ok", "", 120)


def test_summary_has_signature_statistics_in_call_order():
    x = batch(0)
    places = {"late": torch.relu, "early": torch.tanh, "third": torch.sigmoid}
    found = result([(place, x, f(x)) for place, f in places.items()])
    scores = [affinity_score(x, f(x)).item() for f in places.values()]
    assert [v.place for v in found.values] == list(places)
    assert found.summary["value"] == pytest.approx(statistics.fmean(scores), abs=1e-12)
    assert found.summary["median"] == pytest.approx(sorted(scores)[1], abs=1e-12)
    assert found.summary["spread"] == pytest.approx(max(scores) - min(scores), abs=1e-12)


def test_undefined_batch_is_skipped_with_a_remark():
    x = batch(1)
    value = result([("act", x, x.relu()), ("act", x, torch.zeros_like(x))]).values[0]
    assert value.status == "ok"
    assert value.statistics["value"] == pytest.approx(affinity_score(x, x.relu()).item(), abs=1e-12)
    assert value.statistics["batches"] == 1
    assert "constant output" in value.reason


def test_undefined_site_is_left_out_of_summary():
    x = batch(2)
    found = result([("dead", x, torch.zeros_like(x)), ("act", x, x.relu())])
    dead = found.values[0]
    assert (dead.status, dead.reason, dead.n) == ("undefined", "constant output", 40)
    assert found.summary["value"] == pytest.approx(affinity_score(x, x.relu()).item(), abs=1e-12)
    assert result([("dead", x, torch.zeros_like(x))]).status == "undefined"


def test_non_finite_batch_fails_the_site():
    x = batch(3)
    bad = x.clone()
    bad[0, 0] = math.nan
    found = result([("act", x, x.relu()), ("act", x, bad)])
    assert found.status == "failed"
    assert "y: 1 of 120 entries are not finite" in found.reason


def test_options_reach_the_score():
    x = batch(4)
    found = result([("act", x, x.relu())], shrinkage="none", ridge="0.5").summary["value"]
    assert found == pytest.approx(
        affinity_score(x, x.relu(), shrinkage="none", ridge=0.5).item(), abs=1e-12
    )
    assert found != pytest.approx(affinity_score(x, x.relu()).item(), abs=1e-3)


def test_without_shrinkage_alone_score_is_at_least_zero():
    assert Affinity.bounds_of({"shrinkage": "none"}) == (0, 1)
    assert Affinity.bounds_of({"shrinkage": "ledoit-wolf"}) == (-math.inf, 1)
