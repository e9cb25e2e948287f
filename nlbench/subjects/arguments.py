"""Keyword arguments of models, set with ``--set model.NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Mapping

from nlbench.errors import RequestError, nearest, shorten
from nlbench.options import Options, OptionValue

from .model import ModelInfo

MODEL_OWNER = "model"
"""Name before the dot in settings of every model of a run that takes arguments."""

PASSED_ARGUMENTS = ("in_channels", "num_classes", "image_size", "resolution", "input_shape")
"""Arguments that a model gets from its dataset."""


def resolve_arguments(
    name: str, info: ModelInfo, settings: Mapping[str, OptionValue | str]
) -> Options:
    """Validate and convert the arguments that are set; others keep the function's defaults.

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
    for argument in settings:
        if argument not in info.options:
            hint = nearest(argument, info.options)
            raise RequestError(f"{name} has no argument '{shorten(argument)}'{hint}")
    return {n: info.options[n].parse(v, f"{MODEL_OWNER}.{n}") for n, v in settings.items()}
