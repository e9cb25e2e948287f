"""What every measure has to keep: its declaration, when it is loaded, and its results.

A measure is a class derived from `nlbench.Measure`, what `nlbench.site_measure` makes, or a
``torchmetrics.Metric`` that takes two tensors. Nothing here imports PyTorch or torchmetrics.
"""

from __future__ import annotations

import dis
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from nlbench.citation import Source
from nlbench.errors import NotFinite, PluginError, error_text, nearest, one_line
from nlbench.measure import (
    INVARIANCES,
    FunctionMeasure,
    Measure,
    MoreMeans,
    Result,
    Status,
    Value,
    metric_measure,
)
from nlbench.options import Option

__all__ = ["as_measure", "sound_result"]

# How far rounding may take a result beyond its bounds, relative to them or to 1.
ROUNDING = 1e-9


def as_measure(given: object, name: str | None = None) -> type[Measure]:
    """Give the measure that something registered, or passed to `nlbench.evaluate`, is.

    Parameters
    ----------
    given : object
        A class derived from `Measure`; or a torchmetrics metric, its class, or a function
        without parameters that makes one.
    name : str, optional
        What it is registered as; by default it goes by its own name.

    Raises
    ------
    nlbench.PluginError
        If it is none, or declares something that can't be: in one line, with what to do.

    Examples
    --------
    >>> def cosine(x, y): ...
    >>> as_measure(cosine, "cosine")
    Traceback (most recent call last):
    nlbench.errors.PluginError: measure 'cosine' is a plain function; put @nlbench.site_measure...
    """
    measure = _measure_of(given, name)
    label = f"measure '{name or measure.name}'"
    if name is not None and measure.name != name:
        raise PluginError(
            f"{label} calls itself '{measure.name}'; an entry point and its measure must bear the "
            "same name"
        )
    for problem in (_missing(measure), _undeclared(measure), _ill_formed(measure)):
        if problem:
            raise PluginError(f"{label}{problem}")
    return measure


def _measure_of(given: object, name: str | None) -> type[Measure]:
    label = f"measure '{name or _name_of(given)}'"
    if isinstance(given, type) and issubclass(given, Measure):
        return given
    if isinstance(given, Measure):
        kind = type(given).__name__
        raise PluginError(f"{label} is an instance of {kind}; give the class, {kind}, itself")
    if _is_metric(given):
        return _of_metric(given, name, label)
    if inspect.isfunction(given):
        if _required(given):
            raise PluginError(
                f"{label} is a plain function; put @nlbench.site_measure(...) above it"
            )
        made = _called(given, label)
        if _is_metric(made):
            return _of_metric(made, name, label)
        raise PluginError(
            f"{label} is a function without parameters that gives {_text(made)}, "
            "expected a torchmetrics.Metric"
        )
    raise PluginError(
        f"{label} is {_text(given)}; expected a class derived from nlbench.Measure, a function "
        "decorated with @nlbench.site_measure(...), or a torchmetrics.Metric"
    )


def _name_of(given: object) -> str:
    return str(getattr(given, "name", "") or getattr(given, "__name__", "") or _text(given))


def _text(given: object) -> str:
    return one_line(repr(given), 60)


def _is_metric(given: object) -> bool:
    """Whether it is a torchmetrics metric or a class of them; whoever has one has imported it."""
    torchmetrics = sys.modules.get("torchmetrics")
    metric: Any = getattr(torchmetrics, "Metric", ())
    return isinstance(given, metric) or (isinstance(given, type) and issubclass(given, metric))


def _of_metric(given: Any, name: str | None, label: str) -> type[Measure]:
    return metric_measure(_called(given, label) if isinstance(given, type) else given, name)


def _called(make: Callable[[], Any], label: str) -> Any:
    try:
        return make()
    except Exception as error:
        raise PluginError(
            f"{label} can't be made without arguments ({error_text(error)}); register a function "
            "that makes it"
        ) from error


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that have to be given by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in positional and parameter.default is parameter.empty
    ]


_EXAMPLES = {
    "reset": "def reset(self): ...",
    "update": "def update(self, observation): ...",
    "compute": "def compute(self): return nlbench.Result.of({place: number})",
    "accumulator": "def accumulator(self): return an nlbench.Accumulator",
}


def _missing(measure: type[Measure]) -> str:
    """Say which methods are missing, or could not be called."""
    missing = sorted(getattr(measure, "__abstractmethods__", ()))
    if missing:
        names = " and ".join(f"{name}()" for name in missing)
        return f" has no {names}; add `{_EXAMPLES.get(missing[0], f'def {missing[0]}(self): ...')}`"
    for method, arguments in (("reset", ()), ("update", ("observation",)), ("compute", ())):
        function = getattr(measure, method)
        if not callable(function):
            return f" has no {method}(); add `{_EXAMPLES[method]}`"
        try:
            inspect.signature(function).bind("self", *arguments)
        except TypeError:
            expected = ", ".join(("self", *arguments))
            found = ", ".join(inspect.signature(function).parameters)
            return f": {method}({found}) can't be called; write `def {method}({expected})`"
    if _returns_nothing(measure.compute):
        return f": compute() returns nothing; write `{_EXAMPLES['compute'].partition(': ')[2]}`"
    return _unfit_function(measure) if issubclass(measure, FunctionMeasure) else ""


