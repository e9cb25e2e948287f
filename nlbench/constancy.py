"""Whether a subject is still the one that was planned, and whose other cells are recorded.

A checkpoint or a dataset's files may be replaced while a run goes on, or between two calls.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

from nlbench import registry
from nlbench.data import dataset_info
from nlbench.errors import RequestError
from nlbench.plan import Target
from nlbench.records import Record
from nlbench.subject import choose_weights

__all__ = ["check_unchanged", "difference", "expected_facts"]

_DECIDED = ("weights_hash", "sample_hash", "preprocessing")


def check_unchanged(target: Target, planned_at: str) -> None:
    """Refuse a subject whose weights or data aren't those of the plan, from which its key comes.

    Parameters
    ----------
    target : Target
        Just loaded.
    planned_at : str
        The machine that made the plan. Another one may have copies of the data with other
        times; by their content they are compared with `difference` there.

    Raises
    ------
    nlbench.RequestError
        If the files have changed since.
    """
    spec = target.spec
    changed = ""
    if target.weights and choose_weights(spec).identity != target.weights:
        changed = f"{spec.model} with weights {target.label}: the file has"
    fingerprint = dataset_info(registry.load("datasets", spec.data)).fingerprint
    if fingerprint is not None and planned_at == platform.node():
        found = str(fingerprint(**dict(spec.options)))
        changed = changed if found == target.files else f"{spec.data}: its files have"
    if changed:
        raise RequestError(f"{changed} changed since the run was planned; start it again")


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
