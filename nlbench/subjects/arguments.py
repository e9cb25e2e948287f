"""Keyword arguments of models, set with ``--set model.NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Mapping

from nlbench.errors import RequestError, nearest, shorten
from nlbench.options import Options, OptionValue

from .model import ModelInfo

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

    Raises
    ------
    nlbench.RequestError
        If an argument is unknown, its value is invalid, or a required one is missing.

    Examples
    --------
    >>> from nlbench.options import Option
    >>> resolve_arguments("net", ModelInfo(options={"width": Option(8)}), {"width": "64"})
    {'width': 64}
    """
    missing = [n for n in info.required if n not in settings and n not in PASSED_ARGUMENTS]
    if missing:
        expected = " ".join(f"--set {MODEL_OWNER}.{each}=VALUE" for each in missing)
        raise RequestError(f"{name} needs {', '.join(missing)}; use {expected}")
    if info.options is None:
        return dict(settings)
    resolved: dict[str, OptionValue] = {}
    for argument, value in settings.items():
        if argument in info.options:
            resolved[argument] = info.options[argument].parse(value, f"{MODEL_OWNER}.{argument}")
        elif argument == OUTPUT:
            resolved[argument] = str(value)
        else:
            hint = nearest(argument, info.options)
            raise RequestError(f"{name} has no argument '{shorten(argument)}'{hint}")
    return resolved


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