def _unfit_function(measure: type[FunctionMeasure]) -> str:
    """Say why a decorated function can't be called with x, y and its options."""
    function = measure.function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin tells nothing of its parameters
        return ""
    options = dict.fromkeys(measure.options)
    try:
        signature.bind("x", "y", **options)
    except TypeError:
        expected = ", ".join(("x", "y", *options))
        return (
            f": {measure.name}({', '.join(signature.parameters)}) can't be called with "
            f"({expected}); write `def {measure.name}({expected})`, with the options declared"
        )
    return ": the function returns nothing; end it with `return`" * _returns_nothing(function)


def _returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether a Python function that is no generator ends in no ``return`` with a value."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname != "NOP"]
    returned = [
        # Newer versions of Python have one instruction for what takes older ones two.
        (step if step.opname == "RETURN_CONST" else before)
        for before, step in zip([None, *steps], steps, strict=False)
        if step.opname.startswith("RETURN_") and step.opname != "RETURN_GENERATOR"
    ]
    return bool(returned) and all(
        step is not None and step.opname in ("LOAD_CONST", "RETURN_CONST") and step.argval is None
        for step in returned
    )


def _undeclared(measure: type[Measure]) -> str:
    if not isinstance(getattr(measure, "probe", None), str):
        return ' names no probe; add `probe = "sites"`, or another that `nlbench list probes` has'
    return ""


def _ill_formed(measure: type[Measure]) -> str:
    """Say which attribute is not what it has to be."""
    for attribute, (is_right, expected) in _DECLARED.items():
        given = getattr(measure, attribute)
        if not is_right(given):
            return f": {attribute} is {_text(given)}, expected {expected}"
    return ""


def _are_bounds(given: object) -> bool:
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    low, high = given
    return all(isinstance(n, int | float) for n in given) and bool(low <= high)


def _are_options(given: object) -> bool:
    return isinstance(given, Mapping) and all(isinstance(o, Option) for o in given.values())


def _are_functions(given: object) -> bool:
    return isinstance(given, Mapping) and all(callable(function) for function in given.values())


_DECLARED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bounds": (_are_bounds, "two numbers, the smaller first: `bounds = (0.0, 1.0)`"),
    "more_means": (
        lambda given: given in get_args(MoreMeans),
        "one of " + ", ".join(f"'{word}'" for word in get_args(MoreMeans)),
    ),
    "version": (lambda given: isinstance(given, str), 'a text: `version = "1"`'),
    "options": (_are_options, "a mapping of names to nlbench.Option"),
    "source": (lambda given: isinstance(given, Source), "an nlbench.Source or a text"),
    "invariant_to": (
        lambda given: isinstance(given, tuple) and set(given) <= set(INVARIANCES),
        "a tuple of some of " + ", ".join(f"'{word}'" for word in INVARIANCES),
    ),
    "unreduced": (_are_functions, "a mapping of names to functions of a tensor"),
    "independent_sites": (lambda given: isinstance(given, bool), "True or False"),
}


def sound_result(given: object, bounds: tuple[float, float]) -> Result:
    """Give back what a measure's ``compute`` gave, if it is a result that can be recorded.

    Parameters
    ----------
    given : object
    bounds : tuple of float
        Smallest and largest possible value, by the measure's own declaration.

    Raises
    ------
    nlbench.PluginError, nlbench.NotFinite, TypeError, ValueError
        If it isn't; beyond the bounds too.

    Examples
    --------
    >>> sound_result(Result.of({"relu": 7.0}), (-1.0, 1.0))
    Traceback (most recent call last):
    nlbench.errors.PluginError: relu: 7 is beyond the bounds -1 to 1 that the measure declares
    """
    if not isinstance(given, Result):
        raise PluginError(
            f"compute() gave a {type(given).__name__}, expected an nlbench.Result; return "
            "nlbench.Result.of({place: number})"
        )
    if not all(map(math.isfinite, given.numbers.values())):
        raise NotFinite("the summary is not finite")
    whole = Value("", given.summary, status=given.status, reason=given.reason)
    for value in (*given.values, whole):
        if value.status not in get_args(Status):
            raise PluginError(
                f"unknown status '{value.status}'{nearest(str(value.status), get_args(Status))}"
            )
        if value.status != "ok" and not value.reason:
            raise PluginError(f"status '{value.status}' without a reason")
        _check_bounds(value, bounds)
    if given.status == "ok" and "value" not in given.summary:
        raise PluginError("the summary has no 'value'")
    places = [value.place for value in given.values]
    if "" in places or len(set(places)) < len(places):
        raise PluginError("places must have names, each its own")
    json.dumps(asdict(given), allow_nan=False)
    return given


def _check_bounds(value: Value, bounds: tuple[float, float]) -> None:
    number = value.statistics.get("value")
    if number is None:
        return
    low, high = bounds
    if low - _rounding(low) <= number <= high + _rounding(high):
        return
    where = f"{value.place}: " if value.place else "the summary: "
    raise PluginError(
        f"{where}{number:.7g} is beyond the bounds {low:g} to {high:g} that the measure declares"
    )


def _rounding(bound: float) -> float:
    return 0.0 if math.isinf(bound) else ROUNDING * max(1.0, abs(bound))
