"""Ladders planted in trained networks, which test whether measures follow nonlinearity there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from nlbench.citation import Source
from nlbench.models.zoo.catalogue import MEMBERS
from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.verdicts import in_most_networks
from .measures import applicable
from .shared.ladder_cells import PARAMETERS, read_cells, read_descriptions
from .shared.ladder_tables import order_table
from .shared.ladders import Ladder, Rung
from .shared.orders import SEEN, WORDS, Order, orders_by_measure

if TYPE_CHECKING:
    from torch import nn

    from nlbench.subjects.subject import Subject

AMOUNTS = (0, 0.25, 0.5, 0.75, 1)
QUICK_AMOUNTS = (0, 0.5, 1)
SAMPLES = 64
FITTING_SAMPLES = 256
MEASURES = (
    "affinity", "r2", "cka", "linearity", "elementwise-residual", "substitution", "nlc",
    "affine-residual", "geometric-complexity",
)  # fmt: skip
LINE_MEASURES = ("absdev", "pieces")
LINES = {"lines.paths": "pairs", "lines.number": 8, "lines.tolerance": 0.01}


@dataclass(frozen=True)
class Plant:
    """A trained network in which nonlinearity is planted.

    Parameters
    ----------
    model, data : str
        Registered names.
    of : str
        What is made affine: ``blend`` for all activations in part, or places as in ``sites.of``, a
        growing part of which is replaced by affine maps.
    options : mapping of str to value
        Options of the dataset, which give each seed samples of its own.
    has_lines : bool
        True if measures along lines take seconds.
    """

    model: str
    data: str
    of: str = "blend"
    options: Mapping[str, Any] | None = None
    has_lines: bool = False

    @property
    def name(self) -> str:
        """Name of the ladder."""
        kind = "blended" if self.of == "blend" else f"affine {self.of}"
        return f"{self.model.removeprefix('zoo/')} {kind}"

    @property
    def problem(self) -> str:
        """Why the network can't be built.

        Empty if it can.
        """
        zoo, _, name = self.model.partition("/")
        return MEMBERS[name].problem if zoo == "zoo" else ""

    def ladder(self, amounts: Sequence[float]) -> Ladder:
        """Return the rungs, from no nonlinearity to the original network."""
        kind = "blend" if self.of == "blend" else f"{self.of}kept"
        rungs = tuple(Rung(f"{a:g}", self.model, f"{kind}{a:g}") for a in amounts)
        family = self.data.partition("/")[0]
        settings = {f"{family}.{key}": value for key, value in (self.options or {}).items()}
        return Ladder(self.name, self.data, rungs, settings=settings)


def _zoo(name: str, of: str = "blend", *, has_lines: bool = False, **options: Any) -> Plant:
    return Plant(f"zoo/{name}", MEMBERS[name].data, of, options, has_lines)


SHIPPED = (Plant("vgg8", "digits", has_lines=True), Plant("vgg8", "digits", "activations"))
PLANTS = (
    *SHIPPED,
    *(
        _zoo(f"neuralfoil-{size}", count=4096, has_lines=size != "xxxlarge")
        for size in ("xxsmall", "medium", "xxxlarge")
    ),
    _zoo("crepe-tiny", count=4096),
    _zoo("minilm-l6", "activations", windows=512),
    *(_zoo(f"efficientnet-lite{size}", count=4096) for size in range(3)),
    _zoo("crepe-full", count=4096),
    _zoo("smollm2-135m", "mlp", windows=512),
)


class TrainedLadders(Study):
    """Ladders planted in trained networks: blended activations, and more and more affine parts."""

    question = "Which measures follow nonlinearity that is planted in trained networks?"
    source = Source("", "ours; see docs/benchmark.md")
    needs = "the zoo's packages (make zoo), 4 GB of disk; nothing if quick"
    minutes, quick_minutes = 40.0, 0.3
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Runs:
        """Write the networks of each rung, and measure them on samples drawn by each seed."""
        runs = {}
        seeds = context.seeds_or(5, 3)
        for plant in SHIPPED if context.quick else PLANTS:
            if plant.problem:
                continue
            ladder = plant.ladder(QUICK_AMOUNTS if context.quick else AMOUNTS)
            files = _write_rungs(context, plant, ladder)
            is_small = plant.has_lines and not context.quick
            measures = context.measures or (*MEASURES, *LINE_MEASURES * is_small)
            settings = applicable({**LINES, **ladder.settings}, measures, plant.data)
            request = Request(
                measures, (plant.model,), (plant.data,), files, seeds, SAMPLES, settings=settings
            )
            runs[ladder.name] = context.run(request, ladder.name.replace(" ", "-"))
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Test, for each measure and network, whether its values rise with the nonlinearity."""
        ladders = {plant.name: plant.ladder(AMOUNTS) for plant in PLANTS}
        cells = read_cells(runs, ladders)
        cells = cells[cells.measure != PARAMETERS]
        orders = orders_by_measure(cells, read_descriptions(runs))
        values = cells.pivot_table("value", ["ladder", "measure"], "rung", sort=False)
        return Findings(
            list(_verdicts(orders)),
            {
                "What each measure does on each network": _overview(orders, cells),
                "Order: Kendall's tau by network": order_table(orders),
                "Value by rung: mean over draws of samples": values.reset_index(),
            },
            remarks=_remarks(list(runs), cells),
        )


