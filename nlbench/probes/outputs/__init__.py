"""The probe `outputs`: what the network makes of samples whose labels are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nlbench.options import Option
from nlbench.probes import Listener, OnStep, Probe, ProbeOptions, Resources, Samples

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["OUTPUTS", "OutputBatch", "Outputs"]


@dataclass(frozen=True)
class OutputBatch:
    """A network's outputs for one batch, beside what they should be.

    Parameters
    ----------
    outputs : tensor of shape (n, ...)
    labels : tensor of shape (n, ...)
        On the outputs' device; -100 where there is nothing to predict, as PyTorch's losses
        have it.
    """

    outputs: Tensor
    labels: Tensor


class Outputs(Probe):
    """The probe `outputs`."""

    name = "outputs"
    description = "the network's outputs beside the samples' labels"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(128, "samples a batch", minimum=1, maximum=1e9)
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """How many batches that many samples make."""
        return -(-samples // int(options["batch"]))

    def held(self, options: ProbeOptions) -> int:
        """One: the samples are gone through in batches."""
        return 1

    def observe(
        self,
        model: nn.Module,
        samples: Samples,
        options: ProbeOptions,
        listeners: Sequence[Listener],
        *,
        resources: Resources,
        step: OnStep,
        facts: dict[str, Any],
    ) -> None:
        """See `nlbench.probes.Probe.observe`.

        Raises
        ------
        nlbench.Undefined
            If the samples have no labels, or the network gives no tensor.
        """
        from nlbench.introspection.model_state import evaluation_mode, given_tensor
        from nlbench.introspection.precision import exact_by_default

        seen = 0
        with exact_by_default(), evaluation_mode(model):
            for inputs, labels in samples.labelled(int(options["batch"])):
                # A copy: a first layer that works in place would change the samples.
                outputs = given_tensor(model(inputs.to(resources.device, copy=True)))
                for listener in listeners:
                    listener.update(OutputBatch(outputs, labels.to(outputs.device)))
                seen += len(inputs)
                step()
        facts["samples"] = seen


OUTPUTS = Outputs()
"""The network's outputs beside the samples' labels."""
