"""Load subjects: open the dataset, build the model, load its weights and draw its samples."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import NlbenchError, PluginError, RequestError, one_line, shorten, system_text
from nlbench.introspection.opened_files import opened_files
from nlbench.options import OptionValue, resolve_options
from nlbench.serialization.hashing import state_hash
from nlbench.serialization.versions import describe_files

from .data import Data, Dataset, dataset_info
from .facts import SubjectFacts
from .model import ModelInfo, model_info, split_output
from .own import OwnCode, OwnModel, output_function
from .spec import SubjectSpec
from .weights import load_weights, read_metadata
from .weights_choice import WeightsChoice, choose_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .subject import Subject


def build_model(
    name: str, dataset: Data, seed: int, settings: Mapping[str, OptionValue | str] | None = None
) -> nn.Module:
    """Build a registered model for a dataset, initialised from a seed.

    The builder is called with `settings` and those of the arguments ``in_channels``,
    ``num_classes``, ``image_size``, ``resolution`` and ``input_shape`` that it accepts. The global
    random state is restored.
    """
    import torch

    from nlbench.introspection.random_state import seeded
    from nlbench.introspection.wrappers import remove_wrappers

    build = registry.load("models", name)
    if isinstance(build, OwnModel):
        build = build.builder(seed)
    accepted = set()
    with contextlib.suppress(TypeError, ValueError):
        accepted = set(inspect.signature(build).parameters)
    settings = settings or {}
    arguments = {**_arguments(name, dataset, accepted - settings.keys()), **settings}
    with seeded(seed):
        try:
            model = build(**arguments)
        except RequestError as error:
            raise RequestError(f"{name} for {dataset.name}: {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise PluginError(
                f"model '{name}' returns a {type(model).__name__}, expected torch.nn.Module"
            )
        model = remove_wrappers(model)
        _initialize_lazy(model, dataset)
    return model


def _initialize_lazy(model: nn.Module, dataset: Data) -> None:
    """Initialise lazy parameters with a forward pass."""
    import torch
    from torch.nn.parameter import is_lazy

    from .samples import in_model_precision

    if not any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        return
    was_training = {module: module.training for module in model.modules()}
    with torch.no_grad():
        model.eval()(in_model_precision(model, dataset.sample(2).inputs))
    for module in model.modules():
        module.training = was_training.get(module, module.training)


def _arguments(name: str, dataset: Data, accepted: set[str]) -> dict[str, Any]:
    """Return the builder's arguments. Raise if the model is incompatible with the data."""
    shape = tuple(dataset.shape)
    arguments: dict[str, Any] = {"input_shape": shape, "num_classes": dataset.classes or None}
    if len(shape) == 3:
        side = shape[1] if shape[1] == shape[2] else shape[1:]
        arguments |= {"in_channels": shape[0], "image_size": shape[1], "resolution": side}
        if "image_size" in accepted and "input_shape" not in accepted and shape[1] != shape[2]:
            raise RequestError(
                f"{name} takes square images, but those in {dataset.name} are {shape[1]}x{shape[2]}"
            )
    elif "input_shape" not in accepted and accepted & {"in_channels", "image_size"}:
        raise RequestError(f"{name} takes images, but inputs in {dataset.name} have shape {shape}")
    return {key: v for key, v in arguments.items() if key in accepted and v is not None}


CALIBRATION_BATCH = 128
"""Batch size for calibrating batch-norm statistics."""


def load_dataset(name: str, options: Mapping[str, OptionValue | str] | None = None) -> Data:
    """Open a registered dataset. Options that are not passed take their defaults."""
    build = registry.load("datasets", name)
    dataset = build(**resolve_options(dataset_info(build).options, options or {}, owner=name))
    required = ("name", "shape", "classes", "preprocessing", "source", "normalize", "sample")
    missing = [attribute for attribute in required if not hasattr(dataset, attribute)]
    if missing:
        raise PluginError(
            f"dataset '{name}' returns a {type(dataset).__name__} without {missing[0]}, expected "
            "nlbench.Dataset or an object with the same attributes"
        )
    return dataset


