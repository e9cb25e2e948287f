"""The published classifiers compared in the affinity-score paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pandas as pd

from nlbench.errors import RequestError, nearest
from nlbench.parsers import unique
from nlbench.request import Request
from nlbench.store.run import Run
from nlbench.studies.framework import Context, Runs, Study, Verdict

from .site_scores import AFFINITY
from .zoo_networks import measure_zoo


@dataclass(frozen=True)
class Classifier:
    """A published classifier. The paper compares groups, which consist of families."""

    year: int
    family: str
    group: str


FAMILIES: Mapping[str, tuple[int, str, str]] = {
    "AlexNet": (2012, "pre-residual", "alexnet"),
    "VGG": (2014, "pre-residual", "vgg11 vgg13 vgg16 vgg19"),
    "GoogLeNet": (2014, "pre-residual", "googlenet"),
    "Inception v3": (2015, "pre-residual", "inception_v3"),
    "ResNet": (2015, "residual", "resnet18 resnet34 resnet50 resnet101 resnet152"),
    "DenseNet": (2016, "residual", "densenet121 densenet161 densenet169 densenet201"),
    "MNASNet": (2018, "searched", "mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3"),
    "EfficientNet": (
        2019,
        "searched",
        "efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4",
    ),
    "ViT": (2020, "ViT", "vit_b_32 vit_b_16 vit_l_32 vit_l_16 vit_h_14"),
    "Swin": (2021, "post-ViT", "swin_t swin_s swin_b"),
    "ConvNeXt": (2022, "post-ViT", "convnext_tiny convnext_small convnext_base convnext_large"),
}
"""Year, group and networks of each family, in order of publication."""

CLASSIFIERS: Mapping[str, Classifier] = {
    f"torchvision/{name}": Classifier(year, family, group)
    for family, (year, group, names) in FAMILIES.items()
    for name in names.split()
}


class Classifiers(Study):
    """Base class for studies of the affinity of all classifiers, which share their cells."""

    source = AFFINITY
    needs = "pretrained weights and ImageNet; else random weights"
    minutes = 3.5
    quick_minutes = 0.8
    takes = ("data", "weights")
    zoo: ClassVar[tuple[str, ...]] = ()
    """Networks from the zoo, for claims that go beyond these classifiers."""
    zoo_weights: ClassVar[tuple[str, ...]] = ("trained",)

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of every classifier and of networks from the zoo."""
        run = measure_classifiers(context, ("affinity",))
        return {"run": run, **measure_zoo(context, self.zoo, weights=self.zoo_weights)}


_QUICK = "googlenet resnet18 mnasnet0_5 vit_b_32 swin_t"

_WEIGHTS = ("trained", "init", "calibrated")
_IMAGE_SIDE = 96  # Smallest side that all networks but one accept; some use patches of 32 pixels.


def measure_classifiers(context: Context, measures: Sequence[str]) -> Run:
    """Measure the classifiers with trained weights if available, otherwise with random ones.

    Trained networks are measured on ImageNet, reducing tensors as in the paper, untrained ones on
    small synthetic images.

    The context's weights are ``trained``, ``init`` or ``calibrated``. By default they are
    ``trained`` if the images and the weights of at least one network are available, else ``init``.

    Raises
    ------
    nlbench.RequestError
        If the weights are unknown, or if trained weights are chosen and they or the images are
        missing.
    """
    weights = context.weights
    if weights and weights not in _WEIGHTS:
        hint = nearest(weights, _WEIGHTS)
        raise RequestError(f"--weights: unknown '{weights}'{hint or '; expected init or trained'}")
    names = tuple(f"torchvision/{n}" for n in _QUICK.split()) if context.quick else CLASSIFIERS
    data = context.data or "imagenet"
    trained = () if weights in _WEIGHTS[1:] else _available(names, data, required=bool(weights))
    if trained:
        request = Request(
            tuple(measures),
            trained,
            (data,),
            ("trained",),
            samples=512 if context.quick else 2048,
            settings={"sites.batch": 512, "sites.reduction": "published"},
        )
        return context.run(request, "trained")
    samples = 16 if context.quick else 128
    side = {} if context.data else {"synthetic.image_size": _IMAGE_SIDE}
    # Excluded with random weights: 632 million parameters, and image sides must be divisible by 14.
    request = Request(
        tuple(measures),
        tuple(name for name in names if name != "torchvision/vit_h_14"),
        (context.data or "synthetic",),
        (weights or "init",),
        samples=samples,
        settings={"sites.batch": samples, **side},
    )
    return context.run(request, weights or "init")


