"""Made-up records."""

from nlbench.serialization.fields import from_plain
from nlbench.store.record import Record, RecordedMachine, RecordedMeasure, RecordedProbe
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
