"""The studies of linearised networks: verdicts follow from recorded cells."""

import pytest
from made_records import make_record

from nlbench import registry
from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.studies import early_or_late
from nlbench.studies.framework import Context
from nlbench.studies.shared import linearised_networks

OMEGAS = (0.001, 0.003, 0.01)


def cells(model, mode, omega, seed, accuracy, length, linear, *, noise=0.0, epochs=20):
    made = {"recipe": mode, "seed": str(seed), "label_noise": str(noise), "epochs": str(epochs)}
    if mode != "reference":
        made["omega"] = str(omega)
    if mode == "control":
        made |= {"recipe": "post-training", "random": "true", "omega": "0.003"}
    numbers = {"accuracy": accuracy, "pathlength": length, "linear-units": linear}
    for measure, number in numbers.items():
        values = (
            tuple(
                Value(place, {"nonlinear": 8 * (1 - linear), "units": 8.0}) for place in ("1", "3")
            )
            if measure == "linear-units"
            else ()
        )
        yield make_record(
            key=f"{model}-{mode}-{omega}-{seed}-{noise}-{measure}",
            subject={
                "model": model,
                "weights": f"{mode}{omega}-{seed}-{noise}",
                "data": "digits",
                "seed": 0,
                "weights_metadata": made,
            },
            measure={"name": measure, "version": "1", "options": {}},
            probe={"name": "graph", "options": {}},
            result=Result({"value": number}, values),
            seconds=0.0,
            finished="",
        )


def run_of(*groups):
    records = [record for group in groups for record in group]
    return {"run": Run(Manifest().describe_records(records), records)}


def words(name, runs):
    return [verdict.word for verdict in registry.load("studies", name)().analyse(runs).verdicts]


def late_and_early(gap, lost=0.01, epochs=20, *, hard_gap=None, shallow=0.0):
    groups = one_task("vgg8", gap, lost, epochs)
    hard_gap = gap if hard_gap is None else hard_gap
    hard = one_task("small/relu-w32-d6", hard_gap, lost, epochs)
    for seed in (0, 1, 2):
        for length in (5, 6):
            accuracy = 0.98 - (lost if length == 5 else 0) - shallow - seed / 1000
            hard.append(
                cells(f"small/relu-w32-d{length - 2}", "reference", None, seed, accuracy, length, 0)
            )
    return {**run_of(*groups), "harder": run_of(*hard)["run"]}


def one_task(model, gap, lost, epochs):
    groups = [cells(model, "reference", None, 0, 0.98, 7.0, 0.0)]
    by_seed = gap if isinstance(gap, tuple) else (gap, gap + 0.001, gap + 0.002)
    for seed in (0, 1, 2):
        floor = 0.98 - 3 * lost - seed / 5000
        groups.append(cells(model, "control", 0.003, seed, floor, 0, 1.0, epochs=epochs))
        for step, omega in enumerate(OMEGAS):
            late = 0.98 - lost * step - seed / 5000
            groups.append(
                cells(model, "post-training", omega, seed, late, 6 - step, 0.2 + 0.2 * step,
                      epochs=epochs)
            )  # fmt: skip
            groups.append(
                cells(model, "from-start", omega, seed, late - by_seed[seed], 6 - step, 0.3,
                      epochs=epochs)
            )  # fmt: skip
    return groups


def gaps(runs):
    """Answers on gaps: on digits, on the harder task, by difficulty, against shallow networks."""
    *found, _, _ = words("early-or-late", runs)
    return found


def test_planted_gap_is_found():
    assert words("early-or-late", late_and_early(0.03))[-2:] == ["needs 3 networks", "yes"]
    assert gaps(late_and_early(0.03, shallow=0.03)) == ["yes", "yes", "can't tell", "yes"]
    assert gaps(late_and_early(0.02, hard_gap=0.05))[:3] == ["yes", "yes", "yes"]
    assert gaps(late_and_early(0.05, hard_gap=0.01))[2] == "no"


@pytest.mark.parametrize(("lost", "answer"), [(0.01, "can't tell"), (0.03, "no")])
def test_gap_below_a_point_is_none_where_linear_units_cost_more(lost, answer):
    assert gaps(late_and_early(0.004, lost))[0] == answer