def _available(names: Iterable[str], data: str, *, required: bool) -> tuple[str, ...]:
    """Return the networks whose weights are available. There are none if the dataset is missing."""
    from nlbench import registry
    from nlbench.subjects.load import load_dataset
    from nlbench.subjects.model import model_info

    trained = {name: model_info(registry.load("models", name)).trained for name in names}
    files = {name: Path(by_data[data]) for name, by_data in trained.items() if data in by_data}
    available = tuple(name for name, file in files.items() if file.is_file())
    try:
        if not files:
            raise RequestError(f"the networks' published weights are for imagenet, not for {data}")
        if not available:
            raise RequestError(
                f"none of the {len(trained)} networks' published weights are available "
                f"(for example, {next(iter(files.values()))} is missing)"
            )
        load_dataset(data, {})
    except RequestError as error:
        if required:
            raise RequestError(
                f"{error}; use --weights init to measure the networks with random weights"
            ) from None
        return ()
    return available


def short_name(model: str) -> str:
    """Return the name of a network without its library.

    Examples
    --------
    >>> short_name("torchvision/vit_b_32")
    'vit_b_32'
    """
    return model.rpartition("/")[2]


def _is_untrained(run: Run) -> bool:
    return any(record.subject.weights in _WEIGHTS[1:] for record in run.records)


def classifier_remarks(run: Run) -> list[str]:
    """Return remarks on the weights, the data and the networks of a run."""
    models = {r.subject.model for r in run.records if r.result.status == "ok"}
    data = ", ".join(unique(record.subject.data for record in run.records))
    remarks = []
    if _is_untrained(run):
        remarks.append(
            "Random weights: the networks are not trained, so claims about trained networks can't "
            "be decided; each verdict's remark gives the answer for random weights."
        )
    hashes = {
        short_name(r.subject.model): str(r.subject.weights_hash)[:8]
        for r in run.records
        if r.subject.weights == "trained" and r.result.status == "ok"
    }
    if hashes:
        listed = ", ".join(f"{name} {value}" for name, value in hashes.items())
        remarks.append(f"Published weights, with the first digits of their hashes: {listed}.")
    counts = {str(r.probe.facts["samples"]) for r in run.records if "samples" in r.probe.facts}
    remarks.append(
        f"{len(models)} of the {len(CLASSIFIERS)} networks, on {data}, "
        f"{', '.join(sorted(counts))} samples; the published values are for trained networks on "
        "the 50,000 images of ImageNet's validation split."
    )
    missing = {
        model: f"{short_name(model)} ({record.result.reason})"
        for record in run.records
        if (model := record.subject.model) not in models
    }
    if missing:
        remarks.append(f"No value for {', '.join(missing.values())}.")
    return remarks


def undecided_if_untrained(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Mark claims about trained networks as undecided if the weights are random."""
    if not _is_untrained(run):
        return list(verdicts)
    return [
        replace(
            verdict,
            agrees=None,
            remark=f"random weights, which would give: {verdict.word}"
            + (f"; {verdict.remark}" if verdict.remark else ""),
        )
        for verdict in verdicts
    ]


def sort_classifiers(table: pd.DataFrame) -> pd.DataFrame:
    """Sort a table with the column ``network`` by the order of the classifiers."""
    places = {name: place for place, name in enumerate(CLASSIFIERS)}
    return table.sort_values(
        "network",
        key=lambda names: names.map(lambda name: places.get(name, 0)),
        kind="stable",
        ignore_index=True,
    )
