"""Runs like those of the studies of linear regions, with made-up numbers."""

from made_records import made_record

from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run


def checkpoint(setting, seed):
    """Return the metadata of a setting's checkpoint."""
    if setting == "initialised":
        return None
    noise = setting.split()[1] if setting.startswith("noise") else "0.0"
    recipe = {"clean": "vanilla", "augmented": "augmented"}.get(setting, "noisy-labels")
    return {"seed": str(seed), "recipe": recipe, "label_noise": noise}


def record(measure, setting, seed, numbers, summary=None, *, fits=1.0):
    """Build the record of a measure of a setting's network, with a value per path."""
    made = checkpoint(setting, seed)
    if made:
        made["train_accuracy"] = str(fits)
    values = tuple(Value(f"path{i}", {"value": float(v)}) for i, v in enumerate(numbers))
    found = {"value": summary} if summary is not None else None
    return made_record(
        key=f"{measure}-{setting}-{seed}".replace(" ", "-"),
        subject={
            "model": "vgg8",
            "weights": f"{setting}-{seed}",
            "data": "digits",
            "seed": 0,
            **({"weights_metadata": made} if made else {}),
        },
        measure={"name": measure, "version": "1", "options": {}},
        probe={"name": "lines", "options": {}},
        result=Result(found, values) if found else Result.of(values),
        seconds=0.0,
        finished="",
    )


def run_of(records):
    records = list(records)
    return Run(Manifest().of_records(records), records)
