"""Choose the weights given in a subject's specification."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nlbench import registry
from nlbench.errors import RequestError, shorten
from nlbench.serialization.files import parse_json, read_text
from nlbench.serialization.hashing import file_hash

from .model import ModelInfo, model_info, split_output
from .own import output_version
from .spec import SubjectSpec

_SEED = re.compile(r"seed[-_= ]?\d+$", re.IGNORECASE)
FRESH_WEIGHTS = ("init", "calibrated")
"""Weights drawn using the seed; ``calibrated`` computes batch-norm statistics from the samples."""


@dataclass(frozen=True)
class WeightsChoice:
    """The weights given in a subject's specification."""

    # trained, init, calibrated or the checkpoint's file name. A file in the folder NAME.training of
    # a training run is labelled NAME/FILE.
    label: str
    file: Path | None  # None for freshly initialised weights
    # Reason why the weights are freshly initialised although a checkpoint is declared.
    note: str = ""
    model: str = ""  # the model's `ModelInfo.fingerprint`; empty if it has none
    key: str = ""  # entry of the file, such as ema, if it holds several networks
    problem: str = ""  # reason why there are no such weights, in a plan

    @cached_property
    def content(self) -> str:
        """Hash of the file, or label of fresh weights."""
        if self.problem:
            return f"absent: {self.label}"
        weights = file_hash(self.file) if self.file else self.label
        return f"{weights}#{self.key}" if self.key else weights

    @property
    def identity(self) -> str:
        """The content, followed by the model's fingerprint."""
        return f"{self.content} {self.model}".rstrip()


def choose_weights(spec: SubjectSpec) -> WeightsChoice:
    """Choose the weights given in a subject's specification.

    ``auto`` means ``trained`` if the model has a checkpoint for the dataset, otherwise ``init``.
    """
    # An unknown model is reported before any problem with the weights.
    info = model_info(registry.load("models", spec.model))
    choice = _choose(spec, info)
    version = info.fingerprint() if info.fingerprint else ""
    _, output = split_output(dict(spec.arguments), info)
    versions = [version, output_version(output)] if output else [version]
    return replace(choice, model=" ".join(filter(None, versions)))


def _choose(spec: SubjectSpec, info: ModelInfo) -> WeightsChoice:
    if spec.weights in FRESH_WEIGHTS:
        return WeightsChoice(spec.weights, None)
    if spec.weights not in ("auto", "trained"):
        return _checkpoint(spec.weights)
    file = info.checkpoint(spec.data)
    if file is not None and file.is_file():
        return WeightsChoice("trained", file)
    absent = ""
    if file is not None:
        hint = f"; {info.obtain}" if info.obtain else ""
        absent = f"the weights of {spec.model} on {spec.data} are missing: no {file}{hint}"
    if spec.weights == "auto":
        note = f"{spec.model} is freshly initialised: {absent}" if absent else ""
        return WeightsChoice("init", None, note)
    if absent:
        raise RequestError(absent)
    datasets = f"only on {', '.join(sorted(info.trained))}" if info.trained else "on no dataset"
    raise RequestError(
        f"{spec.model} has no checkpoint trained on {spec.data} ({datasets}); "
        "use --weights init or the path to a checkpoint"
    )


def _checkpoint(weights: str) -> WeightsChoice:
    file = Path(weights)
    if os.path.exists(file):  # noqa: PTH110 (returns False for an invalid name instead of raising)
        if not file.is_dir():
            return WeightsChoice(_label(file), file)
        problem = "it is a folder, expected a checkpoint's path"
        if (file / "adapter_config.json").is_file():
            problem = (
                "it is the folder of an adapter, which needs its base model; merge the two and "
                "save the whole model"
            )
        raise RequestError(f"weights '{shorten(weights)}': {problem}")
    path, hash_mark, key = weights.rpartition("#")
    if hash_mark and key and os.path.isfile(path):  # noqa: PTH113
        return WeightsChoice(f"{_label(Path(path))}#{key}", Path(path), key=key)
    failure = training_failure(file)
    if failure:
        raise RequestError(f"weights '{shorten(weights)}': their training failed: {failure}")
    raise RequestError(
        f"weights '{shorten(weights)}': no such file; expected trained, init, calibrated "
        "or a checkpoint's path"
    )


def _label(file: Path) -> str:
    """Return a checkpoint's name, preceded by the training run or seed that names its folder."""
    folder = file.absolute().parent.name
    name = folder.removesuffix(".training")
    return f"{name}/{file.name}" if name != folder or _SEED.search(folder) else file.name


def training_folder(path: Path) -> Path:
    """Return the folder, next to a checkpoint, with its training run's manifest and state."""
    return path.with_name(f"{path.stem}.training")


def training_failure(path: Path) -> str:
    """Return the error that ended a missing checkpoint's training run.

    Return "" if there is none.
    """
    if path.exists():
        return ""
    try:
        file = training_folder(path) / "manifest.json"
        content = parse_json(read_text(file), str(file), finite=False)
    except (RequestError, ValueError):
        return ""
    return str(content.get("failed", "")) if isinstance(content, dict) else ""
