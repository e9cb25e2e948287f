from dataclasses import replace

import pandas as pd
from made_scores import records_of

from nlbench.reports.linearised import linearised_networks, tradeoffs
from nlbench.reports.tables import NamedRun
from nlbench.store.run_folder import COLUMNS


def header(mode, omega, seed):
    """What a checkpoint says of its training."""
    if mode == "reference":
        return {"recipe": "vanilla", "seed": str(seed)}
    about = {"recipe": "post-training", "random": "true"} if mode == "random" else {"recipe": mode}
    return {**about, "omega": str(omega), "seed": str(seed)}


def run(networks):
    """A run of (mode, ω, seed, accuracy, path length)."""
    rows, subjects = [], []
    for mode, omega, seed, accuracy, length in networks:
        weights = f"{mode}-{omega}-seed{seed}"
        subjects.append(
            {"model": "net", "weights": weights, "data": "toy", "seed": 0,
             "weights_metadata": header(mode, omega, seed)}
        )  # fmt: skip
        identity = ("net", weights, "toy", 0)
        for measure, value in (("accuracy", accuracy), ("pathlength", length)):
            rows.append((*identity, measure, "", "value", value, 0, "ok", ""))
        rows.append((*identity, "linear-units", "", "value", 0.25, 0, "ok", ""))
        if mode != "reference":
            for layer, nonlinear in (("relu1", 3), ("relu2", 1)):
                rows.append((*identity, "linear-units", layer, "nonlinear", nonlinear, 0, "ok", ""))
                rows.append((*identity, "linear-units", layer, "units", 4, 0, "ok", ""))
    records = records_of(pd.DataFrame(rows, columns=list(COLUMNS)))
    return NamedRun("lin", {"subjects": subjects}, tuple(records))


POST = [("post-training", w, s, a + s / 100, n) for w, a, n in ((0.1, 0.9, 4), (1.0, 0.8, 2))
        for s in (0, 1)]  # fmt: skip
REFERENCE = [("reference", None, seed, 0.95, 5) for seed in (0, 1)]


def test_networks_are_collected_by_mode_omega_and_seed():
    networks = linearised_networks([run([*REFERENCE, *POST])])
    assert set(networks["label"]) == {"net on toy"}
    sizes = networks[networks["mode"] == "post-training"].groupby("omega").size()
    assert sizes.to_dict() == {0.1: 2, 1.0: 2}
    assert networks["layers"][2] == {"relu1": (3, 4), "relu2": (1, 4)}


def test_the_table_has_means_and_spreads_over_seeds():
    (shown,) = tradeoffs([run([*REFERENCE, *POST])])
    assert [list(row) for row in shown.table.rows] == [
        ["reference", "", "2", "95.00 ± 0.00", "25.00 ± 0.00", "5.00 ± 0.00"],
        ["post-training", "0.1", "2", "90.50 ± 0.50", "25.00 ± 0.00", "4.00 ± 0.00"],
        ["post-training", "1", "2", "80.50 ± 0.50", "25.00 ± 0.00", "2.00 ± 0.00"],
    ]


def test_a_single_seed_has_no_spread():
    (shown,) = tradeoffs([run([("from-start", 0.5, 0, 0.9, 3)])])
    assert shown.table.rows[0][3:] == ("90.00", "25.00", "3.00")


def test_figures_name_the_layers_and_every_omega():
    (shown,) = tradeoffs([run([*REFERENCE, *POST])])
    assert ["relu1", 4] in shown.content["shape"]["layers"]
    [curve] = shown.content["modes"]
    assert [omega for omega, *_ in curve["groups"]] == [0.1, 1.0]
    assert [omega for omega, *_ in shown.content["shape"]["groups"]] == [0.1, 1.0]


def test_runs_of_another_kind_lack_the_section():
    other = run(POST)
    subjects = [{**s, "weights_metadata": {}} for s in other.manifest["subjects"]]
    assert tradeoffs([replace(other, manifest={"subjects": subjects})]) == []


def test_networks_without_a_value_are_left_out():
    made = run([*REFERENCE, *POST])
    gone = ("net", "post-training-0.1-seed0", "toy", 0, "pathlength")
    kept = tuple(record for record in made.records if record.identity != gone)
    assert len(linearised_networks([replace(made, records=kept)])) == 5
