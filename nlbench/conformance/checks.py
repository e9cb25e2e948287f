"""The checks of ``nlbench check-measure``, and the small networks and samples for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError
from nlbench.execution.probe_pass import Pass
from nlbench.introspection.precision import exact_arithmetic
from nlbench.measure import INVARIANCES, Measure, Result
from nlbench.measure.contract import checked_measure
from nlbench.measure.replicates import GROUPS, group_index
from nlbench.options import OptionValue, Settings
from nlbench.probes import Resources
from nlbench.probes.probe import load_probe
from nlbench.settings import resolve_settings
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.subject import Subject

SAMPLES = 48
WIDTH = 6
CLASSES = 3

ROUNDING_TOLERANCE = 1e-7
"""Relative tolerance, absolute below 1, for values computed in the same dtype."""

FLOAT32_TOLERANCE = 1e-3
"""Tolerance for comparing values in float32 with another dtype or another device."""


@dataclass(frozen=True)
class Trial:
    """A measure to check, with its settings."""

    measure: type[Measure]
    settings: Settings

    def value(
        self,
        model: nn.Module,
        inputs: Tensor,
        *,
        measure: type[Measure] | None = None,
        **probe_options: OptionValue,
    ) -> Result:
        """Measure a network with this measure, or with one derived from it."""
        options = {f"{self.measure.probe}.{name}": v for name, v in probe_options.items()}
        return _measure(model, inputs, measure or self.measure, {**self.settings, **options})

    def is_observable(self, model: nn.Module, inputs: Tensor) -> bool:
        """Return True if the measure's probe can observe a network at all."""
        probe_name = self.measure.probe

        class Blank(Measure):
            name = "blank"
            probe = probe_name

            def update(self, observation: Any) -> None:
                pass

            def compute(self) -> Result:
                return Result({"value": 0.0})

        return _measure(model, inputs, Blank, {}).status == "ok"


def _measure(
    model: nn.Module, inputs: Tensor, measure: type[Measure], settings: Settings
) -> Result:
    """Measure a network as `nlbench.evaluate` does, without creating a record."""
    resolved = resolve_settings([measure], settings)
    # The labels are a network's own predictions, as after training. With random labels, changes
    # in the loss would be meaningless.
    labels = relu_network()(inputs.float().cpu()).argmax(1)
    facts = SubjectFacts(model=type(model).__name__, weights="given", data="given", seed=0)
    with exact_arithmetic():
        options = resolved.probes[measure.probe]
        subject = Subject(model, inputs, labels, facts)
        observed = Pass(subject, measure.probe, options, Resources(inputs.device))
        (outcome,) = observed.observe([(*resolved.measures[0], measure.name)])
    return outcome.result


def samples(seed: int = 0, n: int = SAMPLES) -> Tensor:
    """Draw normally distributed samples."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def relu_network(slope: float = 0.0, shift: float = 0.0) -> nn.Module:
    """Build a network with two ReLU layers and the same weights on each call.

    `slope` is the slope of the activations for negative inputs; `shift` is added to the biases.
    """
    generator = torch.Generator().manual_seed(1)
    widths = (WIDTH, 12, 8, CLASSES)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        # Unlike the default initialisation, this leaves the global generator untouched.
        linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            weight = torch.randn(outputs, inputs, generator=generator) * (2 / inputs) ** 0.5
            linear.weight.copy_(weight)
            linear.bias.copy_(0.1 * torch.randn(outputs, generator=generator) + shift)
        layers += [linear, nn.LeakyReLU(slope) if slope else nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def read_value(result: Result) -> float:
    """Return the summary value of a result."""
    return result.summary["value"]


def difference(first: Result, second: Result, tolerance: float) -> str:
    """Describe how two results differ by more than a tolerance. Empty if they don't."""
    if first.status != second.status:
        return f"{first.status} becomes {second.status}: {second.reason or first.reason}"
    if first.status != "ok":
        return ""
    a = read_value(first)
    b = read_value(second)
    if abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)):
        return ""
    return f"{a:.9g} becomes {b:.9g}"