def apply_transform(
    model: nn.Module, metadata: Mapping[str, str], example: Callable[[], Any]
) -> nn.Module:
    """Apply the transform specified in a checkpoint's metadata, if any, to a fresh model.

    `example` returns example inputs. It is called only if there is a transform.
    """
    name = metadata.get("transform", "")
    if not name:
        return model
    text = metadata.get("transform_options", "{}")
    quoted = f"'{shorten(text)}'"
    options = None
    with contextlib.suppress(ValueError, RecursionError):
        options = json.loads(text)
    if not isinstance(options, dict):
        raise RequestError(f"transform_options is {quoted}, expected a JSON object")
    transform = registry.load("transforms", name)
    try:
        transformed = transform(model, example=example(), **options)
    except (NlbenchError, TypeError) as error:
        given = f" with options {quoted}" if isinstance(error, TypeError) else ""
        raise RequestError(f"transform '{name}'{given}: {error}") from error
    import torch

    if not isinstance(transformed, torch.nn.Module):
        raise PluginError(
            f"transform '{name}' returns a {type(transformed).__name__}, expected torch.nn.Module"
        )
    return transformed


@dataclass(frozen=True)
class ModelSource:
    """Everything needed to build a subject's network.

    The dataset uses the preprocessing that the weights require. See `model_source`.
    """

    spec: SubjectSpec
    info: ModelInfo
    weights: WeightsChoice
    dataset: Data

    def fresh(self) -> nn.Module:
        """Build the network, initialised using the seed."""
        spec = self.spec
        arguments, _ = split_output(dict(spec.arguments), self.info)
        return build_model(spec.model, self.dataset, spec.seed, arguments)

    def build(self) -> tuple[nn.Module, dict[str, str]]:
        """Build the network with its weights on the CPU. Return it and the weights' metadata."""
        model = self.fresh()
        file = self.weights.file
        if file is None:
            return model, {}
        try:
            model = apply_transform(model, read_metadata(file), lambda: self.example(2))
            read = self.info.read if self.weights.label == "trained" else None
            return model, load_weights(
                model, file, rename=self.info.rename, read=read, key=self.weights.key
            )
        except NlbenchError as error:
            what = f"{self.spec.model} with weights {self.weights.label}"
            raise RequestError(f"{what}: {error}") from error

    def example(self, count: int) -> Tensor:
        """Draw `count` inputs from the dataset."""
        return self.dataset.sample(count, split=self.spec.split, seed=self.spec.seed).inputs


def model_source(spec: SubjectSpec) -> ModelSource:
    """Choose the weights, and open the dataset with the preprocessing that they require."""
    choice = choose_weights(spec)
    info = model_info(registry.load("models", spec.model))
    dataset = _adapt_dataset(load_dataset(spec.data, dict(spec.options)), info, choice)
    return ModelSource(spec, info, choice, dataset)


def bind_arguments(dataset: Data, model: nn.Module) -> Data:
    """Return the dataset with all arguments that a model takes, and make the model unpack them."""
    if not isinstance(dataset, Dataset) or dataset.for_model is None:
        return dataset
    from .inputs import unpack_arguments

    bound = dataset.for_model(model)
    if bound.arguments is not None and not bound.arguments.is_one_tensor:
        unpack_arguments(model, bound.arguments)
    return bound


def load_subject(spec: SubjectSpec, device: torch.device) -> Subject:
    """Build the model, load its weights and draw its samples.

    The model is run only to calibrate batch-norm statistics. The files that the user's own code
    reads are recorded.
    """
    with opened_files() as opened:
        subject = _load_subject(spec, device)
    entries = registry.load("models", spec.model), registry.load("datasets", spec.data)
    sources = [entry.file for entry in entries if isinstance(entry, OwnCode)]
    folders = list(itertools.chain.from_iterable(source.roots for source in sources))
    known = {str(file) for source in sources for file in source.own_files()}
    named = set(itertools.chain.from_iterable(source.named_files() for source in sources))
    files = describe_files(opened.inputs(folders, named) - known) if sources else {}
    return replace(subject, facts=replace(subject.facts, files=files or None))