def test_networks_of_one_seed_count_once():
    runs = late_and_early((0.03, 0.03, -0.01), hard_gap=(0.03, 0.02, 0.01))
    digits, harder, *_ = registry.load("studies", "early-or-late")().analyse(runs).verdicts
    # Nine independent networks would have an interval of 0.1 to 3.2 points.
    assert (digits.word, digits.ours) == ("can't tell", "+1.67 points (-4.07 to +7.40), 3 seeds")
    assert harder.ours.endswith("3 seeds")


def test_late_networks_are_compared_within_their_seed():
    runs = late_and_early(0.03)
    better = [
        cells("vgg8", mode, 0.001, 3, accuracy, 6, 0.2)
        for mode, accuracy in (("post-training", 0.5), ("from-start", 0.4))
    ]
    run = run_of(runs["run"].records, *better)
    verdicts = registry.load("studies", "early-or-late")().analyse({**runs, **run}).verdicts
    assert verdicts[0].ours.startswith("+4.83 points")
    assert verdicts[0].ours.endswith("4 seeds")


@pytest.mark.parametrize("study", ["early-or-late", "core-networks", "translation"])
def test_full_studies_train_networks_on_their_own_data(study, tmp_path, monkeypatch):
    asked = set()

    def trained(self, model, data, recipe, seed, **fields):
        asked.add((model, data))
        return tmp_path / f"{model}-{recipe}-{seed}"

    monkeypatch.setattr(Context, "request_training", trained)
    monkeypatch.setattr(Context, "run", lambda self, *args: None)
    registry.load("studies", study)().measure(Context(tmp_path, study))
    data = {"vgg8": "digits", "resnet18": "digits", "transformer": "number-words"}
    assert asked
    assert asked == {(name, data.get(name.partition("-")[0], "mnist1d")) for name, _ in asked}


def test_longer_training_of_late_networks_is_stated():
    remarks = registry.load("studies", "early-or-late")().analyse(late_and_early(0.03)).remarks
    assert remarks[-2].startswith("digits: late networks were trained for 40 epochs in total, ")
    assert "early ones for 20, shallow ones for 20. An advantage" in remarks[-1]


def test_networks_of_harder_task_are_trained_equally_long(tmp_path, monkeypatch):
    total = {}

    def trained(self, model, data, recipe, seed, *, weights="init", **fields):
        file = tmp_path / f"{model}-{recipe}-{fields.get('omega')}-{seed}"
        total[str(file)] = fields["epochs"] + total.get(weights, 0)
        return file

    monkeypatch.setattr(Context, "request_training", trained)
    files = early_or_late.request_networks(Context(tmp_path, "early-or-late"), early_or_late.DEPTHS)
    (start, *linearised), *shallow = (files[model][:7] for model in files)
    assert {total[str(f)] for f in linearised} == {total[str(f)] for each in shallow for f in each}
    assert total[str(start)] == total[str(linearised[0])] / 2


def test_lossless_task_refutes_nothing():
    assert set(gaps(late_and_early(0.0))) == {"can't tell"}
    assert gaps(late_and_early(-0.03, lost=0.1, shallow=-0.03))[:2] == ["no", "no"]
    assert gaps(late_and_early(-0.03, lost=0.1, shallow=-0.03))[3] == "no"


def test_inaccurate_late_networks_refute_the_gap():
    assert gaps(late_and_early(-0.03, lost=0.0))[:2] == ["no", "no"]


def test_few_epochs_refute_nothing():
    assert words("early-or-late", late_and_early(0.0, lost=0.1))[-1] == "no"
    found = words("early-or-late", late_and_early(0.0, lost=0.1, epochs=3, hard_gap=-0.03))
    # There are no networks whose units were chosen at random.
    assert set(found) == {"can't tell", "needs 3 networks"}


@pytest.mark.parametrize(("cost", "word"), [(0.05, "yes"), (-0.05, "no")])
def test_random_units_cost_differently_from_chosen_ones(cost, word):
    runs = late_and_early(0.0)
    # Late networks lose a point for each fifth of linear units from the first fifth on.
    controls = [
        cells(
            "vgg8", "control", share, seed, 1 - 0.05 * (share + 0.2) - cost - seed / 1000, 5, share
        )
        for share in (0.3, 0.5)
        for seed in (0, 1, 2)
    ]
    run = run_of(runs["run"].records, *controls)
    assert words("early-or-late", {**runs, **run})[-2] == word


