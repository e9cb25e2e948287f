"""Remarks around the numbers of a page."""

import pytest

from nlbench.reports.remarks import differences, group_remarks
from nlbench.reports.tables import NamedRun


def run(name, *gpus, device="cuda"):
    facts = [{"device_name": gpu, "capability": "9.0"} for gpu in gpus]
    manifest = {"nlbench": "1", "device": device, "dtype": "float32"}
    if facts:
        manifest |= {"environment": facts[0], "environments": facts if len(facts) > 1 else ()}
    return NamedRun(name, manifest)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([run("one", "A", "B")], [("GPU", "A and B", "one")]),
        ([run("one", "A"), run("two", "B")], [("GPU", "A", "one"), ("", "B", "two")]),
        (
            [run("one", "A"), run("two", device="cpu"), run("three", "A")],
            [("device", "cuda", "one, three"), ("", "cpu", "two")],
        ),
    ],
)
def test_numbers_of_several_gpu_models_are_marked(runs, said):
    table = differences(runs)
    assert list(table.rows) == said


def test_equal_settings_have_no_table():
    assert differences([run("one", "A"), run("two", "A")]) is None


def test_options_that_differ_are_listed_one_by_one():
    runs = [run("one"), run("two")]
    for member, ridge in zip(runs, (0, 1), strict=True):
        options = {"ridge": ridge, "shrinkage": "none"}
        member.manifest["measures"] = {"affinity": {"version": "2", "options": options}}
    table = differences(runs)
    assert [row[0] for row in table.rows] == ["affinity.ridge", ""]


def test_remarks_that_differ_in_numbers_are_one():
    remarks = group_remarks(
        [
            ("ok", "error at most 1e-05, 4 of 7 places", "a", "r2"),
            ("ok", "error at most 0.1, 1,204 of 7 places", "b", "r2"),
            ("ok", "layer1.0 is constant", "a", "cka"),
            ("ok", "layer2.0 is constant", "a", "cka"),
        ]
    )
    assert [remark.text for remark in remarks] == [
        "error at most 1e-05–0.1, 4–1,204 of 7 places",
        "layer1.0 is constant",
        "layer2.0 is constant",
    ]
