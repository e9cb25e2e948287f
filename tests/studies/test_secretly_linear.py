"""Verdicts and counts of pairs follow from the recorded blocks."""

import math

import pytest
from made_records import make_record

from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.studies.secretly_linear import GPT, MLP, SMOLLM2, SecretlyLinear

USUAL = {
    "linearity": {"in_sample": 0.999, "value": 0.99, "after_norm": 0.995, "per_token": 0.1,
                  "branch_in_sample": 0.5, "branch_value": 0.4, "top_share": 0.1},
    "influence": {"value": 0.1, "relative_change": 0.2},
    "substitution": {"value": 1.0},
}  # fmt: skip


def blocks(costs, published, **changed):
    """Statistics by measure of blocks with these costs and scores."""
    return [
        {
            measure: {**numbers, **changed.get(measure, {})}
            | ({"value": cost} if measure == "substitution" else {})
            | ({"in_sample": score} if measure == "linearity" else {})
            for measure, numbers in USUAL.items()
        }
        for cost, score in zip(costs, published, strict=True)
    ]


def run_of(networks):
    """A run of ``{(model, weights, seed): blocks}``."""
    records = [
        make_record(
            key=f"{model}-{weights}-{seed}-{measure}".replace("/", "-"),
            subject={
                "model": model,
                "weights": weights,
                "data": "text/python",
                "seed": seed,
                "weights_metadata": {} if weights == "init" else {"seed": str(seed)},
            },
            measure={"name": measure, "version": "1", "options": {}},
            probe={"name": "sites", "options": {}, "samples": 8, "kinds": {}},
            result=Result.of([Value(f"b.{i}", own[measure], 8) for i, own in enumerate(rows)]),
        )
        for (model, weights, seed), rows in networks.items()
        for measure in USUAL
    ]
    return Run(Manifest().describe_records(records), records)


def mlps(scores, costs):
    return [
        USUAL | {"linearity": {"value": score}, "substitution": {"value": cost}}
        for score, cost in zip(scores, costs, strict=True)
    ]


def findings(
    costs=(1.0, 2.0, 3.0, 4.0, 5.0),
    published=(0.999, 0.998, 0.997, 0.996, 0.995),
    mlp_scores=(0.995, 0.8, 0.2, 0.7, 0.6),
    mlp_costs=(0.0, 0.01, 0.035, 0.02, 0.03),
    networks=6,
    **changed,
):
    """Findings of equal GPTs, and of one SmolLM2 that is like them."""
    rows = blocks(costs, published, **changed)
    own = mlps(mlp_scores, mlp_costs)
    even = mlps([0.5 + 0.001 * i for i in range(5)], mlp_costs)
    drawn = blocks(costs, [score + 0.0004 * (i + 1) for i, score in enumerate(published)])
    gpts = {"file": (rows, own), "init": (drawn, even)}
    return SecretlyLinear().analyse(
        {
            GPT + suffix: run_of(
                {
                    (GPT, state, seed): parts[bool(suffix)]
                    for state, parts in gpts.items()
                    for seed in range(networks)
                }
            )
            for suffix in ("", MLP)
        }
        | {
            SMOLLM2: run_of({(SMOLLM2, "trained", 0): rows}),
            SMOLLM2 + MLP: run_of({(SMOLLM2, "trained", 0): own}),
        }
    )


def answers(**changed):
    kinds = ("stream", "unit length", "branch", "order")
    verdicts = [v for v in findings(**changed).verdicts if "MLP" not in v.claim]
    assert {v.word for v in verdicts if "SmolLM2" in v.claim} == {"needs 3 networks"}
    gpt = [v for v in verdicts if "small GPT" in v.claim]
    return dict(zip(kinds, (v.agrees for v in gpt), strict=True))


def pairs(**changed):
    table = findings(**changed).tables["Pairs of blocks whose order by cost differs"]
    own = table[(table.network == "SmolLM2-135M") & (table.score == "published")]
    return own.iloc[0]


def test_linear_blocks_that_cost_little_agree_with_claims():
    assert all(answers().values())


def test_the_average_decides_and_not_the_median():
    verdicts = findings(published=(0.999, 0.999, 0.999, 0.999, 0.9)).verdicts
    (verdict,) = (v for v in verdicts if v.claim.startswith("The stream of small GPT"))
    assert verdict.agrees is False
    assert verdict.ours == "0.979 (0.979 to 0.979), median 0.999, lowest 0.900"


