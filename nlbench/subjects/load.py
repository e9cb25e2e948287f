"""A subject: a model with its weights, the data it is looked at with, and a seed."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import NlbenchError, PluginError, RequestError, shown
from nlbench.options import OptionValue, resolve_options
from nlbench.serialization.hashing import file_hash, state_hash

from .data import Data, Dataset, dataset_info
from .facts import SubjectFacts
from .model import ModelInfo, model_info
from .weights import calibrate, load_weights, statistics_of, training_failure

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .subject import Subject

__all__ = [
    "ModelSource",
    "SubjectSpec",
    "WeightsChoice",
    "adapted",
    "build_model",
    "choose_weights",
    "header_of",
    "load_dataset",
    "load_subject",
    "model_source",
    "transformed",
]


def header_of(path: Path) -> dict[str, str]:
    """Read the metadata of a checkpoint; none where it is no readable safetensors file.

    Examples
    --------
    >>> header_of(Path("no-such-file"))
    {}
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError):
        return {}  # Whoever loads the weights says what is wrong with the file.


def transformed(
    model: nn.Module, metadata: Mapping[str, str], example: Callable[[], Any]
) -> nn.Module:
    """Apply the transform that a checkpoint's metadata names; the model itself if none.

    Parameters
    ----------
    model : torch.nn.Module
        Freshly built, on the CPU.
    metadata : mapping of str to str
        Of the checkpoint.
    example : callable
        Gives inputs of the model; called only if there is a transform.

    Raises
    ------
    nlbench.NlbenchError
        If the transform isn't registered, its options can't be read, or it doesn't fit.
    """
    name = metadata.get("transform", "")
    if not name:
        return model
    text = metadata.get("transform_options", "{}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    given = f"'{shown(text)}'"
    if not isinstance(options, dict):
        raise RequestError(f"transform_options is {given}, expected a JSON object")
    transform = registry.load("transforms", name)
    try:
        made = transform(model, example=example(), **options)
    except NlbenchError as error:
        raise RequestError(f"transform '{name}': {error}") from error
    except TypeError as error:
        raise RequestError(f"transform '{name}' with options {given}: {error}") from error
    import torch

    if not isinstance(made, torch.nn.Module):
        raise PluginError(
            f"transform '{name}' gives a {type(made).__name__}, expected torch.nn.Module"
        )
    return made


FRESH = ("init", "calibrated")
"""Weights that are drawn anew; ``calibrated``: batch norm's statistics are of the samples."""

CALIBRATION = 128
"""Samples of a batch by which those statistics are set."""


@dataclass(frozen=True)
class SubjectSpec:
    """What names a subject.

    Parameters
    ----------
    model, data : str
        Registered names.
    weights : str
        ``auto``, ``trained``, ``init``, ``calibrated`` or the path of a checkpoint.
    seed : int
        Decides the initialisation and which samples are drawn.
    samples : int or None
        How many samples; None: the whole split.
    split : {"test", "train"}
    options : tuple of (str, value)
        Of the dataset: names with values, by name.
    """

    model: str
    weights: str
    data: str
    seed: int = 0
    samples: int | None = 512
    split: str = "test"
    options: tuple[tuple[str, OptionValue | str], ...] = ()


@dataclass(frozen=True)
class WeightsChoice:
    """Which weights a request means.

    Parameters
    ----------
    label : str
        ``trained``, ``init`` or the checkpoint's file name.
    file : Path or None
        None for freshly initialised weights.
    remark : str
        Why the weights are freshly initialised though a checkpoint is known; else empty.
    """

    label: str
    file: Path | None
    remark: str = ""

    @property
    def identity(self) -> str:
        """Hash of the file, or what is drawn: what decides the weights, beside the seed."""
        return file_hash(self.file) if self.file else self.label


def load_dataset(name: str, options: Mapping[str, OptionValue | str] | None = None) -> Data:
    """Open a registered dataset.

    Parameters
    ----------
    name : str
    options : mapping of str to value, optional
        Those that aren't to have their default.

    Raises
    ------
    nlbench.NlbenchError
        If there is none of that name, an option doesn't fit, the data aren't there, or the
        plugin gives something else.
    """
    build = registry.load("datasets", name)
    dataset = build(**resolve_options(dataset_info(build).options, options or {}, owner=name))
    asked = ("name", "shape", "classes", "preprocessing", "source", "normalize", "sample")
    missing = [attribute for attribute in asked if not hasattr(dataset, attribute)]
    if missing:
        raise PluginError(
            f"dataset '{name}' gives a {type(dataset).__name__}, expected nlbench.Dataset or "
            f"its like, but it has no {missing[0]}"
        )
    opened: Data = dataset
    return opened


def build_model(name: str, dataset: Data, seed: int) -> nn.Module:
    """Build a registered model for a dataset, initialised from a seed.

    The builder is given those of ``in_channels``, ``num_classes``, ``image_size`` and
    ``input_shape`` that it takes. The global random state is left as it was.

    Raises
    ------
    nlbench.NlbenchError
        If there is no such model, or it can't be built for data of this shape.
    """
    import torch

    build = registry.load("models", name)
    try:
        taken = set(inspect.signature(build).parameters)
    except (TypeError, ValueError):
        taken = set()
    arguments = _arguments(name, dataset, taken)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = build(**arguments)
        except RequestError as error:
            raise RequestError(f"{name} for {dataset.name}: {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise PluginError(
                f"model '{name}' builds a {type(model).__name__}, expected torch.nn.Module"
            )
        _fill_lazy(model, dataset)
    return model


def _fill_lazy(model: nn.Module, dataset: Data) -> None:
    """Give parameters that wait for a first forward pass their shape and values."""
    import torch
    from torch.nn.parameter import is_lazy

    if not any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        return
    was_training = {module: module.training for module in model.modules()}
    with torch.no_grad():
        model.eval()(dataset.sample(2).inputs)
    for module in model.modules():
        module.training = was_training.get(module, module.training)


def _arguments(name: str, dataset: Data, taken: set[str]) -> dict[str, Any]:
    """What a builder is given, of what it takes; refuses data that it isn't for."""
    shape = tuple(dataset.shape)
    known: dict[str, Any] = {"num_classes": dataset.classes, "input_shape": shape}
    if len(shape) == 3:
        known |= {"in_channels": shape[0], "image_size": shape[1]}
        if "image_size" in taken and "input_shape" not in taken and shape[1] != shape[2]:
            raise RequestError(
                f"{name} takes square images, those of {dataset.name} are {shape[1]}x{shape[2]}"
            )
    elif "input_shape" not in taken and taken & {"in_channels", "image_size"}:
        raise RequestError(f"{name} takes images, the inputs of {dataset.name} have shape {shape}")
    return {key: value for key, value in known.items() if key in taken}


def choose_weights(spec: SubjectSpec) -> WeightsChoice:
    """Decide which weights a request means.

    ``auto`` is ``trained`` where a checkpoint ships for the model on the dataset, else
    ``init``.

    Raises
    ------
    nlbench.RequestError
        If ``trained`` is asked for where no checkpoint ships, or a file doesn't exist.
    """
    # Whatever its weights: a model that isn't there is said before a folder is made for it.
    info = model_info(registry.load("models", spec.model))
    if spec.weights in FRESH:
        return WeightsChoice(spec.weights, None)
    if spec.weights in ("auto", "trained"):
        trained = info.trained
        file = Path(trained[spec.data]) if spec.data in trained else None
        if file is not None and file.is_file():
            return WeightsChoice("trained", file)
        absent = (
            f"the weights of {spec.model} on {spec.data} are not here: {file} is missing"
            + (f"; {info.obtain}" if info.obtain else "")
            if file is not None
            else ""
        )
        if spec.weights == "auto":
            remark = f"{spec.model} is freshly initialised: {absent}" if absent else ""
            return WeightsChoice("init", None, remark)
        if absent:
            raise RequestError(absent)
        there = f"only for {', '.join(sorted(trained))}" if trained else "none at all"
        raise RequestError(
            f"no trained checkpoint of {spec.model} on {spec.data} ships with it ({there}); "
            "give --weights init or a checkpoint's path"
        )
    file = Path(spec.weights)
    if not os.path.exists(file):  # noqa: PTH110 (whatever the name is, this is an answer)
        failure = training_failure(file)
        if failure:
            raise RequestError(f"weights '{shown(spec.weights)}': their training failed: {failure}")
        raise RequestError(
            f"weights '{shown(spec.weights)}': no such file; expected trained, init, calibrated "
            "or a checkpoint's path"
        )
    return WeightsChoice(file.name, file)


@dataclass(frozen=True)
class ModelSource:
    """What a subject's network is made of, before it is made; see `model_source`.

    Parameters
    ----------
    spec : SubjectSpec
    info : ModelInfo
    choice : WeightsChoice
    dataset : Data
        With the preprocessing that belongs to the weights.
    """

    spec: SubjectSpec
    info: ModelInfo
    choice: WeightsChoice
    dataset: Data

    def fresh(self) -> nn.Module:
        """Build the network, initialised from the seed."""
        return build_model(self.spec.model, self.dataset, self.spec.seed)

    def build(self) -> tuple[nn.Module, dict[str, str]]:
        """Build the network with its weights, on the CPU; give it with its file's metadata.

        Raises
        ------
        nlbench.NlbenchError
            If it can't be built, or the weights don't fit.
        """
        model, file = self.fresh(), self.choice.file
        if file is None:
            return model, {}
        try:
            model = transformed(model, header_of(file), lambda: self.example(2))
            return model, load_weights(model, file, rename=self.info.rename)
        except NlbenchError as error:
            what = f"{self.spec.model} with weights {self.choice.label}"
            raise RequestError(f"{what}: {error}") from error

    def example(self, count: int) -> Tensor:
        """Give a few of the inputs."""
        return self.dataset.sample(count, split=self.spec.split, seed=self.spec.seed).inputs


def model_source(spec: SubjectSpec) -> ModelSource:
    """Choose the weights, and open the dataset as they want it.

    Raises
    ------
    nlbench.NlbenchError
        If the model, its weights or the data can't be had; one line says why.
    """
    choice = choose_weights(spec)
    info = model_info(registry.load("models", spec.model))
    dataset = adapted(load_dataset(spec.data, dict(spec.options)), info, choice)
    return ModelSource(spec, info, choice, dataset)


def load_subject(spec: SubjectSpec, device: torch.device) -> Subject:
    """Build the model, load its weights, draw its samples.

    The model isn't run, but where batch norm's statistics are ``calibrated`` on the samples.

    Parameters
    ----------
    spec : SubjectSpec
    device : torch.device

    Raises
    ------
    nlbench.NlbenchError
        If the model, its weights or the data can't be had; one line says why.
    """
    from .inputs import tensor_of_output
    from .samples import draw, sample_facts
    from .subject import Subject

    source = model_source(spec)
    dataset = source.dataset
    model, metadata = source.build()
    model.register_forward_hook(tensor_of_output)
    model.to(device).eval()
    sample, stream = draw(dataset, spec.samples, split=spec.split, seed=spec.seed, model=model)
    facts = SubjectFacts(
        model=spec.model,
        weights=source.choice.label,
        data=spec.data,
        data_options=dict(spec.options),
        seed=spec.seed,
        weights_metadata=metadata,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        preprocessing=dataset.preprocessing,
        split=spec.split,
        **sample_facts(sample.inputs, stream),
    )
    images = sample.images if len(dataset.shape) == 3 else None
    subject = Subject(
        model,
        sample.inputs,
        sample.labels,
        facts,
        images,
        dataset.normalize,
        stream=stream,
    )
    batch_norm = None
    if source.choice.label in FRESH and statistics_of(model):
        batch_norm = "statistics as drawn: mean 0, variance 1"
        if source.choice.label == "calibrated":
            calibrate(model, (batch.to(device) for batch in subject.batches(CALIBRATION)))
            batch_norm = (
                f"statistics calibrated on the {facts.samples} samples, in batches of up to "
                f"{CALIBRATION}"
            )
    facts = replace(facts, batch_norm=batch_norm, weights_hash=state_hash(model))
    return replace(subject, facts=facts)


def adapted(dataset: Data, info: ModelInfo, choice: WeightsChoice) -> Data:
    """Give the dataset with the preprocessing that belongs to a model's weights.

    Parameters
    ----------
    dataset : Data
        Stays as it is where its resolution is fixed.
    info : ModelInfo
    choice : WeightsChoice

    Raises
    ------
    nlbench.RequestError
        If the dataset's ``check_weights``, where it has one, finds that the weights were
        trained on inputs that mean something else.
    """
    check = getattr(dataset, "check_weights", None)
    if check is not None and choice.file is not None:
        check(header_of(choice.file))
    if info.preprocessing is None or not isinstance(dataset, Dataset) or dataset.adapt is None:
        return dataset
    return dataset.adapt(info.preprocessing(choice.file))
