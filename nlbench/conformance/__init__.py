"""How a measure behaves: the checks that ``nlbench check-measure`` runs, whatever its probe.

Each measures small networks and says whether what a measure declares, and what every
measure owes, is kept. No measure is known by name here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError
from nlbench.execution.measure_subject import observe
from nlbench.introspection.precision import exact_arithmetic
from nlbench.measure import INVARIANCES, Measure, Result
from nlbench.options import OptionValue
from nlbench.plan import checked_measure, load_probe, resolve_settings
from nlbench.probes import Resources
from nlbench.request import Settings
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.subject import Subject

from .pretend_cuda import PretendCuda

__all__ = ["Check", "check_measure"]

Verdict = Literal["kept", "broken", "not claimed", "not checked"]

SAMPLES, WIDTH, CLASSES = 48, 6, 3

# How far rounding may take a number that should not change, relative to its size or to 1:
# of the same arithmetic in float64, and of a network in float32.
ROUNDING, SINGLE = 1e-7, 1e-3


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Parameters
    ----------
    name : str
    verdict : {"kept", "broken", "not claimed", "not checked"}
        ``not claimed``: the value does change, and the measure doesn't say that it
        wouldn't. ``not checked``: the detail says why.
    detail : str
        The numbers, or the reason.
    """

    name: str
    verdict: Verdict
    detail: str = ""


def check_measure(measure: object, settings: Settings | None = None) -> list[Check]:
    """Check what a measure declares and how it behaves, on small networks.

    Parameters
    ----------
    measure : Measure class
        Or whatever `nlbench.evaluate` takes in place of one.
    settings : mapping, optional
        Options of the measure or its probe, as `nlbench.evaluate` takes them. What a measure
        claims not to depend on it claims with default options only.

    Returns
    -------
    list of Check
        A verdict of ``broken`` is a defect of the measure.

    Raises
    ------
    nlbench.PluginError, nlbench.RequestError
        If it is no measure, or an option is wrong.

    Examples
    --------
    >>> import nlbench
    >>> @nlbench.site_measure(bounds=(0, 1))
    ... def seven(x, y):
    ...     '''Give seven.'''
    ...     return 7
    >>> [check.detail for check in check_measure(seven) if check.verdict == "broken"][0]
    '1: 7 is beyond the bounds 0 to 1 that the measure declares'
    """
    trial = _Trial(checked_measure(measure), dict(settings or {}))
    first = trial.value(_network(), _samples())
    if first.status != "ok":
        verdict: Verdict = "broken" if first.status == "failed" else "not checked"
        return [Check("value", verdict, first.reason)]
    checks = [Check("value", "kept", f"{_number(first):.6g} on a small network of ReLUs")]
    for check in _CHECKS:
        checks.extend(check(trial, first))
    return checks


@dataclass(frozen=True)
class _Trial:
    """A measure with its settings."""

    measure: type[Measure]
    settings: Settings

    def value(
        self,
        model: nn.Module,
        inputs: Tensor,
        *,
        measure: type[Measure] | None = None,
        **probe: OptionValue,
    ) -> Result:
        """Measure a network; the probe's options by keyword."""
        varied = {f"{self.measure.probe}.{option}": value for option, value in probe.items()}
        return _observed(model, inputs, measure or self.measure, {**self.settings, **varied})

    def is_shown(self, model: nn.Module, inputs: Tensor) -> bool:
        """Whether the probe can look at it, whatever the measure makes of it."""
        probe_of = self.measure

        class Blank(Measure):
            name, probe = "blank", probe_of.probe

            def update(self, observation: Any) -> None:
                pass

            def compute(self) -> Result:
                return Result({"value": 0.0})

        return _observed(model, inputs, Blank, {}).status == "ok"


