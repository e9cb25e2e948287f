"""Cells of ladders: networks that don't fit are left out, and fits are those of their rung."""

import pytest
from made_records import make_record

from nlbench.measure import Result
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.studies.shared.ladder_cells import read_cells
from nlbench.studies.shared.ladder_tables import fit_table
from nlbench.studies.shared.ladders import CNN, FITTED


def run_of(model, data, fits):
    """One cell for each training, with what its checkpoint records."""
    prefix = f"{model.replace('/', '-')}-{data}"
    records = [
        make_record(
            key=name,
            subject={
                "model": model,
                "weights": f"{prefix}-{name}-seed0.safetensors",
                "data": data,
                "seed": 0,
                "weights_metadata": {kind: str(value)},
            },
            measure={"name": "nlc", "version": "1", "options": {}},
            probe={"name": "function", "options": {}},
            result=Result({"value": 2.0}),
            seconds=0.0,
            finished="",
        )
        for name, (kind, value) in fits.items()
    ]
    return Run(Manifest().describe_records(records), records)


def test_unfitted_networks_are_left_out():
    fits = {"sine1": ("explained", 0.999), "sine2": ("explained", 0.34)}
    assert list(read_cells({"fitted": run_of(FITTED, "curves", fits)}).rung) == [0]


def test_each_rung_has_its_own_fit():
    fits = {"plain": ("train_accuracy", 1.0), "noise0.4": ("train_accuracy", 0.56)}
    table = fit_table({"noise": run_of(CNN, "digits", fits)}).set_index("rung")
    assert table["training accuracy"].to_dict() == pytest.approx({"0": 1.0, "0.4": 0.56})