def gpt_findings(orders):
    """Findings of three GPTs of five blocks with these costs; the published score falls."""
    scores = (0.999, 0.998, 0.997, 0.996, 0.995)
    gpt = {(GPT, "file", seed): blocks(costs, scores) for seed, costs in enumerate(orders)}
    gpt |= {(GPT, "init", seed): blocks(scores[::-1], scores) for seed in range(3)}
    own = {
        (GPT, state, seed): mlps([0.9, 0.8], [0.1, 0.2])
        for state in ("file", "init")
        for seed in range(3)
    }
    found = SecretlyLinear().analyse({GPT: run_of(gpt), GPT + MLP: run_of(own)})
    table = found.tables["Pairs of blocks whose order by cost differs"]
    row = table[(table.state == "trained") & (table.score == "published")].iloc[0]
    return row, next(v for v in found.verdicts if "higher published score" in v.claim)


def test_intervals_of_tau_end_at_one():
    rising, swapped = (1.0, 2.0, 3.0, 4.0, 5.0), (2.0, 1.0, 3.0, 4.0, 5.0)
    row, verdict = gpt_findings([rising, rising, swapped])
    assert 0 < row.low < row.tau < row.high == 1
    assert verdict.ours.startswith("τ = +0.93 (+0.65 to +1.00)")
    assert verdict.agrees is True


@pytest.mark.parametrize(("networks", "agrees"), [(2, None), (3, None), (6, True)])
def test_equal_taus_are_not_certain(networks, agrees):
    row, verdict = gpt_findings([(1.0, 2.0, 3.0, 4.0, 5.0)] * networks)
    assert math.isnan(row.low) == (networks < 3)
    assert verdict.agrees is agrees
    assert verdict.ours.startswith("τ = +1.00")


def test_blocks_do_not_count_as_networks():
    words = {v.word for v in findings(networks=1).verdicts}
    assert words == {"needs 3 networks", "needs 6 networks"}
    row, _ = gpt_findings([(1.0, 2.0, 3.0, 4.0, 5.0)] * 2)
    assert row.networks == 2


def test_pairs_in_another_order_are_counted():
    same = pairs()
    assert (same.pairs, same.changed, same.tau) == (10, 0, pytest.approx(1))
    turned = pairs(costs=(5.0, 4.0, 3.0, 2.0, 1.0))
    assert (turned.pairs, turned.changed, turned.tau) == (10, 10, pytest.approx(-1))
    swapped = pairs(costs=(2.0, 1.0, 3.0, 4.0, 5.0))
    assert (swapped.pairs, swapped.changed, swapped.tau) == (10, 1, pytest.approx(0.8))


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"published": (0.96, 0.95, 0.94, 0.93, 0.92)}, "stream"),
        ({"linearity": {"after_norm": 0.7}}, "unit length"),
        ({"linearity": {"branch_in_sample": 0.9999}}, "branch"),
        ({"costs": (5.0, 4.0, 3.0, 2.0, 1.0)}, "order"),
    ],
)
def test_each_verdict_follows_its_own_numbers(changed, kind):
    found = answers(**changed)
    assert found.pop(kind) is not True
    assert all(found.values())


def mlp_answers(**changed):
    verdicts = [v for v in findings(**changed).verdicts if "MLP" in v.claim]
    assert len(verdicts) == 7
    wide, order, perplexity = (v.agrees for v in verdicts if "small GPT" in v.claim)
    return {"wide": wide, "order": order, "perplexity": perplexity, "spread": verdicts[-1].agrees}


def test_mlps_that_range_and_cost_as_published_agree():
    assert all(mlp_answers().values())


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"mlp_scores": (0.98, 0.8, 0.2, 0.7, 0.6)}, "wide"),
        ({"mlp_costs": (0.035, 0.03, 0.0, 0.02, 0.01)}, "order"),
        ({"mlp_costs": (0.0, 0.01, 0.04, 0.02, 0.03)}, "perplexity"),
    ],
)
def test_each_verdict_of_mlps_follows_its_own_numbers(changed, kind):
    answer = mlp_answers(**changed)
    assert answer.pop(kind) is False
    assert all(answer.values())


def test_training_is_compared_with_initialisation():
    (verdict,) = (v for v in findings().verdicts if v.claim.startswith("Pretraining"))
    assert verdict.ours.startswith("0.9982 initialised, 0.9970 trained")


def test_networks_that_were_not_measured_are_named():
    assert any("MiniLM-L6 was not measured" in remark for remark in findings().remarks)
