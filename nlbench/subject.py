"""A subject: a model with its weights, the data it is looked at with, and a seed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlbench import registry
from nlbench.data import Dataset, Sample
from nlbench.errors import NlbenchError, PluginError, RequestError
from nlbench.model import model_info
from nlbench.probes.sites import evaluation_mode
from nlbench.weights import file_hash, load_weights, state_hash

__all__ = [
    "Subject",
    "SubjectSpec",
    "WeightsChoice",
    "build_model",
    "choose_weights",
    "load_dataset",
    "load_subject",
    "tensor_hash",
]


@dataclass(frozen=True)
class SubjectSpec:
    """What names a subject.

    Parameters
    ----------
    model, data : str
        Registered names.
    weights : str
        ``auto``, ``trained``, ``init`` or the path of a checkpoint.
    seed : int
        Decides the initialisation and which samples are drawn.
    samples : int or None
        How many samples; None: the whole split.
    split : {"test", "train"}
    """

    model: str
    weights: str
    data: str
    seed: int = 0
    samples: int | None = 512
    split: str = "test"


@dataclass(frozen=True)
class WeightsChoice:
    """Which weights a request means.

    Parameters
    ----------
    label : str
        ``trained``, ``init`` or the checkpoint's file name.
    file : Path or None
        None for freshly initialised weights.
    """

    label: str
    file: Path | None

    @property
    def identity(self) -> str:
        """Hash of the file, or ``init``: what decides the weights, beside the seed."""
        return file_hash(self.file) if self.file else "init"


@dataclass(frozen=True)
class Subject:
    """A model with its weights on a device, and the samples it is looked at with.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : tensor of shape (n, ...)
        What the model is given.
    labels : tensor of shape (n,) or None
    facts : dict
        ``model``, ``weights``, ``data``, ``seed``; hashes, counts, the preprocessing.
    images : tensor or None
        The inputs before normalisation, where they are images.
    normalize : callable
        From such images to inputs.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor | None
    facts: dict[str, Any]
    images: Tensor | None = None
    normalize: Callable[[Tensor], Tensor] = field(default=lambda images: images)


def load_dataset(name: str) -> Dataset:
    """Load a registered dataset.

    Raises
    ------
    nlbench.NlbenchError
        If there is none of that name, or its plugin gives something else.
    """
    dataset = registry.load("datasets", name)()
    if not isinstance(dataset, Dataset):
        raise PluginError(
            f"dataset '{name}' gives a {type(dataset).__name__}, expected nlbench.data.Dataset"
        )
    return dataset


def build_model(name: str, dataset: Dataset, seed: int) -> nn.Module:
    """Build a registered model for a dataset, initialised from a seed.

    The builder is given those of ``in_channels``, ``num_classes`` and ``image_size`` that
    it takes. The global random state is left as it was.
    """
    build = registry.load("models", name)
    channels, height, _ = dataset.shape
    known = {"in_channels": channels, "num_classes": dataset.classes, "image_size": height}
    try:
        taken = inspect.signature(build).parameters
    except (TypeError, ValueError):
        taken = inspect.signature(lambda: None).parameters
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(**{key: value for key, value in known.items() if key in taken})
    if not isinstance(model, nn.Module):
        raise PluginError(
            f"model '{name}' builds a {type(model).__name__}, expected torch.nn.Module"
        )
    return model


def choose_weights(spec: SubjectSpec) -> WeightsChoice:
    """Decide which weights a request means.

    ``auto`` is ``trained`` where a checkpoint ships for the model on the dataset, else
    ``init``.

    Raises
    ------
    nlbench.RequestError
        If ``trained`` is asked for where no checkpoint ships, or a file doesn't exist.
    """
    if spec.weights == "init":
        return WeightsChoice("init", None)
    if spec.weights in ("auto", "trained"):
        trained = model_info(registry.load("models", spec.model)).trained
        if spec.data in trained:
            return WeightsChoice("trained", Path(trained[spec.data]))
        if spec.weights == "auto":
            return WeightsChoice("init", None)
        there = f"only for {', '.join(sorted(trained))}" if trained else "none at all"
        raise RequestError(
            f"no trained checkpoint of {spec.model} on {spec.data} ships with it ({there}); "
            "give --weights init or a checkpoint's path"
        )
    file = Path(spec.weights)
    if not file.exists():
        raise RequestError(
            f"weights '{spec.weights}': no such file; expected trained, init or a checkpoint's path"
        )
    return WeightsChoice(file.name, file)


def load_subject(spec: SubjectSpec, device: torch.device) -> Subject:
    """Build the model, load its weights, draw its samples.

    Parameters
    ----------
    spec : SubjectSpec
    device : torch.device

    Raises
    ------
    nlbench.NlbenchError
        If the model, its weights or the data can't be had; one line says why.
    """
    choice = choose_weights(spec)
    dataset = load_dataset(spec.data)
    model = build_model(spec.model, dataset, spec.seed)
    metadata: dict[str, str] = {}
    if choice.file is not None:
        try:
            metadata = load_weights(model, choice.file)
        except NlbenchError as error:
            raise RequestError(f"{spec.model} with weights {choice.label}: {error}") from error
    model.to(device).eval()
    sample = dataset.sample(spec.samples, split=spec.split, seed=spec.seed)
    facts: dict[str, Any] = {
        "model": spec.model,
        "weights": choice.label,
        "data": spec.data,
        "seed": spec.seed,
        "weights_hash": state_hash(model),
        "weights_metadata": metadata,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "preprocessing": dataset.preprocessing,
        "split": spec.split,
        "samples": len(sample.inputs),
        "sample_hash": tensor_hash(sample.inputs),
        "accuracy": _accuracy(model, sample, dataset.classes, device),
    }
    return Subject(model, sample.inputs, sample.labels, facts, sample.images, dataset.normalize)


def _accuracy(model: nn.Module, sample: Sample, classes: int, device: torch.device) -> float | None:
    """Share of the sample classified right, by which a reader sees what weights these are.

    None for a model that doesn't give one finite logit a class.
    """
    right = 0
    with evaluation_mode(model):
        for inputs, labels in zip(
            torch.split(sample.inputs, 128), torch.split(sample.labels, 128), strict=True
        ):
            logits = model(inputs.to(device, copy=True))
            is_classifier = isinstance(logits, Tensor) and logits.shape == (len(labels), classes)
            if not is_classifier or not bool(torch.isfinite(logits).all()):
                return None
            right += int((logits.argmax(1).cpu() == labels).sum())
    return right / len(sample.labels)


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 over a tensor's shape, dtype and bytes."""
    data = tensor.detach().cpu().contiguous()
    head = f"{tuple(data.shape)} {data.dtype}".encode()
    return hashlib.sha256(head + data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