def _write_rungs(context: Context, plant: Plant, ladder: Ladder) -> tuple[str, ...]:
    """Write the checkpoint of each rung unless it exists.

    Return their paths.
    """
    import torch

    from nlbench.serialization.files import make_folder
    from nlbench.subjects.load import load_subject
    from nlbench.subjects.spec import SubjectSpec
    from nlbench.subjects.weights import save_weights

    folder = context.folder / "checkpoints"
    make_folder(folder)
    prefix = f"{plant.model.replace('/', '-')}-{plant.data.partition('/')[0]}"
    files = [folder / f"{prefix}-{rung.weights}-seed0.safetensors" for rung in ladder.rungs]
    if all(file.is_file() for file in files):
        return tuple(map(str, files))
    options = tuple(sorted((plant.options or {}).items()))
    spec = SubjectSpec(
        plant.model, "trained", plant.data, 0, FITTING_SAMPLES, split="train", options=options
    )
    subject = load_subject(spec, torch.device("cpu"))
    for rung, file in zip(ladder.rungs, files, strict=True):
        network, metadata = _plant(subject, plant.of, float(rung.label))
        facts = {**(subject.facts.weights_metadata or {}), **metadata}
        save_weights(file, network, facts)
    return tuple(map(str, files))


def _plant(subject: Subject, of: str, amount: float) -> tuple[nn.Module, dict[str, str]]:
    """Return the network of a rung and the metadata with which its checkpoint is loaded."""
    import json
    import random

    from nlbench.introspection.attention import without_fast_path
    from nlbench.introspection.model_state import evaluation_mode
    from nlbench.models.removal.curve import refitted_maps
    from nlbench.models.removal.network import network_with_maps, transform_metadata
    from nlbench.probes.replacement import find_calls

    if of == "blend":
        options = json.dumps({"amount": amount})
        return subject.model, {"transform": "blend", "transform_options": options}
    example = subject.inputs[:2]
    calls = find_calls(subject.model, example, of=of)
    order = random.Random(0).sample(calls, len(calls))
    removed = order[: len(order) - round(amount * len(order))]
    if not removed:
        return subject.model, {}
    with evaluation_mode(subject.model), without_fast_path():
        is_full = of != "activations"
        maps = refitted_maps(subject.model, removed, subject.inputs, is_full=is_full)
    network = network_with_maps(subject.model, maps, example, of)
    return network, transform_metadata(list(maps), of)


def _overview(orders: Mapping[tuple[str, str], Order], cells: pd.DataFrame) -> pd.DataFrame:
    """Return one row per measure: what it does on each network, and its cost in seconds."""
    rows: dict[str, dict[str, str]] = {}
    for (measure, ladder), order in orders.items():
        rows.setdefault(measure, {})[ladder] = f"{order.word}, τ {order.tau:.2f}"
        if order.mark:
            rows[measure][ladder] = order.mark
    names = [plant.name for plant in PLANTS if any(plant.name in row for row in rows.values())]
    table = pd.DataFrame(rows).T[names].fillna("–")
    seconds = cells.pivot_table("seconds", "measure", "ladder", "median")
    table["seconds, median of the largest"] = seconds.max(axis=1)
    return table.rename_axis("measure").reset_index()


def _verdicts(orders: Mapping[tuple[str, str], Order]) -> list[Verdict]:
    """Judge each measure on all networks on which it has an order."""
    verdicts = []
    for kind, what in (("blended", "the activations are blended"), ("affine", "parts are affine")):
        for measure in dict.fromkeys(name for name, _ in orders):
            words = {
                ladder: order.word
                for (name, ladder), order in orders.items()
                if name == measure and f" {kind}" in ladder and order.word in WORDS
            }
            if not words:
                continue
            holds = [word in SEEN for word in words.values()]
            others = [f"{name}: {word}" for name, word in words.items() if word not in SEEN]
            verdicts.append(
                Verdict(
                    f"{measure} rises with nonlinearity in trained networks where {what}",
                    "",
                    "; ".join([f"{sum(holds)} of {len(words)} networks", *others]),
                    in_most_networks(holds),
                    "exact trend test over draws of samples, adjusted over networks; agrees if "
                    "seen in most networks, by a sign test",
                )
            )
    return verdicts


def _remarks(measured: Sequence[str], cells: pd.DataFrame) -> list[str]:
    remarks = [
        f"A rung is one network, measured on {SAMPLES} samples of each of "
        f"{cells.seed.nunique()} draws: intervals and tests are over samples, not over trainings.",
        "Blended: each activation φ is (1 - t) x + t φ(x). Affine: a random, growing part of the "
        f"calls is replaced by affine maps, refitted on {FITTING_SAMPLES} training samples; maps "
        "are per channel for activations and full for MLPs. The networks are not trained again.",
        "Scores of activations average over the activations that remain.",
    ]
    missing = [plant for plant in PLANTS if plant.name not in measured]
    for plant in missing:
        reason = plant.problem or "not part of the quick version"
        remarks.append(f"{plant.name} was not measured: {reason}.")
    return remarks
