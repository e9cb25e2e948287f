"""Runs with the signatures that a test defines."""

from made_records import make_record
from made_runs import measure_facts

from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run


def make_signatures(signatures, measure="affinity", statistic="value"):
    """Build a run from ``{(model, weights, data, seed): {place: value}}``.

    The seed of weights other than init and calibrated is that of their training. A sequence of
    values is for the sites ``0``, ``1``, ….
    """
    records = []
    for (model, weights, data, seed), values in signatures.items():
        if not isinstance(values, dict):
            values = {str(place): value for place, value in enumerate(values)}
        is_random = weights in ("init", "calibrated")
        records.append(
            make_record(
                key=f"{model}-{weights}-{data}-{seed}-{measure}".replace("/", "-"),
                subject={
                    "model": model,
                    "weights": weights if is_random else f"{weights}-{seed}",
                    "data": data,
                    "seed": seed if is_random else 0,
                    "weights_metadata": {} if is_random else {"seed": str(seed)},
                },
                measure=measure_facts(measure),
                probe={"name": "sites", "options": {}, "samples": 8, "kinds": {}},
                result=Result.of(
                    [
                        Value.missing(place, "undefined", "constant output")
                        if value is None
                        else Value(place, {"value": value, statistic: value, "std": 0.01}, 8)
                        for place, value in values.items()
                    ]
                ),
            )
        )
    return Run(Manifest().describe_records(records), records)


def merge_runs(*runs):
    """Merge runs of the same subjects by several measures."""
    records = [record for run in runs for record in run.records]
    return Run(Manifest().describe_records(records), records)