def _load_subject(spec: SubjectSpec, device: torch.device) -> Subject:
    import torch

    from nlbench.introspection.model_state import batch_norm_layers

    from .inputs import OutputChoice
    from .samples import draw, in_model_precision, sample_facts
    from .subject import Subject

    source = model_source(spec)
    dataset = source.dataset
    label = source.weights.label
    model, metadata = source.build()
    _, output = split_output(dict(spec.arguments), source.info)
    dataset = bind_arguments(dataset, model)
    choice = OutputChoice(output_function(output) or output if output else "")
    if not isinstance(model, torch.jit.ScriptModule):
        model.register_forward_hook(choice)
    elif output:
        raise RequestError("model.output: a scripted model takes no hooks; use its Python module")
    model.to(device).eval()
    sample, stream = draw(dataset, spec.samples, split=spec.split, seed=spec.seed, model=model)
    images = sample.images if len(dataset.shape) == 3 and sample.images.ndim == 4 else None
    facts = SubjectFacts(
        model=spec.model,
        weights=label,
        data=spec.data,
        data_options=dict(spec.options),
        seed=spec.seed,
        arguments=dict(spec.arguments) or None,
        weights_metadata=metadata,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        preprocessing=_preprocessing_text(dataset, spec.split),
        split=spec.split,
        **sample_facts(sample.inputs, stream),
    )
    inputs = in_model_precision(model, sample.inputs)
    subject = Subject(model, inputs, sample.labels, facts, images, dataset.normalize, stream=stream)
    batch_norm = None
    layers = batch_norm_layers(model)
    if label == "calibrated" and layers:
        calibrate(model, (batch.to(device) for batch in subject.batches(CALIBRATION_BATCH)))
        batch_norm = (
            f"statistics calibrated on the {facts.samples} samples, in batches of up to "
            f"{CALIBRATION_BATCH}"
        )
    elif label == "init" and layers:
        # A builder of the user may load weights itself.
        is_fresh = all(map(_has_initial_statistics, layers))
        batch_norm = f"statistics as {'drawn: mean 0, variance 1' if is_fresh else 'built'}"
    facts = replace(facts, batch_norm=batch_norm, weights_hash=state_hash(model))
    return replace(subject, facts=facts)


def calibrate(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Compute batch-norm statistics from samples, averaged over batches.

    The model must be in evaluation mode. Only its batch-norm layers are switched to training mode
    during the forward passes; dropout, for example, stays off. Other batches than those the layers
    accept are an error.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.BatchNorm1d(2).eval()
    >>> calibrate(layer, [torch.tensor([[0.0, 1.0], [2.0, 1.0]])])
    >>> layer.running_mean.tolist(), layer.running_var.tolist()
    ([1.0, 1.0], [2.0, 0.0])
    """
    import torch

    from nlbench.introspection.model_state import batch_norm_layers

    layers: list[Any] = batch_norm_layers(model)
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # None selects the mean over all batches.
            layer.train()
        with torch.no_grad():
            for batch in batches:
                model(batch.clone())
    except (RuntimeError, ValueError, TypeError) as error:
        reason = one_line(system_text(error), 200)
        raise RequestError(f"batch norm can't be calibrated on the samples: {reason}") from error
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.eval()


def _has_initial_statistics(layer: nn.Module) -> bool:
    mean: Any = layer.running_mean
    variance: Any = layer.running_var
    return not bool(mean.any()) and bool((variance == 1).all())


def _preprocessing_text(dataset: Data, split: str) -> str:
    """Return the description of the preprocessing, with the files that are left out, if any."""
    items = dataset.split(split) if isinstance(dataset, Dataset) else None
    left_out = getattr(items, "left_out", None)
    note = left_out() if left_out is not None else ""
    return f"{dataset.preprocessing}; {note}" if note else dataset.preprocessing


def _adapt_dataset(dataset: Data, info: ModelInfo, choice: WeightsChoice) -> Data:
    """Return the dataset with the model's tokenizer or the preprocessing of its weights.

    A dataset with a method ``check_weights`` may reject weights that were trained on inputs with a
    different meaning.
    """
    tokenized = getattr(dataset, "tokenized", None)
    if tokenized is not None:
        return tokenized(info.tokenizer()) if info.tokenizer is not None else dataset
    check = getattr(dataset, "check_weights", None)
    if check is not None and choice.file is not None:
        check(read_metadata(choice.file))
    if info.preprocessing is None or not isinstance(dataset, Dataset) or dataset.adapt is None:
        return dataset
    return dataset.adapt(info.preprocessing(choice.file))
