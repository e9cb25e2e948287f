"""Records of plain content, as a file would have it."""

from nlbench.serialization.fields import read
from nlbench.store.record import Record, RecordedMachine, RecordedMeasure, RecordedProbe
from nlbench.subjects.facts import SubjectFacts


def made_record(*, subject, measure, probe, machine=None, **rest):
    """Build a record; `rest` are its other fields, as they are."""
    machine = machine or {"device": "cpu", "dtype": "float32", "environment": {}}
    return Record(
        subject=read(SubjectFacts, subject, "subject"),
        measure=read(RecordedMeasure, measure, "measure"),
        probe=read(RecordedProbe, probe, "probe"),
        machine=read(RecordedMachine, machine, "machine"),
        **rest,
    )
