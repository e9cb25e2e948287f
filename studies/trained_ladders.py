"""Ladders planted in trained networks, which test whether measures follow nonlinearity there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from nlbench.citation import Source
from nlbench.models.zoo.catalogue import MEMBERS
from nlbench.parsers import unique
from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.verdicts import in_most_networks
from .measures import applicable
from .shared.ladder_cells import PARAMETERS, read_cells, read_descriptions
from .shared.ladder_tables import order_table
from .shared.ladders import Ladder, Rung
from .shared.orders import SEEN, WORDS, Order, orders_by_measure
from .shared.small_networks import trained_network
from .shared.subjects import load_on_cpu

if TYPE_CHECKING:
    from torch import nn

    from nlbench.subjects.subject import Subject

AMOUNTS = (0, 0.25, 0.5, 0.75, 1)
LINE_MEASURES = ("absdev", "pieces")
MEASURES = (
    "affinity", "r2", "cka", "linearity", "elementwise-residual", "substitution", "nlc",
    "affine-residual", "geometric-complexity", "local-linearity", "rugosity", *LINE_MEASURES,
)  # fmt: skip
POOL = {"reactions": 900}
"""Samples that are drawn from, where 4,096 are too many."""


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
    samples, draws : int
        Number of samples that each seed draws, and of seeds.
    segments : int
        Number of segments between pairs of samples, for measures of lines.
    fitting_samples : int
        Number of training samples on which affine maps are fitted.
    omitted : mapping of str to str
        Measures that are not run, separated by commas, and the reason.
    """

    model: str
    data: str
    of: str = "blend"
    options: Mapping[str, Any] | None = None
    samples: int = 64
    draws: int = 5
    segments: int = 8
    fitting_samples: int = 256
    omitted: Mapping[str, str] = field(default_factory=dict)

    @property
    def measures(self) -> tuple[str, ...]:
        """Measures of the full study."""
        omitted = ",".join(self.omitted).split(",")
        return tuple(name for name in MEASURES if name not in omitted)

    @property
    def name(self) -> str:
        """Name of the ladder."""
        kind = "blended" if self.of == "blend" else f"affine {self.of}"
        return f"{self.model.removeprefix('zoo/')} {kind}"

    @property
    def is_trained_here(self) -> bool:
        """True if the study trains the network."""
        return self.model == "resnet20"

    @property
    def problem(self) -> str:
        """Why the network can't be built. Empty if it can."""
        zoo, _, name = self.model.partition("/")
        return MEMBERS[name].problem if zoo == "zoo" else ""

    def ladder(self, amounts: Sequence[float]) -> Ladder:
        """Return the rungs, from no nonlinearity to the original network."""
        kind = "blend" if self.of == "blend" else f"{self.of}kept"
        rungs = tuple(Rung(f"{a:g}", self.model, f"{kind}{a:g}") for a in amounts)
        family = self.data.partition("/")[0]
        settings = {f"{family}.{key}": value for key, value in (self.options or {}).items()}
        lines = {"paths": "pairs", "number": self.segments, "tolerance": 0.01}
        settings |= {f"lines.{key}": value for key, value in lines.items()}
        return Ladder(self.name, self.data, rungs, settings=settings)


def _zoo(name: str, of: str = "blend", **fields: Any) -> Plant:
    data = MEMBERS[name].data
    options = {"windows": 512} if MEMBERS[name].reads_text else {"count": POOL.get(data, 4096)}
    return Plant(f"zoo/{name}", data, of, options, **fields)


