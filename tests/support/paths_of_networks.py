"""Made-up runs like those of the linear-regions studies."""

from made_records import make_record

from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run


def checkpoint(setting, seed):
    """Return the metadata of a checkpoint trained in a setting."""
    noise = setting.split()[1] if setting.startswith("noise") else "0.0"
    recipes = {"initialised": "none", "clean": "vanilla", "augmented": "augmented"}
    recipe = recipes.get(setting, "noisy-labels")
    return {"seed": str(seed), "recipe": recipe, "label_noise": noise}


def record(measure, setting, seed, numbers, summary=None, *, fits=1.0):
    """Build a measure's record for a network trained in a setting, with a value per path."""
    metadata = checkpoint(setting, seed)
    if setting != "initialised":
        metadata["train_accuracy"] = str(fits)
    values = tuple(Value(f"path{i}", {"value": float(v)}) for i, v in enumerate(numbers))
    return make_record(
        key=f"{measure}-{setting}-{seed}".replace(" ", "-"),
        subject={
            "model": "vgg8",
            "weights": f"{setting}-{seed}",
            "data": "digits",
            "seed": 0,
            "weights_metadata": metadata,
        },
        measure={"name": measure, "version": "1", "options": {}},
        probe={"name": "lines", "options": {}},
        result=Result.of(values) if summary is None else Result({"value": summary}, values),
        seconds=0.0,
        finished="",
    )


def run_of(records):
    records = list(records)
    return Run(Manifest().describe_records(records), records)