Outcome = Literal["kept", "broken", "not claimed", "not checked"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check of a measure."""

    name: str
    # kept, broken, not claimed (the value changes, as the measure doesn't claim to be invariant) or
    # not checked (the detail gives the reason).
    outcome: Outcome
    detail: str = ""


def check_equal(name: str, difference: str, hint: str = "") -> Check:
    """Return a check that is broken if there is a difference. Its detail ends with `hint`."""
    return Check(name, "broken" if difference else "kept", difference and difference + hint)


REPLICATE_TOLERANCE = 1e-6
"""Maximum difference, relative to the value but at least to 1. Replicates are rounded."""


def _changing(measure: type[Measure], change: Callable[[Any], Any]) -> type[Measure]:
    """Return a measure that receives changed observations."""

    class Changing(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def update(self, observation: Any) -> None:
            super().update(change(observation))

    return Changing


def check_repeatability(trial: Trial, first: Result) -> Iterator[Check]:
    """Check a repeated run, a second instance, and an instance after `reset`."""
    repeated = trial.value(relu_network(), samples())
    yield check_equal("repeatable", difference(first, repeated, 0.0))
    results: dict[str, Result] = {}
    measure = _add_two_instances(trial.measure, results)
    value = trial.value(relu_network(), samples(), measure=measure)
    second = results.get("second", value)
    used = results.get("used", value)
    yield check_equal(
        "two instances",
        difference(value, second, 0.0),
        "; both instances get the same observations: use a separate generator for random numbers",
    )
    yield check_equal(
        "after reset",
        difference(value, used, 0.0),
        "; the instance was used before: reset() keeps some of its state",
    )
    changed = "update() changes its observation, which is only copied in a run"
    yield check_equal("observations unchanged", changed if "changed" in results else "")


def _add_two_instances(measure: type[Measure], results: dict[str, Result]) -> type[Measure]:
    """Return a measure that also updates a second instance, and one that was used and reset."""

    class InstanceTrio(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def reset(self) -> None:
            super().reset()
            self._others = {"second": measure(**self.settings), "used": measure(**self.settings)}
            self._first: Any = None
            for other in self._others.values():
                other.reset()

        def update(self, observation: Any) -> None:
            if self._first is None:
                self._first = observation
                self._others["used"].update(observation)
                self._others["used"].compute()
                self._others["used"].reset()
            before = _copies(observation)
            super().update(observation)
            if any(not torch.equal(copy, tensor) for copy, tensor in before):
                results["changed"] = Result({})
            for other in self._others.values():
                other.update(observation)

        def compute(self) -> Result:
            for name, other in self._others.items():
                results[name] = other.compute()
            return super().compute()

    return InstanceTrio


def _copies(observation: Any) -> list[tuple[Tensor, Tensor]]:
    """Return a pair of copy and original for each tensor in an observation."""
    values = getattr(observation, "__dict__", {}).values()
    return [(value.clone(), value) for value in values if isinstance(value, Tensor)]


def check_site_order(trial: Trial, first: Result) -> Iterator[Check]:
    """Check that sites are independent if the measure declares it, since threads rely on it."""
    if not trial.measure.independent_sites:
        return
    size = SAMPLES // 4
    by_batch = trial.value(relu_network(), samples(), batch=size)
    derived = _site_by_site(trial.measure)
    by_site = trial.value(relu_network(), samples(), measure=derived, batch=size)
    yield check_equal(
        "independent sites",
        difference(by_batch, by_site, 0.0),
        " if later batches arrive site by site, from the last site to the first",
    )


def _site_by_site(measure: type[Measure]) -> type[Measure]:
    """Return a measure that receives the first batch in order and later ones site by site."""

    class SiteBySite(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def reset(self) -> None:
            super().reset()
            self._later: list[Any] = []

        def update(self, observation: Any) -> None:
            if observation.batch == 0:
                super().update(observation)
            else:
                self._later.append(observation)

        def compute(self) -> Result:
            for observation in sorted(self._later, key=lambda later: -later.site.index):
                super().update(observation)
            return super().compute()

    return SiteBySite


def check_replicates(trial: Trial, first: Result) -> Iterator[Check]:
    """Check each replicate of a site measure against its value on the other samples."""
    if not first.replicates:
        yield Check("replicates", "not checked", "the value has no standard error")
        return
    if trial.measure.probe != "sites":
        reason = f"the observations of {trial.measure.probe} can't be divided into groups"
        yield Check("replicates", "not checked", reason)
        return
    for group, replicate in zip(range(GROUPS), first.replicates, strict=True):

        def drop_group(observation: Any, group: int = group) -> Any:
            kept = group_index(observation.sources.index) != group
            return observation.select_rows(kept.nonzero()[:, 0])

        measure = _changing(trial.measure, drop_group)
        other = trial.value(relu_network(), samples(), measure=measure)
        expected = read_value(other) if other.status == "ok" else float("nan")
        if not abs(replicate - expected) <= REPLICATE_TOLERANCE * max(1.0, abs(expected)):
            detail = f"{replicate:.9g} without group {group}, expected {expected:.9g}"
            yield Check("replicates", "broken", detail)
            return
    yield Check("replicates", "kept", f"standard error {first.error:.2g}")


def check_invariances(trial: Trial, first: Result) -> Iterator[Check]:
    """Check each known invariance, whether or not the measure declares it."""
    model = relu_network().double()
    inputs = samples().double()
    plain = trial.value(model, inputs)
    for name, description in INVARIANCES.items():
        is_claimed = name in trial.measure.invariant_to and not trial.settings
        label = f"invariant to {name}"
        try:
            varied = _VARIATIONS[name](trial, model, inputs)
        except NlbenchError as error:
            yield Check(label, "broken" if is_claimed else "not checked", str(error))
            continue
        if varied is None:
            reason = f"the observations of {trial.measure.probe} can't be varied in this way"
            yield Check(label, "not checked", reason)
            continue
        change = difference(plain, varied, ROUNDING_TOLERANCE)
        if change:
            yield Check(label, "broken" if is_claimed else "not claimed", change)
        else:
            yield Check(label, "kept", "" if is_claimed else f"could be declared: {description}")


Variation = Callable[[Trial, nn.Module, Tensor], Result | None]
"""Measures with a variation; returns None if it doesn't apply."""


def _vary_batches(trial: Trial, model: nn.Module, inputs: Tensor) -> Result | None:
    if "batch" not in load_probe(trial.measure.probe).options:
        return None
    return trial.value(model, inputs, batch=SAMPLES // 3)


def _vary_order(trial: Trial, model: nn.Module, inputs: Tensor) -> Result:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(2))
    return trial.value(model, inputs[order])


def _vary_channels(change: Callable[[Tensor], Tensor]) -> Variation:
    """Return a variation that changes x and y of each observation that has both."""

    def vary(trial: Trial, model: nn.Module, inputs: Tensor) -> Result | None:
        changed = []
        if trial.measure.unreduced:
            return None

        def changed_channels(observation: Any) -> Any:
            x = getattr(observation, "x", None)
            y = getattr(observation, "y", None)
            if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == y.ndim == 2):
                return observation
            changed.append(observation)
            # Shared intermediate results belong to the original samples.
            unshared = {"borrowed": None} if hasattr(observation, "borrowed") else {}
            return replace(observation, x=change(x), y=change(y), **unshared)

        result = trial.value(model, inputs, measure=_changing(trial.measure, changed_channels))
        return result if changed else None

    return vary


