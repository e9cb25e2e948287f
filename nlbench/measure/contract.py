"""Loading and validation of measures, and validation of their results.

A measure is a class derived from `nlbench.Measure`, a function decorated with
`nlbench.site_measure`, or a ``torchmetrics.Metric`` of two tensors. Nothing here imports PyTorch
or torchmetrics.
"""

from __future__ import annotations

import dis
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import NotFinite, PluginError, RequestError, error_text, nearest, one_line
from nlbench.options import Option

from .base import INVARIANCES, Measure, MoreMeans
from .pooled import FunctionMeasure
from .result import Result, Status, Value
from .torchmetrics_adapter import metric_measure


def load_measures(names: Iterable[str], warn: Callable[[str], None]) -> list[type[Measure]]:
    """Load registered measures. Skip those matched by a glob that can't be loaded."""
    patterns = list(names)
    loaded: list[type[Measure]] = []
    for name in registry.expand("measures", patterns):
        try:
            loaded.append(load_measure(name))
        except PluginError as error:
            if name in patterns:
                raise
            warn(f"{error}; skipped")
    if not loaded:
        raise RequestError(f"no measure to run{nearest('', registry.entries('measures'))}")
    return loaded


def load_measure(name: str) -> type[Measure]:
    """Load a registered measure."""
    return checked_measure(registry.load("measures", name), name)


def checked_measure(measure: object, name: str | None = None) -> type[Measure]:
    """Convert an object to a measure whose probe is registered. See `as_measure`."""
    checked = as_measure(measure, name)
    probes = registry.entries("probes")
    if checked.name in probes:
        raise PluginError(f"measure '{checked.name}' has the name of a probe; choose another")
    if checked.probe not in probes:
        raise PluginError(
            f"measure '{checked.name}' requires the probe '{checked.probe}'"
            f"{nearest(checked.probe, probes)}"
        )
    return checked


def as_measure(candidate: object, name: str | None = None) -> type[Measure]:
    """Convert a registered or passed object to a measure, and validate its declaration.

    The object is a class derived from `Measure`, or a torchmetrics metric, its class, or a function
    without parameters that returns one. Its name is by default the object's.

    Examples
    --------
    >>> def cosine(x, y): ...
    >>> as_measure(cosine, "cosine")
    Traceback (most recent call last):
    nlbench.errors.PluginError: measure 'cosine' is a plain function; put @nlbench.site_measure...
    """
    measure = _adapt_measure(candidate, name)
    label = f"measure '{name or measure.name}'"
    if name is not None and measure.name != name:
        raise PluginError(
            f"{label} has the name '{measure.name}'; an entry point and its measure must have the "
            "same name"
        )
    for problem in (_method_problem(measure), _attribute_problem(measure)):
        if problem:
            raise PluginError(f"{label}{problem}")
    return measure


def _adapt_measure(candidate: object, name: str | None) -> type[Measure]:
    own_name = getattr(candidate, "name", "") or getattr(candidate, "__name__", "")
    label = f"measure '{name or own_name or _text(candidate)}'"
    if isinstance(candidate, type) and issubclass(candidate, Measure):
        return candidate
    if isinstance(candidate, Measure):
        kind = type(candidate).__name__
        raise PluginError(f"{label} is an instance of {kind}; pass the class {kind}")
    if _is_metric(candidate):
        return _adapt_metric(candidate, name, label)
    if inspect.isfunction(candidate):
        try:
            inspect.signature(candidate).bind()
        except TypeError:
            raise PluginError(
                f"{label} is a plain function; put @nlbench.site_measure(...) above it"
            ) from None
        returned = _call(candidate, label)
        if _is_metric(returned):
            return _adapt_metric(returned, name, label)
        raise PluginError(
            f"{label} is a function without parameters that returns {_text(returned)}, "
            "expected a torchmetrics.Metric"
        )
    raise PluginError(
        f"{label} is {_text(candidate)}; expected a class derived from nlbench.Measure, a function "
        "decorated with @nlbench.site_measure(...), or a torchmetrics.Metric"
    )


def _text(value: object) -> str:
    return one_line(repr(value), 60)


def _is_metric(value: object) -> bool:
    """Return True for a torchmetrics metric or a metric class."""
    # If torchmetrics has not been imported, there can be no metric.
    torchmetrics = sys.modules.get("torchmetrics")
    metric: Any = getattr(torchmetrics, "Metric", ())
    return isinstance(value, metric) or (isinstance(value, type) and issubclass(value, metric))


def _adapt_metric(metric: Any, name: str | None, label: str) -> type[Measure]:
    return metric_measure(_call(metric, label) if isinstance(metric, type) else metric, name)


def _call(make: Callable[[], Any], label: str) -> Any:
    try:
        return make()
    except Exception as error:
        raise PluginError(
            f"{label} can't be created without arguments ({error_text(error)}); register a "
            "function that creates it"
        ) from error


_EXAMPLES = {
    "reset": "def reset(self): ...",
    "update": "def update(self, observation): ...",
    "compute": "def compute(self): return nlbench.Result.of({place: number})",
    "accumulator": "def accumulator(self): return an nlbench.Accumulator",
}


