"""The probe `outputs`, its options and its observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from nlbench.options import Option
from nlbench.probes.probe import Probe, ProbeFacts, ProbeOptions, ProbePass

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class OutputBatch:
    """A network's outputs for one batch, with the labels.

    Parameters
    ----------
    outputs : tensor of shape (n, ...)
    labels : tensor of shape (n, ...)
        On the same device as the outputs; -100 where there is nothing to predict, as in PyTorch.
    inputs : tensor of shape (n, ...), optional
        Samples.
    model : torch.nn.Module, optional
        The model itself, in evaluation mode.
    tokens : tensor of shape (n, t), optional
        False for outputs at padding; None if the outputs have no positions, or there is no mask.
    """

    outputs: Tensor
    labels: Tensor
    inputs: Tensor | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    tokens: Tensor | None = None


class Outputs(Probe):
    """The probe `outputs`."""

    name = "outputs"
    description = "the network's outputs and the samples' labels"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(128, "samples per batch", minimum=1, maximum=1e9)
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches."""
        return -(-samples // int(options["batch"]))

    def observe(self, probe_pass: ProbePass) -> ProbeFacts:
        """See `nlbench.probes.Probe.observe`."""
        from nlbench.introspection.model_output import validated_tensor
        from nlbench.introspection.model_state import evaluation_mode
        from nlbench.introspection.precision import exact_by_default
        from nlbench.probes.sites.rows import PositionSelector, tokens_of_outputs
        from nlbench.probes.sites.sites_probe import RowPolicy

        count = 0
        model = probe_pass.model
        device = probe_pass.resources.device
        selector = PositionSelector(RowPolicy(tokens=True))
        with exact_by_default(), evaluation_mode(model), selector.hooked(model):
            for inputs, labels in probe_pass.samples.labelled(int(probe_pass.options["batch"])):
                # Copied, since a first layer that works in place would change the samples.
                selector.begin(0, len(inputs))
                outputs = validated_tensor(model(inputs.to(device, copy=True)))
                tokens = tokens_of_outputs(selector.outermost, outputs)
                labels = labels.to(outputs.device)
                probe_pass.show(OutputBatch(outputs, labels, inputs, model, tokens))
                count += len(inputs)
                probe_pass.step()
        return ProbeFacts(samples=count)


OUTPUTS = Outputs()