_LINES = ",".join(LINE_MEASURES)
_NO_LINES = {_LINES: "minutes a network"}
_COSTLY = {f"geometric-complexity,{_LINES}": "minutes a network"}
_TOKENS = {
    f"nlc,affine-residual,geometric-complexity,local-linearity,rugosity,{_LINES}": (
        "undefined for tokens"
    )
}
_LARGE = {"samples": 8, "draws": 3}
_EFFICIENTNET: Mapping[str, Any] = {
    **_LARGE,
    "omitted": {
        "r2,affine-residual": "undefined for fewer samples than channels or directions",
        "linearity,substitution,nlc,geometric-complexity,local-linearity,rugosity": (
            "10 to 30 s a cell"
        ),
        **_NO_LINES,
    },
}
_SMOLLM2: Mapping[str, Any] = {
    **_LARGE,
    "fitting_samples": 64,
    "omitted": {
        "r2": "undefined for fewer samples than channels",
        "linearity,substitution": "minutes a cell",
        **_TOKENS,
    },
}
_CREPE_FULL = {
    "r2": "undefined for fewer samples than channels",
    "substitution,nlc,affine-residual,geometric-complexity,local-linearity,rugosity": (
        "minutes a cell"
    ),
    **_NO_LINES,
}
_LITE0: Mapping[str, Any] = {
    **_LARGE,
    "omitted": {
        "r2,affine-residual": "undefined for fewer samples than channels or directions",
        "linearity,substitution,geometric-complexity,rugosity": "10 to 30 s a cell",
        **_NO_LINES,
    },
}
SHIPPED = (Plant("vgg8", "digits"), Plant("vgg8", "digits", "activations", omitted=_NO_LINES))
PLANTS = (
    *SHIPPED,
    Plant("resnet20", "digits", draws=3, segments=4),
    _zoo("neuralfoil-xxsmall"),
    _zoo("neuralfoil-medium"),
    _zoo("neuralfoil-xxxlarge", omitted=_NO_LINES),
    _zoo("crepe-tiny", omitted=_COSTLY),
    _zoo("crepe-full", omitted=_CREPE_FULL),
    _zoo("mtcnn-rnet", omitted=_NO_LINES),
    _zoo("mtcnn-onet", omitted=_COSTLY),
    _zoo("minilm-l6", omitted=_TOKENS),
    _zoo("minilm-l6", "activations", omitted=_TOKENS),
    _zoo("rxnmapper", omitted=_TOKENS),
    _zoo("smollm2-135m", **_SMOLLM2),
    _zoo("smollm2-135m", "mlp", **_SMOLLM2),
    _zoo("efficientnet-lite0", **_LITE0),
    *(_zoo(f"efficientnet-lite{size}", **_EFFICIENTNET) for size in (1, 2)),
)

REMARKS = (
    "A rung is one network, measured on several draws of samples: intervals and tests are over "
    "samples, not over trainings.",
    "Blended: each activation φ is (1 - t) x + t φ(x). Affine: a random, growing part of the "
    "calls is replaced by affine maps, refitted on training samples; maps are per channel for "
    "activations and full for MLPs. The networks are not trained again.",
    "Scores of activations average over the activations that remain.",
)


class TrainedLadders(Study):
    """Ladders planted in trained networks: blended activations, and more and more affine parts."""

    question = "Which measures follow nonlinearity that is planted in trained networks?"
    source = Source("", "ours; see docs/benchmark.md")
    needs = "the zoo's packages (make zoo), 4 GB of disk, trains a ResNet20; nothing if quick"
    minutes = 30.0
    quick_minutes = 0.3
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Runs:
        """Write the networks of each rung, and measure them on samples drawn by each seed."""
        runs = {}
        plants = [plant for plant in (SHIPPED if context.quick else PLANTS) if not plant.problem]
        weights = [_request_weights(context, plant) for plant in plants]
        context.train_pending()
        for plant, trained in zip(plants, weights, strict=True):
            ladder = plant.ladder((0, 0.5, 1) if context.quick else AMOUNTS)
            files = _write_rungs(context, plant, ladder, trained)
            measures = context.measures or plant.measures
            if context.quick and not context.measures:
                measures = tuple(name for name in measures if name not in LINE_MEASURES)
            request = Request(
                measures,
                (plant.model,),
                (plant.data,),
                files,
                context.seeds_or(plant.draws, 3),
                plant.samples,
                settings=applicable(ladder.settings, measures, plant.data),
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
                "What each measure does on each network": _overview(orders),
                "Order: Kendall's tau by network": order_table(orders),
                "Value by rung: mean over draws of samples": values.reset_index(),
                "What was measured, and what was not": _extent_table(cells),
            },
            remarks=REMARKS,
        )


def _request_weights(context: Context, plant: Plant) -> str:
    """Return the weights of a network, and request its training if none come with it."""
    return str(trained_network(context, plant.model, 0)) if plant.is_trained_here else "trained"


