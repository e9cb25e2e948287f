"""Runs with the signatures that a test defines, with real records."""

from made_records import made_record
from made_runs import about

from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run


def made_signatures(found, measure="affinity", statistic="value"):
    """Build a run from ``{(model, weights, data, seed): {place: value}}``.

    Weights other than init and calibrated were trained under that seed, and say so; a plain
    sequence of values stands for sites ``0``, ``1``, ….
    """
    records = []
    for (model, weights, data, seed), values in found.items():
        if not isinstance(values, dict):
            values = {str(place): value for place, value in enumerate(values)}
        drawn = weights in ("init", "calibrated")
        records.append(
            made_record(
                key=f"{model}-{weights}-{data}-{seed}-{measure}".replace("/", "-"),
                subject={
                    "model": model,
                    "weights": weights if drawn else f"{weights}-{seed}",
                    "data": data,
                    "seed": seed if drawn else 0,
                    "weights_metadata": {} if drawn else {"seed": str(seed)},
                },
                measure=about(measure),
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
    return Run(Manifest().of_records(records), records)


def together(*runs):
    """Merge runs of the same subjects by several measures."""
    records = [record for run in runs for record in run.records]
    return Run(Manifest().of_records(records), records)