def cores(*, noisy=1.0, wide=0.1, deep=0.5, falls=1.0, linear=0.3, seeds=3):
    groups = [cells("vgg8", "reference", None, 0, 0.98, 7.0, 0.0)]
    for seed in range(seeds):
        groups.append(cells("resnet18-w4", "reference", None, seed, 0.98, 13 + seed / 10, 0.0))
        for step, omega in enumerate(OMEGAS):
            length = 6 - falls * step + seed / 10
            hard = length + noisy + seed / 50
            wider = length + deep + wide + seed / 50
            share = linear + seed / 100
            groups += [
                cells("vgg8", "post-training", omega, seed, 0.97, length, 0.3),
                cells("vgg8", "post-training", omega, seed, 0.6, hard, 0.3, noise=0.4),
                cells("resnet18-w4", "post-training", omega, seed, 0.9, length + deep, 0.3),
                cells("resnet18-w8", "post-training", omega, seed, 0.9, wider, share),
            ]
    return run_of(*groups)


def test_core_network_verdicts_follow_their_numbers():
    assert words("core-networks", cores()) == ["yes"] * 5
    turned = {"noisy": -1.0, "wide": 3.0, "linear": 0.9, "deep": 20.0, "falls": -2.0}
    for place, name in enumerate(("falls", "wide", "linear", "deep", "noisy")):
        found = words("core-networks", cores(**{name: turned[name]}))
        assert found[place] == "no", name


def test_one_network_decides_nothing_about_cores():
    assert set(words("core-networks", cores(seeds=1))) == {"needs 3 networks"}


def test_networks_are_read_from_their_checkpoints_headers():
    table = linearised_networks.network_table(late_and_early(0.0)["run"])
    assert len(table) == 1 + 2 * 9 + 3
    assert set(table["mode"]) == {"reference", "post-training", "from-start", "floor"}
    assert table[table["mode"] == "reference"].omega.isna().all()
    assert len(linearised_networks.layer_table(late_and_early(0.0)["run"])) == 2 * len(table)


@pytest.mark.parametrize(("mode", "quick", "name"), [
    ("post-training", False, "omega0.003"),
    ("from-start", False, "start-omega0.003"),
    ("from-start", True, "quick-start-omega0.003"),
])  # fmt: skip
def test_equal_trainings_have_equal_names(tmp_path, monkeypatch, mode, quick, name):
    asked = {}
    monkeypatch.setattr(
        Context, "request_training", lambda self, *given, **more: asked.update(more) or tmp_path
    )
    context = Context(tmp_path, "any", quick)
    linearised_networks.linearise(context, "vgg8", mode, 0.003, 1)
    assert asked["name"] == name
    assert asked["weights"] == ("init" if mode == "from-start" else str(tmp_path))
    assert ("epochs" in asked) == quick


def test_best_penalty_is_that_of_other_seeds():
    """Each seed keeps its accuracy under one penalty, another than the other seeds."""
    groups = []
    for seed, best in enumerate(OMEGAS):
        groups += [
            cells("vgg8", "reference", None, seed, 0.99, 1.4, 0.0),
            cells("vgg8", "control", 0.003, seed, 0.5 - seed / 1000, 0.0, 1.0),
        ]
        for omega in OMEGAS:
            accuracy = 0.99 - seed / 1000 if omega == best else 0.8 - seed / 1000
            groups.append(cells("vgg8", "post-training", omega, seed, accuracy, 1.0, 0.5))
    table = linearised_networks.network_table(run_of(*groups)["run"])
    assert linearised_networks.stays_accurate(table).agrees is False


def translated(kept, last, floor=0.9, seeds=3):
    groups = []
    for seed in range(seeds):
        lower = seed / 1000
        groups += [
            cells("transformer-tiny", "reference", None, seed, 0.99, 1.4, 0.0),
            cells("transformer-tiny", "control", 0.003, seed, floor - lower, 0.0, 1.0),
        ]
        for step, omega in enumerate(OMEGAS):
            length = last if step == 2 else 1.0 - step / 4
            share = 0.3 * step
            groups.append(
                cells("transformer-tiny", "post-training", omega, seed, kept - lower, length, share)
            )
    return run_of(*groups)


def test_translation_model_keeps_its_accuracy_or_does_not():
    assert words("translation", translated(0.985, 0.1)) == ["yes", "yes"]
    assert words("translation", translated(0.9, 1.1)) == ["no", "can't tell"]


def test_task_without_need_for_nonlinear_units_shows_nothing():
    assert words("translation", translated(0.985, 0.1, floor=0.985))[0] == "can't tell"


def test_two_networks_decide_nothing():
    assert set(words("translation", translated(0.985, 0.1, seeds=2))) == {"needs 3 networks"}
