"""Checks of a measure, and the small networks and samples for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nlbench.execution.probe_pass import Pass
from nlbench.introspection.precision import exact_arithmetic
from nlbench.measure import Measure, Result
from nlbench.options import OptionValue, Settings
from nlbench.probes import Resources
from nlbench.settings import resolve_settings
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.subject import Subject

SAMPLES, WIDTH, CLASSES = 48, 6, 3

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
            name, probe = "blank", probe_name

            def update(self, observation: Any) -> None:
                pass

            def compute(self) -> Result:
                return Result({"value": 0.0})

        return _measure(model, inputs, Blank, {}).status == "ok"


def _measure(
    model: nn.Module, inputs: Tensor, measure: type[Measure], settings: Settings
) -> Result:
    """Measure a network as `nlbench.evaluate` does, without creating a record."""
    resolved = resolve_settings([measure], settings, inputs=inputs)
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


def value_of(result: Result) -> float:
    """Return the summary value of a result."""
    return result.summary["value"]


def difference(first: Result, second: Result, tolerance: float) -> str:
    """Describe how two results differ by more than a tolerance; empty if they don't."""
    if first.status != second.status:
        return f"{first.status} becomes {second.status}: {second.reason or first.reason}"
    if first.status != "ok":
        return ""
    a, b = value_of(first), value_of(second)
    if abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)):
        return ""
    return f"{a:.9g} becomes {b:.9g}"


Outcome = Literal["kept", "broken", "not claimed", "not checked"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check of a measure.

    Parameters
    ----------
    outcome : {"kept", "broken", "not claimed", "not checked"}
        ``not claimed``: the value changes, but the measure doesn't claim to be invariant.
        ``not checked``: the detail gives the reason.
    """

    name: str
    outcome: Outcome
    detail: str = ""


def check_equal(name: str, difference: str, hint: str = "") -> Check:
    """Return a check that is broken if there is a difference.

    Its detail ends with `hint`.
    """
    return Check(name, "broken" if difference else "kept", difference and difference + hint)