def _method_problem(measure: type[Measure]) -> str:
    """Describe methods that are missing or can't be called."""
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
            declared = ", ".join(inspect.signature(function).parameters)
            return f": {method}({declared}) can't be called; write `def {method}({expected})`"
    if _returns_none(measure.compute):
        return f": compute() returns nothing; write `{_EXAMPLES['compute'].partition(': ')[2]}`"
    return _function_problem(measure) if issubclass(measure, FunctionMeasure) else ""


def _function_problem(measure: type[FunctionMeasure]) -> str:
    """Describe why a decorated function can't be called with x, y and its options."""
    function = measure.function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
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
    return ": the function returns nothing; end it with `return`" * _returns_none(function)


def _returns_none(function: Callable[..., Any]) -> bool:
    """Return True if a Python function, other than a generator, always returns None."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname != "NOP"]
    returned = [
        # Python 3.12 and 3.13 return a constant with one instruction, other versions with two.
        (step if step.opname == "RETURN_CONST" else before)
        for before, step in zip([None, *steps], steps, strict=False)
        if step.opname.startswith("RETURN_") and step.opname != "RETURN_GENERATOR"
    ]
    return bool(returned) and all(
        step is not None and step.opname in ("LOAD_CONST", "RETURN_CONST") and step.argval is None
        for step in returned
    )


def _attribute_problem(measure: type[Measure]) -> str:
    """Describe an invalid attribute."""
    for attribute, (is_valid, expected) in _ATTRIBUTE_CHECKS.items():
        value = getattr(measure, attribute, None)
        if not is_valid(value):
            return f": {attribute} is {_text(value)}, expected {expected}"
    return ""


def _are_bounds(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    low, high = value
    return all(isinstance(n, int | float) for n in value) and bool(low <= high)


def _are_options(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(o, Option) for o in value.values())


def _are_functions(value: object) -> bool:
    return isinstance(value, Mapping) and all(callable(function) for function in value.values())


_ATTRIBUTE_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "probe": (
        lambda value: isinstance(value, str),
        'a name: `probe = "sites"`, or another from `nlbench list probes`',
    ),
    "bounds": (_are_bounds, "two numbers, the smaller first: `bounds = (0.0, 1.0)`"),
    "more_means": (
        lambda value: value in get_args(MoreMeans),
        "one of " + ", ".join(f"'{word}'" for word in get_args(MoreMeans)),
    ),
    "version": (lambda value: isinstance(value, str), 'a string: `version = "1"`'),
    "options": (_are_options, "a mapping of names to nlbench.Option"),
    "source": (lambda value: isinstance(value, Source), "an nlbench.Source or a string"),
    "invariant_to": (
        lambda value: isinstance(value, tuple) and set(value) <= set(INVARIANCES),
        "a tuple of some of " + ", ".join(f"'{word}'" for word in INVARIANCES),
    ),
    "unreduced": (_are_functions, "a mapping of names to functions of a tensor"),
    "independent_sites": (lambda value: isinstance(value, bool), "True or False"),
    "counts_crossings": (lambda value: isinstance(value, bool), "True or False"),
    "exact": (lambda value: isinstance(value, bool), "True or False"),
}


def validated_result(returned: object, bounds: tuple[float, float]) -> Result:
    """Validate and return the return value of a measure's ``compute``.

    Examples
    --------
    >>> validated_result(Result.of({"relu": 7.0}), (-1.0, 1.0))
    Traceback (most recent call last):
    nlbench.errors.PluginError: relu: 7 is out of the declared bounds -1 to 1
    """
    if not isinstance(returned, Result):
        raise PluginError(
            f"compute() returned a {type(returned).__name__}, expected an nlbench.Result; return "
            "nlbench.Result.of({place: number})"
        )
    if not all(map(math.isfinite, returned.numbers.values())):
        raise NotFinite("the summary is not finite")
    summary = Value("", returned.summary, status=returned.status, reason=returned.reason)
    for value in (*returned.values, summary):
        if value.status not in get_args(Status):
            raise PluginError(
                f"unknown status '{value.status}'{nearest(str(value.status), get_args(Status))}"
            )
        if value.status != "ok" and not value.reason:
            raise PluginError(f"status '{value.status}' without a reason")
        _check_bounds(value, bounds)
        if "error" in value.statistics:
            raise PluginError(
                "a statistic is called 'error', the name of the standard error from replicates; "
                "choose another, such as 'numerical_error'"
            )
    if returned.status == "ok" and "value" not in returned.summary:
        raise PluginError("the summary has no 'value'")
    places = [value.place for value in returned.values]
    if "" in places or len(set(places)) < len(places):
        raise PluginError("places must have distinct names")
    json.dumps(asdict(returned), allow_nan=False)
    return returned


def _check_bounds(value: Value, bounds: tuple[float, float]) -> None:
    number = value.statistics.get("value")
    if number is None:
        return
    low, high = bounds
    if low - _tolerance(low) <= number <= high + _tolerance(high):
        return
    where = f"{value.place}: " if value.place else "the summary: "
    raise PluginError(f"{where}{number:.7g} is out of the declared bounds {low:g} to {high:g}")


def _tolerance(bound: float) -> float:
    # Tolerance on a result's bounds, relative to the bound but at least to 1.
    return 0.0 if math.isinf(bound) else 1e-9 * max(1.0, abs(bound))