def _write_rungs(context: Context, plant: Plant, ladder: Ladder, weights: str) -> tuple[str, ...]:
    """Write the checkpoint of each rung unless it exists. Return their paths."""
    from nlbench.serialization.files import make_folder
    from nlbench.subjects.weights import save_weights

    folder = context.folder / "checkpoints"
    make_folder(folder)
    prefix = f"{plant.model.replace('/', '-')}-{plant.data.partition('/')[0]}"
    files = [folder / f"{prefix}-{rung.weights}-seed0.safetensors" for rung in ladder.rungs]
    if all(file.is_file() for file in files):
        return tuple(map(str, files))
    options = tuple(sorted((plant.options or {}).items()))
    subject = load_on_cpu(
        plant.model,
        weights,
        plant.data,
        samples=plant.fitting_samples,
        split="train",
        options=options,
    )
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


def _overview(orders: Mapping[tuple[str, str], Order]) -> pd.DataFrame:
    """Return one row per measure: what it does on each network."""
    rows: dict[str, dict[str, str]] = {}
    for (measure, ladder), order in orders.items():
        text = order.mark or f"{order.word}, τ {order.tau:.2f}"
        rows.setdefault(measure, {})[ladder] = text
    names = [plant.name for plant in PLANTS if any(plant.name in row for row in rows.values())]
    return pd.DataFrame(rows).T[names].fillna("–").rename_axis("measure").reset_index()


def _verdicts(orders: Mapping[tuple[str, str], Order]) -> list[Verdict]:
    """Evaluate each measure on all networks on which it has an order."""
    verdicts = []
    for kind, what in (("blended", "the activations are blended"), ("affine", "parts are affine")):
        for measure in unique(name for name, _ in orders):
            words = {
                ladder: order.word
                for (name, ladder), order in orders.items()
                if name == measure and f" {kind}" in ladder and order.word in WORDS
            }
            if not words:
                continue
            sees = {ladder: word in SEEN for ladder, word in words.items()}
            others = [f"{name}: {word}" for name, word in words.items() if word not in SEEN]
            verdicts.append(
                Verdict(
                    f"{measure} rises with nonlinearity in trained networks where {what}",
                    "",
                    "; ".join([f"{sum(sees.values())} of {len(words)} networks", *others]),
                    in_most_networks(_by_family(sees), unit="architectures"),
                    "exact trend test over draws of samples, adjusted over networks; agrees if "
                    "seen in most networks, by a sign test in which all sizes of an architecture "
                    "count once",
                )
            )
    return verdicts


def _by_family(holds: Mapping[str, bool]) -> list[bool]:
    """Return whether a claim holds for more than half of the sizes of each architecture."""
    families: dict[str, list[bool]] = {}
    for ladder, holds_for_size in holds.items():
        families.setdefault(_family(ladder), []).append(holds_for_size)
    return [2 * sum(sizes) > len(sizes) for sizes in families.values()]


def _family(ladder: str) -> str:
    """Return the architecture of a ladder's network, without its size."""
    return re.split(r"-|\d", ladder, maxsplit=1)[0]


def _describe_missing(plant: Plant, measured: Collection[str]) -> str:
    """Return the measures without a cell on a network, grouped by reason."""
    reasons: dict[str, str] = {}
    for names, reason in plant.omitted.items():
        reasons |= dict.fromkeys(names.split(","), reason)
    missing: dict[str, list[str]] = {}
    for name in MEASURES:
        if name not in measured:
            missing.setdefault(reasons.get(name, "not in this run"), []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in missing.items())


def _extent_table(cells: pd.DataFrame) -> pd.DataFrame:
    """Return one row per network: samples, draws, and the measures that were not run."""
    rows = []
    for plant in PLANTS:
        measured = cells[cells.ladder == plant.name]
        seeds = int(measured.seed.nunique())
        missing = _describe_missing(plant, set(measured.measure))
        if not seeds:
            missing = plant.problem or "not part of the quick version"
        seconds = measured.groupby(["seed", "rung"]).seconds.max().median()
        rows.append((plant.name, plant.samples, seeds, missing, seconds))
    columns = ["network", "samples", "draws", "not run", "seconds of the slowest pass"]
    return pd.DataFrame(rows, columns=columns)
