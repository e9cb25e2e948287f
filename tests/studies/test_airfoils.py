"""Trends over the sizes, from values with a known order."""

import math

import pytest
from made_records import make_record

from nlbench.measure import Result
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.studies.airfoils import SIZES, Airfoils


def findings(measures, drawn=None):
    """Findings for ``{measure: (direction, values by size)}``, two draws each."""
    records = [
        make_record(
            key=f"{measure}-{weights}-{size}-{seed}",
            subject={
                "model": f"zoo/neuralfoil-{size}",
                "weights": weights,
                "data": "airfoils",
                "seed": seed,
                "weights_metadata": {},
            },
            measure={"name": measure, "more_means": sense, "version": "1", "options": {}},
            probe={"name": "sites", "options": {}, "samples": 8, "kinds": {}},
            result=Result({"value": value + seed}),
        )
        for weights, content in (("trained", measures), ("init", drawn or measures))
        for measure, (sense, values) in content.items()
        for size, value in zip(SIZES, values, strict=True)
        for seed in range(2)
    ]
    return Airfoils().analyse({"run": Run(Manifest().describe_records(records), records)})


RISING = list(range(8))
SHUFFLED = [3, 1, 7, 0, 5, 2, 6, 4]


@pytest.mark.parametrize(
    ("sense", "values", "answer"),
    [
        ("more nonlinear", RISING, True),
        ("more nonlinear", RISING[::-1], False),
        ("less nonlinear", RISING, False),
        ("less nonlinear", RISING[::-1], True),
        ("more nonlinear", SHUFFLED, None),
        ("more nonlinear", [1] * 8, None),
        ("more nonlinear", [*RISING[:-1], math.nan], None),
    ],
)
def test_verdict_is_of_the_trend_towards_nonlinearity(sense, values, answer):
    (verdict,) = findings({"m": (sense, values)}).verdicts
    assert verdict.agrees is answer


def test_p_values_are_exact_and_adjusted():
    # One order of 8! in each direction, times the number of measures.
    found = findings({"a": ("more nonlinear", RISING), "b": ("neither", SHUFFLED)})
    table = found.tables["Trend over the sizes"].set_index("measure")
    assert table.loc["a", "p trained"] == pytest.approx(2 * 2 / math.factorial(8))
    assert table.loc["a", "tau trained"] == 1


def test_headline_names_measures_that_follow_training_alone():
    sense = "more nonlinear"
    found = findings(
        {"a": (sense, RISING), "b": (sense, RISING), "c": (sense, RISING[::-1])},
        {"a": (sense, RISING), "b": (sense, SHUFFLED), "c": (sense, SHUFFLED)},
    )
    assert found.headline == [
        "More nonlinear with size and fit: a, b; less: c; different or no trend in initialised "
        "networks: b, c."
    ]


def test_values_are_means_over_draws():
    table = findings({"m": ("more nonlinear", RISING)}).tables["Values"]
    trained = table[table.weights == "trained"]
    assert trained.value.tolist() == [value + 0.5 for value in RISING]
    assert trained["published error"].is_monotonic_decreasing
