from dataclasses import replace

import torch

from nlbench.measure import Result, Value
from nlbench.measures.path_measure import Method, add_means
from nlbench.probes.lines import SegmentTrace, TracedSegment


def observation(method="exact", **notes):
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    origins = torch.tensor([-1, -1])
    trace = SegmentTrace(t, t[:, None], 1.0, origins, (), method, notes)
    return TracedSegment(0, 0, trace)


def result(*values):
    return Result.of([Value(f"path{i}", found, 1) for i, found in enumerate(values)])


def test_an_exact_reading_needs_no_remark():
    found = Method().add_segment(observation()).annotate(result({"value": 1.0}))
    assert found.reason == ""
    assert found.notes == {"method": "exact"}


def test_settings_are_recorded_and_counts_summed():
    seen = observation("adaptive", sensitivity=0.5, passed_over=2.0)
    method = Method().add_segment(seen).add_segment(seen)
    assert method.notes == {"sensitivity": 0.5, "passed_over": 4.0}


def test_all_methods_are_named_once_in_order():
    method = (
        Method()
        .add_segment(observation())
        .add_segment(observation("sampling"))
        .add_segment(observation())
    )
    found = method.annotate(result({"value": 1.0}))
    assert found.reason == "exact and by sampling"
    assert found.notes["method"] == "exact, sampling"


def test_a_reading_without_a_number_keeps_its_reason():
    empty = Result.missing("undefined", "no place to measure")
    assert (
        Method().add_segment(observation("sampling")).annotate(empty).reason
        == "no place to measure"
    )


def test_remarks_on_undefined_paths_follow_the_method():
    values = [
        Value("path0", {"value": 1.0}),
        Value("path1", {"value": 2.0}),
        Value.missing("path2", "undefined", "no length"),
    ]
    found = Method().add_segment(observation("sampling")).annotate(Result.of(values))
    assert found.reason == "mean of 2 of 3 places (1 undefined); by sampling"


def test_means_are_taken_of_what_every_path_has():
    found = add_means(
        result({"value": 1.0, "a": 2.0, "b": 1.0}, {"value": 3.0, "a": 6.0}), ("a", "b", "c")
    )
    assert found.summary["a"] == 4
    assert "b" not in found.summary
    assert "c" not in found.summary


def test_parts_are_averaged_where_every_path_has_them():
    parts = [{"site": {"a": 2.0, "b": 1.0}, "segment": (1.0,)}, {"site": {"a": 6.0}, "segment": ()}]
    values = [Value(f"path{i}", {"value": 1.0}, 1, parts=p) for i, p in enumerate(parts)]
    values.append(Value.missing("path2", "undefined", "no length"))
    found = add_means(replace(Result.of(values), parts={"other": {"x": 1.0}}), (), ("site",))
    assert found.parts == {"other": {"x": 1.0}, "site": {"a": 4.0}}


def test_boundaries_that_were_passed_over_are_remarked_on():
    method = Method().add_segment(observation("adaptive", shorter_than_sensitivity=1200.0))
    found = method.annotate(result({"value": 1.0}))
    assert found.reason == "by adaptive steps, which missed about 1,200 boundaries"


def test_single_precision_has_a_remark():
    seen = observation()
    single = replace(seen.trace, precision=torch.finfo(torch.float32).eps)
    method = Method().add_segment(TracedSegment(0, 0, single)).add_segment(seen)
    assert method.annotate(result({"value": 1.0})).reason == "exact in float32"
