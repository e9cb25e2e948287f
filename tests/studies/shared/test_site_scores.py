"""Scores of sites, read from records."""

import math

from made_signatures import make_signatures

from nlbench.studies.shared.site_scores import signatures, site_scores


def test_rows_have_the_seed_of_the_training():
    run = make_signatures(
        {
            ("vgg8", "file", "digits", 3): {"a": 0.5, "b": None},
            ("vgg8", "calibrated", "digits", 1): {"a": 0.9},
        }
    )
    table = site_scores(run)
    assert list(table.place) == ["a", "b", "a"]
    assert list(table.seed) == [3, 3, 1]
    assert list(table.state) == ["trained", "trained", "drawn"]
    assert math.isnan(table.value[1])
    assert [(name, list(values)) for name, values in signatures(table, ["seed"])] == [
        ((3,), [0.5]),
        ((1,), [0.9]),
    ]


def test_other_measures_and_statistics_are_left_out():
    run = make_signatures({("vgg8", "file", "digits", 0): {"a": 0.5}})
    assert site_scores(run, "cka").empty
    assert list(site_scores(run, statistic="std").value) == [0.01]