def _rotate(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(values.shape[1])
    square = torch.randn(values.shape[1], values.shape[1], generator=generator, dtype=torch.float64)
    return values @ torch.linalg.qr(square).Q.to(values)


def _shift(values: Tensor) -> Tensor:
    return values + torch.linspace(-2, 3, values.shape[1], dtype=values.dtype)


_VARIATIONS: Mapping[str, Variation] = {
    "batches": _vary_batches,
    "order": _vary_order,
    "units": _vary_channels(lambda values: 3.7 * values),
    "offsets": _vary_channels(_shift),
    "rotations": _vary_channels(_rotate),
}


def check_measure(measure: object, settings: Settings | None = None) -> list[Check]:
    """Check the declarations and the behaviour of a measure on small networks.

    Parameters
    ----------
    measure : Measure class
        Or anything else that `nlbench.evaluate` accepts as a measure.
    settings : mapping, optional
        Options for the measure or its probe; see `nlbench.evaluate`. Declared invariances only
        have to hold with default options.

    Returns
    -------
    list of Check
        The outcome ``broken`` means a defect in the measure.

    Raises
    ------
    nlbench.PluginError, nlbench.RequestError
        If `measure` is not a measure, or an option is invalid.

    Examples
    --------
    >>> import nlbench
    >>> @nlbench.site_measure(bounds=(0, 1))
    ... def seven(x, y):
    ...     '''Return seven.'''
    ...     return 7
    >>> [check.detail for check in check_measure(seven) if check.outcome == "broken"][0]
    '1: 7 is out of the declared bounds 0 to 1'
    """
    trial = Trial(checked_measure(measure), dict(settings or {}))
    first = trial.value(relu_network(), samples())
    if first.status != "ok":
        outcome: Outcome = "broken" if first.status == "failed" else "not checked"
        return [Check("value", outcome, first.reason)]
    checks = [Check("value", "kept", f"{read_value(first):.6g} on a small network of ReLUs")]
    for check in _CHECKS:
        checks.extend(check(trial, first))
    return checks


def check_bounds(trial: Trial, first: Result) -> Iterator[Check]:
    """Check the bounds for inputs with different scales and distributions."""
    inputs = {
        "tiny": 1e-6 * samples(1),
        "huge": 1e6 * samples(2),
        "heavy-tailed": samples(3).pow(5),
        "offset": samples(4) + 1e4,
        "equal except for one": torch.cat([torch.ones(SAMPLES - 1, WIDTH), -torch.ones(1, WIDTH)]),
    }
    results = {name: trial.value(relu_network(), values) for name, values in inputs.items()}
    problems = [
        f"{name} inputs: {result.reason}"
        for name, result in results.items()
        if result.status == "failed"
    ]
    yield check_equal("bounds", "; ".join(problems))


def check_direction(trial: Trial, first: Result) -> Iterator[Check]:
    """Check that ReLUs are measured as more nonlinear than identities in the same network."""
    affine = trial.value(relu_network(slope=1.0), samples())
    more_means = trial.measure.more_means
    if more_means == "neither" or affine.status != "ok":
        reason = "not declared" if more_means == "neither" else f"affine network: {affine.reason}"
        yield Check("direction", "not checked", reason)
        return
    relu = read_value(first)
    identity = read_value(affine)
    is_correct = relu > identity if more_means == "more nonlinear" else relu < identity
    detail = f"{relu:.6g} with ReLUs, {identity:.6g} with identities"
    yield Check("direction", "kept" if is_correct else "broken", detail)


def check_degenerate_inputs(trial: Trial, first: Result) -> Iterator[Check]:
    """Check constant activations, constant inputs, few samples and non-finite inputs."""
    for name, model, inputs in (
        ("constant activations", relu_network(shift=-1e3), samples()),
        ("constant inputs", relu_network(), torch.ones(SAMPLES, WIDTH)),
        ("one sample", relu_network(), samples(n=1)),
        ("two samples", relu_network(), samples(n=2)),
    ):
        result = trial.value(model, inputs)
        detail = result.reason if result.status != "ok" else f"{read_value(result):.6g}"
        if result.status == "failed" and not trial.is_observable(model, inputs):
            yield Check(name, "not checked", f"probe {trial.measure.probe}: {detail}")
        else:
            yield Check(name, "broken" if result.status == "failed" else "kept", detail)
    non_finite = samples()
    non_finite[SAMPLES // 2, 1] = math.nan
    result = trial.value(relu_network(), non_finite)
    if result.status == "ok" and difference(first, result, 0.0):
        yield Check("non-finite inputs", "broken", f"ok, {read_value(result):.6g}")
    else:
        detail = result.reason or "the value doesn't depend on the samples"
        yield Check("non-finite inputs", "kept", detail)


def check_types_and_devices(trial: Trial, first: Result) -> Iterator[Check]:
    """Check float64, bfloat16 and, if available, a GPU."""
    double = trial.value(relu_network().double(), samples().double())
    yield check_equal("float64", difference(first, double, FLOAT32_TOLERANCE))
    half = trial.value(relu_network().bfloat16(), samples().bfloat16())
    yield Check("bfloat16", "broken" if half.status == "failed" else "kept", half.reason)
    if torch.cuda.is_available():
        on_gpu = trial.value(relu_network().cuda(), samples().cuda())
        yield check_equal("device", difference(first, on_gpu, FLOAT32_TOLERANCE))
    else:
        yield Check("device", "not checked", "without a GPU")


_CHECKS: tuple[Callable[[Trial, Result], Iterator[Check]], ...] = (
    check_repeatability,
    check_site_order,
    check_bounds,
    check_direction,
    check_degenerate_inputs,
    check_types_and_devices,
    check_invariances,
    check_replicates,
)
