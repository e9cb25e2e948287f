"""Model declarations, and the decorator for functions that build models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import NlbenchError, RequestError, nearest, shorten
from nlbench.options import Option, Options, OptionValue

from .data import BuildFunction, Preprocessing
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    Reader = Callable[[Path], tuple[Mapping[str, Tensor], dict[str, str]]]


ANY_DATA = "*"
"""Key for a checkpoint that doesn't depend on the dataset."""


@dataclass(frozen=True)
class ModelInfo:
    """The declaration of a model."""

    # Checkpoint paths, keyed by dataset name or `ANY_DATA`.
    trained: Mapping[str, Path] = field(default_factory=dict)
    source: Source = field(default_factory=lambda: Source(""))  # source of the architecture
    obtain: str = ""  # instructions for obtaining checkpoints that don't ship with nlbench
    # Maps a checkpoint's path, or None for fresh weights, to the `Preprocessing` to use with
    # datasets whose resolution isn't fixed.
    preprocessing: Callable[[Path | None], Preprocessing] | None = None
    # Maps a tensor's name in a checkpoint to its name in the model, or to None to skip the tensor.
    rename: Callable[[str], str | None] | None = None
    recipe: str = "vanilla"  # default training recipe
    data: str = ""  # default dataset; empty for digits
    # Reads a checkpoint in `trained` and returns a state dict and metadata; required for formats
    # that `nlbench.subjects.weights.read_checkpoint` doesn't support.
    read: Reader | None = None
    # Returns the tokenizer for text datasets; by default, text is read as bytes.
    tokenizer: Callable[[], Tokenizer] | None = None
    # Returns a string that changes whenever the files defining the architecture or tokenizer do, if
    # they are not part of an installed package.
    fingerprint: Callable[[], str] | None = None
    # The function's keyword arguments that --set model.NAME=VALUE sets; None: any.
    options: Mapping[str, Option] | None = field(default_factory=dict)
    required: tuple[str, ...] = ()  # keyword arguments without a default

    def checkpoint(self, data: str) -> Path | None:
        """Return the checkpoint for a dataset, or None if there is none."""
        return self.trained.get(data, self.trained.get(ANY_DATA))


def model(
    *, trained: Mapping[str, Path] | None = None, source: Source | str = "", **declared: Any
) -> Callable[[BuildFunction], BuildFunction]:
    """Declare a model by decorating the function that builds it.

    The function returns a `torch.nn.Module` and takes any of ``in_channels``, ``num_classes``,
    ``image_size`` (side of a square image) and ``input_shape`` (without the batch axis) as keyword
    arguments with defaults. If it takes ``in_channels`` or ``image_size`` but not ``input_shape``,
    the model accepts only images. The decorator is optional.

    Parameters
    ----------
    trained, source, **declared
        See `ModelInfo`.

    Examples
    --------
    >>> @model(source="Here, 2026")
    ... def tiny(in_channels=3, num_classes=10):
    ...     import torch
    ...     return torch.nn.Conv2d(in_channels, num_classes, 1)
    >>> model_info(tiny).source.citation
    'Here, 2026'
    """
    origin = Source(source) if isinstance(source, str) else source
    info = ModelInfo(dict(trained or {}), origin, **declared)

    def decorate(build: BuildFunction) -> BuildFunction:
        build.__nlbench_model__ = info  # type: ignore[attr-defined]
        return build

    return decorate


def default_data(name: str) -> str:
    """Return the default dataset of a registered model, even if the model can't be loaded.

    Examples
    --------
    >>> default_data("vgg8")
    'digits'
    """
    return declared_info(name).data or "digits"


def declared_info(name: str) -> ModelInfo:
    """Return the declaration of a registered model, or the default one if it can't be loaded."""
    try:
        return model_info(registry.load("models", name))
    except NlbenchError:
        return ModelInfo()  # The error is reported when the weights are chosen.


def model_info(build: Callable[..., Any]) -> ModelInfo:
    """Return a model's declaration. An undecorated function has the default one."""
    return getattr(build, "__nlbench_model__", ModelInfo())


MODEL_OWNER = "model"
"""Name before the dot in settings of every model of a run that takes arguments."""

OUTPUT = "output"
"""Setting of every model that selects a tensor of its output, unless it is the model's argument."""

PASSED_ARGUMENTS = ("in_channels", "num_classes", "image_size", "resolution", "input_shape")
"""Arguments that a model gets from its dataset."""


def resolve_arguments(
    name: str, info: ModelInfo, settings: Mapping[str, OptionValue | str]
) -> Options:
    """Validate and convert the arguments that are set. Others keep the function's defaults.

    Examples
    --------
    >>> from nlbench.options import Option
    >>> resolve_arguments("net", ModelInfo(options={"width": Option(8)}), {"width": "64"})
    {'width': 64}
    """
    required = [name for name in info.required if name not in PASSED_ARGUMENTS]
    options = info.options
    own = [n for n in settings if n != OUTPUT or (options is not None and n in options)]
    check_arguments(name, own, options, required, MODEL_OWNER)
    if options is None:
        return dict(settings)
    return {
        argument: options[argument].parse(value, f"{MODEL_OWNER}.{argument}")
        if argument in options
        else str(value)
        for argument, value in settings.items()
    }


def check_arguments(
    name: str,
    passed: Collection[str],
    known: Iterable[str] | None,
    required: Iterable[str],
    owner: str,
) -> None:
    """Raise if a required argument is missing or one is not known. None: any is known."""
    missing = [argument for argument in required if argument not in passed]
    if missing:
        expected = " ".join(f"--set {owner}.{argument}=VALUE" for argument in missing)
        raise RequestError(f"{name} needs {', '.join(missing)}; use {expected}")
    for argument in passed if known is not None else ():
        if known is not None and argument not in known:
            hint = nearest(argument, known)
            raise RequestError(f"{name} has no argument '{shorten(argument)}'{hint}")


def split_output(
    arguments: Mapping[str, OptionValue | str], info: ModelInfo
) -> tuple[dict[str, OptionValue | str], str]:
    """Split resolved arguments into those of the model, and the choice of its output or ``""``.

    Examples
    --------
    >>> split_output({"width": 64, "output": "out"}, ModelInfo())
    ({'width': 64}, 'out')
    """
    passed = dict(arguments)
    is_own = info.options is not None and OUTPUT in info.options
    return passed, "" if is_own else str(passed.pop(OUTPUT, ""))