def _observed(
    model: nn.Module, inputs: Tensor, measure: type[Measure], settings: Settings
) -> Result:
    """Show a measure a network as `nlbench.evaluate` does, without a record."""
    resolved = resolve_settings([measure], settings, inputs=inputs)
    labels = torch.arange(len(inputs)) % CLASSES
    facts = SubjectFacts(model=type(model).__name__, weights="given", data="given", seed=0)
    subject = Subject(model, inputs, labels, facts)
    with exact_arithmetic():
        (outcome,) = observe(
            subject,
            resolved.measures,
            resolved.probes[measure.probe],
            resources=Resources(inputs.device),
            streams=[measure.name],
        )
    return outcome.result


def _samples(seed: int = 0, n: int = SAMPLES) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def _network(slope: float = 0.0, shift: float = 0.0) -> nn.Module:
    """Two layers of leaky ReLUs, whose inputs are moved; the same weights at each call."""
    made = torch.Generator().manual_seed(1)
    widths = (WIDTH, 12, 8, CLASSES)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        # Without drawing numbers that are overwritten.
        linear = nn.utils.skip_init(nn.Linear, before, after)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            linear.weight.copy_(torch.randn(after, before, generator=made) * (2 / before) ** 0.5)
            linear.bias.copy_(0.1 * torch.randn(after, generator=made) + shift)
        layers += [linear, nn.LeakyReLU(slope) if slope else nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def _number(result: Result) -> float:
    return result.summary["value"]


def _differ(first: Result, second: Result, tolerance: float) -> str:
    """Say how the values of two results differ by more than rounding; else nothing."""
    if first.status != second.status:
        return f"{first.status} becomes {second.status}: {second.reason or first.reason}"
    if first.status != "ok":
        return ""
    a, b = _number(first), _number(second)
    if abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)):
        return ""
    return f"{a:.9g} becomes {b:.9g}"


def _verdict(name: str, difference: str) -> Check:
    return Check(name, "broken" if difference else "kept", difference)


