"""Made-up records."""

from dataclasses import replace

from nlbench.measure import Result
from nlbench.serialization.fields import from_plain
from nlbench.store.record import Record, RecordedMachine, RecordedMeasure, RecordedProbe
from nlbench.store.run import Run
from nlbench.subjects.facts import SubjectFacts


def make_record(*, subject, measure, probe, machine=None, **rest):
    """Build a record from its facts as JSON objects; `rest` has its other fields."""
    machine = machine or {"device": "cpu", "dtype": "float32", "environment": {}}
    return Record(
        subject=from_plain(SubjectFacts, subject, "subject"),
        measure=from_plain(RecordedMeasure, measure, "measure"),
        probe=from_plain(RecordedProbe, probe, "probe"),
        machine=from_plain(RecordedMachine, machine, "machine"),
        **rest,
    )


def make_site_record(measure="affinity", key="k", result=None, model="vgg8", seed=0):
    """Build the record of a measure of two sites."""
    return make_record(
        key=key,
        subject={"model": model, "weights": "init", "data": "digits", "seed": seed, "key": "s"},
        measure={"name": measure, "version": "1", "options": {}},
        probe={"name": "sites", "options": {}},
        machine={"device": "cpu", "dtype": "float32", "environment": {"python": "3.11"}},
        result=result or Result.of({"a": 0.25, "b": 0.75}, n=8),
        seconds=0.5,
        finished="2026-01-01T00:00:00+00:00",
    )


def with_numbers(run, change, measure=None):
    """Return a run with other numbers for one measure, or for all."""

    def numbers(statistics):
        return {name: change(value) for name, value in statistics.items()}

    def changed(record):
        if measure not in (None, record.measure.name):
            return record
        result = record.result
        values = tuple(replace(v, statistics=numbers(v.statistics)) for v in result.values)
        other = replace(result, values=values, summary=numbers(result.summary))
        return replace(record, result=other)

    return Run(run.manifest, [changed(record) for record in run.records], run.path)
