"""The published classifiers that the affinity-score paper sets side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import RequestError, nearest
from nlbench.request import Request

from .site_scores import AFFINITY
from .study import Context, Study, Verdict

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = [
    "CLASSIFIERS",
    "FAMILIES",
    "Classifier",
    "Classifiers",
    "judged",
    "measured_classifiers",
    "remarks_on",
    "short_name",
]


@dataclass(frozen=True)
class Classifier:
    """A published classifier.

    Parameters
    ----------
    year : int
        When it was published.
    family : str
    group : str
        With which the paper compares it.
    """

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
    "ConvNeXt": (
        2022,
        "post-ViT",
        "convnext_tiny convnext_small convnext_base convnext_large",
    ),
}
"""Year, group and networks of each family, in the order in which they came."""

CLASSIFIERS: Mapping[str, Classifier] = {
    f"torchvision/{name}": Classifier(year, family, group)
    for family, (year, group, names) in FAMILIES.items()
    for name in names.split()
}


class Classifiers(Study):
    """A study of the affinity of every classifier; all of them share their cells."""

    source = AFFINITY
    needs = "pretrained weights and ImageNet; else random weights"
    minutes, quick_minutes = 2.5, 0.4
    takes = ("data", "weights")

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of every classifier."""
        return {"run": measured_classifiers(context, ("affinity",))}


_QUICK = (
    "alexnet googlenet resnet18 resnet34 mnasnet0_5 efficientnet_b1 vit_b_32 swin_t convnext_tiny"
)
_NOT_DRAWN = ("torchvision/vit_h_14",)
"""632 million parameters, and images whose side is a multiple of 14: left out where drawn."""

_WEIGHTS = ("trained", "init", "calibrated")
_SIDE = 96  # the least that all networks but one take, windows and patches of 32 included


def measured_classifiers(context: Context, measures: Sequence[str]) -> Run:
    """Measure the classifiers, with trained weights where these are at hand, or as drawn.

    Trained networks look at ImageNet, with tensors reduced as the published figures were made;
    drawn ones at small made-up pictures.

    Parameters
    ----------
    context : Context
        Its weights: ``trained``, ``init`` or ``calibrated``; where none are chosen, ``trained``
        if those of any network and the images are at hand, else ``init``.
    measures : sequence of str

    Raises
    ------
    nlbench.RequestError
        If trained weights are chosen and none, or no images, are at hand; or weights are called
        otherwise.
    """
    weights = context.weights
    if weights and weights not in _WEIGHTS:
        hint = nearest(weights, _WEIGHTS)
        raise RequestError(f"--weights: unknown '{weights}'{hint or '; expected init or trained'}")
    names = tuple(f"torchvision/{n}" for n in _QUICK.split()) if context.quick else CLASSIFIERS
    data = context.data or "imagenet"
    found = () if weights in _WEIGHTS[1:] else _at_hand(tuple(names), data, is_asked=bool(weights))
    if found:
        request = Request(
            tuple(measures),
            found,
            (data,),
            ("trained",),
            samples=512 if context.quick else 2048,
            settings={"sites.batch": 512, "sites.reduction": "published"},
        )
        return context.run(request, "trained")
    samples = 32 if context.quick else 128
    side = {} if context.data else {"synthetic.image_size": _SIDE}
    request = Request(
        tuple(measures),
        tuple(name for name in names if name not in _NOT_DRAWN),
        (context.data or "synthetic",),
        (weights or "init",),
        samples=samples,
        settings={"sites.batch": samples, **side},
    )
    return context.run(request, weights or "init")


def _at_hand(names: Sequence[str], data: str, *, is_asked: bool) -> tuple[str, ...]:
    """Those whose published weights are there, with the images that they were trained on.

    Raises
    ------
    nlbench.RequestError
        If there are none, and they are asked for.
    """
    from nlbench import registry
    from nlbench.subjects.load import load_dataset
    from nlbench.subjects.model import model_info

    trained = {name: model_info(registry.load("models", name)).trained for name in names}
    files = {name: Path(of[data]) for name, of in trained.items() if data in of}
    found = tuple(name for name, file in files.items() if file.is_file())
    try:
        if not files:
            raise RequestError(f"the networks' published weights are for imagenet, not for {data}")
        if not found:
            raise RequestError(
                f"none of the {len(names)} networks' published weights are at hand "
                f"({next(iter(files.values()))} is missing, for one)"
            )
        load_dataset(data, {})
    except RequestError as error:
        if is_asked:
            raise RequestError(
                f"{error}; or say --weights init to measure the networks as drawn"
            ) from None
        return ()
    return found


def short_name(model: str) -> str:
    """Name of a network without its library's.

    Examples
    --------
    >>> short_name("torchvision/vit_b_32")
    'vit_b_32'
    """
    return model.rpartition("/")[2]


def _is_drawn(run: Run) -> bool:
    return any(record.subject.weights in _WEIGHTS[1:] for record in run.records)


def remarks_on(run: Run) -> list[str]:
    """Say what a reader has to know of the weights, the data and the networks."""
    models = {r.subject.model for r in run.records if r.result.status == "ok"}
    data = ", ".join(dict.fromkeys(record.subject.data for record in run.records))
    said = []
    if _is_drawn(run):
        said.append(
            "Random weights: the networks are as they are drawn before training, and what is "
            "claimed of trained ones can't be told from them; the remarks beside the verdicts say "
            "what the numbers of the random ones would."
        )
    hashes = {
        short_name(r.subject.model): str(r.subject.weights_hash)[:8]
        for r in run.records
        if r.subject.weights == "trained" and r.result.status == "ok"
    }
    if hashes:
        listed = ", ".join(f"{name} {value}" for name, value in hashes.items())
        said.append(f"Published weights, with their hashes' first digits: {listed}.")
    counts = {str(r.probe.facts["samples"]) for r in run.records if "samples" in r.probe.facts}
    said.append(
        f"{len(models)} of the {len(CLASSIFIERS)} networks, on {data}, "
        f"{', '.join(sorted(counts))} samples; the published figures are of trained ones on the "
        "50,000 images of ImageNet's validation split."
    )
    missing = {
        model: f"{short_name(model)} ({record.result.reason})"
        for record in run.records
        if (model := record.subject.model) not in models
    }
    if missing:
        said.append(f"No value of {', '.join(missing.values())}.")
    return said


def judged(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave open what is claimed of trained networks where the weights are random."""
    if not _is_drawn(run):
        return list(verdicts)
    return [
        Verdict(
            one.claim,
            one.published,
            one.ours,
            None,
            f"random weights, which would say: {one.word}"
            + (f"; {one.remark}" if one.remark else ""),
        )
        for one in verdicts
    ]
