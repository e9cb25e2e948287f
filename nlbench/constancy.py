"""Whether a subject is still the one whose other cells are recorded.

A checkpoint or a dataset's files may be replaced while a run goes on, or between two calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nlbench.records import Record

__all__ = ["difference", "expected_facts"]

_DECIDED = ("weights_hash", "sample_hash", "preprocessing")


def expected_facts(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """What is recorded of each subject that its other cells must find unchanged.

    Returns
    -------
    dict
        From a subject's key to those of its facts.
    """
    facts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        key = record.subject.get("key")
        if key and record.is_done:
            facts[key] = {n: record.subject[n] for n in _DECIDED if n in record.subject}
    return facts


def difference(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Say what is no longer as expected of a subject; else nothing.

    Examples
    --------
    >>> facts = {"model": "vgg8", "data": "digits", "sample_hash": "a"}
    >>> difference(facts, {"sample_hash": "a"})
    ''
    >>> difference(facts, {"sample_hash": "b"}).partition(" is no longer")[0]
    'vgg8 on digits: the sample hash'
    """
    for name, value in expected.items():
        if name in facts and facts[name] != value:
            return (
                f"{facts['model']} on {facts['data']}: the {name.replace('_', ' ')} is no longer "
                "that of the cells which the run already holds; choose another --out"
            )
    return ""