def _determinism(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether the same observations give the same numbers: again, and after another subject."""
    again = trial.value(_network(), _samples())
    yield _verdict("the same once more", _differ(first, again, 0.0))
    found: dict[str, Result] = {}
    watched = _beside(trial.measure, found)
    shown = trial.value(_network(), _samples(), measure=watched)
    beside, used = found.get("beside", shown), found.get("used", shown)
    remark = "; two instances are shown the same: random numbers need a generator of their own"
    difference = _differ(shown, beside, 0.0)
    yield _verdict("the same beside another", difference and difference + remark)
    difference = _differ(shown, used, 0.0)
    remark = "; an instance that measured something before: reset() forgets too little"
    yield _verdict("the same after reset", difference and difference + remark)
    changed = "update() changes what it is shown, which outside of a run is no copy"
    yield _verdict("observations left alone", changed if "changed" in found else "")


def _beside(measure: type[Measure], found: dict[str, Result]) -> type[Measure]:
    """A measure beside which a fresh instance and a used one are shown the same."""

    class Beside(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def reset(self) -> None:
            super().reset()
            self._all = {"beside": measure(**self.settings), "used": measure(**self.settings)}
            self._first: Any = None
            for one in self._all.values():
                one.reset()

        def update(self, observation: Any) -> None:
            if self._first is None:
                # The used one has seen something already, and forgets it.
                self._first = observation
                self._all["used"].update(observation)
                self._all["used"].compute()
                self._all["used"].reset()
            before = _tensors_of(observation)
            super().update(observation)
            if any(not torch.equal(old, new) for old, new in before):
                found["changed"] = Result({})
            for one in self._all.values():
                one.update(observation)

        def compute(self) -> Result:
            for name, one in self._all.items():
                found[name] = one.compute()
            result: Result = super().compute()
            return result

    Beside.__doc__ = measure.__doc__
    return Beside


def _independence(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether sites may be shown in any order, as where several threads share them."""
    if not trial.measure.independent_sites:
        return
    size = SAMPLES // 4
    usual = trial.value(_network(), _samples(), batch=size)
    other = trial.value(_network(), _samples(), measure=_site_by_site(trial.measure), batch=size)
    remark = " where all batches of the last site are shown before those of the one before"
    difference = _differ(usual, other, 0.0)
    yield _verdict("independent sites", difference and difference + remark)


def _site_by_site(measure: type[Measure]) -> type[Measure]:
    """A measure that is shown the first batch as it comes, and then one site after the other."""

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
            for observation in sorted(self._later, key=lambda one: -one.site.index):
                super().update(observation)
            result: Result = super().compute()
            return result

    SiteBySite.__doc__ = measure.__doc__
    return SiteBySite


def _tensors_of(observation: Any) -> list[tuple[Tensor, Tensor]]:
    """Copies of the tensors that an observation has, each with the tensor itself."""
    held = getattr(observation, "__dict__", {}).values()
    return [(one.clone(), one) for one in held if isinstance(one, Tensor)]


def _bounds(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether values stay within the declared bounds, whatever the inputs' scale and tails."""
    heavy = _samples(3).pow(5)
    inputs = {
        "tiny": 1e-6 * _samples(1),
        "huge": 1e6 * _samples(2),
        "heavy-tailed": heavy,
        "offset": _samples(4) + 1e4,
        "all alike but one": torch.cat([torch.ones(SAMPLES - 1, WIDTH), -torch.ones(1, WIDTH)]),
    }
    problems = [
        f"{name} inputs: {found.reason}"
        for name, given in inputs.items()
        if (found := trial.value(_network(), given)).status == "failed"
    ]
    yield _verdict("bounds", "; ".join(problems))


def _direction(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether a network of ReLUs is more nonlinear than the same one with identities."""
    affine = trial.value(_network(slope=1.0), _samples())
    more = trial.measure.more_means
    if more == "neither" or affine.status != "ok":
        detail = "none is declared" if more == "neither" else f"affine: {affine.reason}"
        yield Check("direction", "not checked", detail)
        return
    bent, straight = _number(first), _number(affine)
    is_right = bent > straight if more == "more nonlinear" else bent < straight
    detail = f"{bent:.6g} with ReLUs, {straight:.6g} where they are identities"
    yield Check("direction", "kept" if is_right else "broken", detail)


def _failures(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether what can't be measured is said to be undefined, with the reason."""
    for name, model, inputs in (
        ("constant activations", _network(shift=-1e3), _samples()),
        ("constant inputs", _network(), torch.ones(SAMPLES, WIDTH)),
        ("one sample", _network(), _samples(n=1)),
        ("two samples", _network(), _samples(n=2)),
    ):
        found = trial.value(model, inputs)
        detail = found.reason if found.status != "ok" else f"{_number(found):.6g}"
        if found.status == "failed" and not trial.is_shown(model, inputs):
            yield Check(name, "not checked", f"probe {trial.measure.probe}: {detail}")
        else:
            yield Check(name, "broken" if found.status == "failed" else "kept", detail)
    damaged = _samples()
    damaged[SAMPLES // 2, 1] = math.nan
    found = trial.value(_network(), damaged)
    if found.status == "ok" and _differ(first, found, 0.0):
        yield Check("inputs that are not finite", "broken", f"ok, {_number(found):.6g}")
    else:
        detail = found.reason or "the value doesn't depend on the samples"
        yield Check("inputs that are not finite", "kept", detail)


def _machines(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether other types and devices give the same but for rounding."""
    double = trial.value(_network().double(), _samples().double())
    yield _verdict("float64", _differ(first, double, SINGLE))
    half = trial.value(_network().bfloat16(), _samples().bfloat16())
    failed = half.reason if half.status == "failed" else ""
    yield Check("bfloat16", "broken" if failed else "kept", failed or half.reason)
    if torch.cuda.is_available():
        away = trial.value(_network().cuda(), _samples().cuda())
        yield _verdict("device", _differ(first, away, SINGLE))
        return
    # It refuses what a GPU refuses, and computes what the CPU does.
    with PretendCuda() as device:
        model, inputs = _network().to("cuda"), _samples().to("cuda")
        watched, waits = _watched(trial.measure, device)
        away = trial.value(model, inputs, measure=watched)
    yield _verdict("device", _differ(first, away, ROUNDING))
    seen = ", ".join(f"{count} in {place}" for place, count in waits.most_common(3))
    detail = f"waits for a GPU {waits.total()} times: {seen}" if waits else "never waits for a GPU"
    yield Check("waiting for a GPU", "kept", detail)


def _watched(measure: type[Measure], device: PretendCuda) -> tuple[type[Measure], Counter[str]]:
    """A measure, and where in its code it makes the host wait while it is shown something."""
    waits: Counter[str] = Counter()

    class Watched(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def update(self, observation: Any) -> None:
            before = device.places.copy()
            super().update(observation)
            for (place, _), count in (device.places - before).items():
                waits[place] += count

    Watched.__doc__ = measure.__doc__
    return Watched, waits


def _invariances(trial: _Trial, first: Result) -> Iterator[Check]:
    """Whether the value depends on what the measure declares it doesn't."""
    model, inputs = _network().double(), _samples().double()
    for name, what in INVARIANCES.items():
        claimed = name in trial.measure.invariant_to and not trial.settings
        label = f"invariant to {name}"
        try:
            pair = _VARIED[name](trial, model, inputs)
        except NlbenchError as error:
            yield Check(label, "broken" if claimed else "not checked", str(error))
            continue
        if pair is None:
            yield Check(
                label, "not checked", f"nothing to vary in what {trial.measure.probe} shows"
            )
            continue
        difference = _differ(*pair, ROUNDING)
        if not difference:
            yield Check(label, "kept", "" if claimed else f"could be declared: {what}")
        else:
            yield Check(label, "broken" if claimed else "not claimed", difference)


Pair = tuple[Result, Result] | None


def _batches(trial: _Trial, model: nn.Module, inputs: Tensor) -> Pair:
    if "batch" not in load_probe(trial.measure.probe).options:
        return None
    size = SAMPLES // 3
    return trial.value(model, inputs, batch=SAMPLES), trial.value(model, inputs, batch=size)


def _order(trial: _Trial, model: nn.Module, inputs: Tensor) -> Pair:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(2))
    return trial.value(model, inputs), trial.value(model, inputs[order])


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[_Trial, nn.Module, Tensor], Pair]:
    """Vary x and y of each observation, where it has them and nothing else was made of them."""

    def vary(trial: _Trial, model: nn.Module, inputs: Tensor) -> Pair:
        measure, seen = trial.measure, []
        if measure.unreduced:
            return None

        class Changed(measure):  # type: ignore[misc, valid-type]
            name = measure.name

            def update(self, observation: Any) -> None:
                x, y = getattr(observation, "x", None), getattr(observation, "y", None)
                if isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == y.ndim == 2:
                    seen.append(observation)
                    observation = replace(observation, x=change(x), y=change(y))
                super().update(observation)

        found = trial.value(model, inputs, measure=Changed)
        return (trial.value(model, inputs), found) if seen else None

    return vary


def _rotated(values: Tensor) -> Tensor:
    made = torch.Generator().manual_seed(values.shape[1])
    square = torch.randn(values.shape[1], values.shape[1], generator=made, dtype=torch.float64)
    rotated: Tensor = values @ torch.linalg.qr(square).Q.to(values)
    return rotated


def _moved(values: Tensor) -> Tensor:
    return values + torch.linspace(-2, 3, values.shape[1], dtype=values.dtype)


_VARIED: Mapping[str, Callable[[_Trial, nn.Module, Tensor], Pair]] = {
    "batches": _batches,
    "order": _order,
    "units": _changed(lambda values: 3.7 * values),
    "offsets": _changed(_moved),
    "rotations": _changed(_rotated),
}

_CHECKS: tuple[Callable[[_Trial, Result], Iterator[Check]], ...] = (
    _determinism,
    _independence,
    _bounds,
    _direction,
    _failures,
    _machines,
    _invariances,
)
