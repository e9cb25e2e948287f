"""Observe a network as a plain differentiable function of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.attention import disable_fused_attention, without_fast_path
from nlbench.introspection.autodiff import direct_checkpoints, undefined_without_gradient
from nlbench.introspection.batch_independence import (
    CHANGES,
    check_batch_independence,
    describe_dependence,
)
from nlbench.introspection.distinct_rows import DistinctRows, RowNumbers
from nlbench.introspection.memory import (
    FeasibleSizes,
    SampleLimit,
    is_out_of_memory,
    microbatch_sizes,
)
from nlbench.introspection.model_copy import double_copy, precise_device
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import (
    compilation_refused,
    evaluation_mode,
    preserve_attributes,
)
from nlbench.introspection.precision import autocast_now, exact_by_default
from nlbench.introspection.random_state import preserve_rng_state
from nlbench.introspection.wrappers import through_wrappers
from nlbench.probes.probe import ProbeFacts, ProbePass

from .derivatives import DerivativeMode, check_derivative

CHECKED_SAMPLES = 8
"""Maximum number of samples per batch whose derivative is compared with finite differences."""

_SAMPLE_BY_SAMPLE = "derivatives are taken sample by sample"


@dataclass(frozen=True)
class FunctionBatch:
    """A network and one batch of its inputs.

    Parameters
    ----------
    function : callable
        Maps inputs (n, ...) to outputs (n, k): the model in evaluation mode, with all axes of its
        output after the batch axis flattened. It doesn't change its input, and computes in the
        precision in effect when the probe was called.
    inputs : tensor of shape (n, ...)
        Floating-point inputs, on the model's device.
    batch : int
        Index of the batch, from 0.
    model : torch.nn.Module
        The model itself, for measures of its activations or of segments around the inputs.
    limit : int, optional
        Number of samples that fit in memory at once, for `directional_derivative`; None if unknown.
    precise : PreciseFunction, optional
        The model in float64, for `check_derivative`.
    sources : RowNumbers, optional
        Number of each sample among the distinct ones, in the order in which they were drawn;
        batches are shuffled.
    """

    function: Callable[[Tensor], Tensor]
    inputs: Tensor
    batch: int
    model: nn.Module
    limit: int | None = None
    precise: PreciseFunction | None = None
    sources: RowNumbers | None = field(default=None, repr=False, compare=False)

    def check_derivative(self, mode: DerivativeMode) -> None:
        """Raise `nlbench.Undefined` if a derivative of the function is not its derivative.

        A few samples are checked in float64; see `derivatives.check_derivative`. Nothing is checked
        if the model can't be run in float64.
        """
        if self.precise is not None:
            self.precise.check(self.inputs, mode, self.limit)

    def precise_outputs(self, count: int) -> Tensor | None:
        """Return the first outputs in float64, or None if the model can't be run in float64."""
        return None if self.precise is None else self.precise.outputs(self.inputs[:count])


class PreciseFunction:
    """A model as a function in float64, copied when it is first needed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._function: Callable[[Tensor], Tensor] | None = None
        self._is_unavailable = False

    def outputs(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs in float64, or None if the model can't be run in float64."""
        if self._is_unavailable:
            return None
        try:
            with preserve_rng_state(inputs.device), torch.no_grad():
                if self._function is None:
                    copy = double_copy(self._model)
                    self._function = lambda x: _outputs(copy, x).double()
                return self._function(inputs.to(precise_device(self._model, inputs)).double())
        except Exception:  # Some models compute in one floating-point type only.
            self._is_unavailable = True
            return None

    def check(self, inputs: Tensor, mode: DerivativeMode, limit: int | None) -> None:
        """Check the derivative at a few samples. See `check_derivative`."""
        if not len(inputs):
            return
        # A sample takes twice the memory in float64.
        count = CHECKED_SAMPLES if limit is None else max(1, min(CHECKED_SAMPLES, limit // 2))
        samples = inputs[:: -(-len(inputs) // count)].detach()
        if self.outputs(samples) is None or self._function is None:
            return
        samples = samples.to(precise_device(self._model, samples)).double()
        with preserve_rng_state(inputs.device):
            try:
                check_derivative(self._function, samples, mode=mode)
            except Undefined:
                raise
            except (RuntimeError, MemoryError) as error:
                # The measure meets other errors itself, and describes them.
                self._is_unavailable = is_out_of_memory(error)


@through_wrappers
@exact_by_default()
def observe_function(
    model: nn.Module,
    batches: Iterable[Tensor],
    on_observation: Callable[[FunctionBatch], None],
    *,
    memory: int | None = None,
    feasible_sizes: FeasibleSizes | None = None,
) -> int:
    """Pass a model, as a function, to a callback with each batch, and count the samples.

    The model runs in evaluation mode and is restored afterwards. Attention is computed step by
    step, since fused implementations have no second derivatives. If `memory` or `feasible_sizes` is
    given, two samples are run first to estimate how many fit.

    Each batch is checked: Undefined is raised if inputs are not floating-point, or if the output
    for a sample changes from call to call or depends on the other samples in its batch.

    Examples
    --------
    >>> seen = []
    >>> observe_function(nn.Flatten(), [torch.zeros(5, 2, 3)], seen.append)
    5
    >>> seen[0].function(seen[0].inputs).shape
    torch.Size([5, 6])
    """
    samples = 0
    precision = autocast_now()
    checked: set[bool] = set()
    precise = PreciseFunction(model)
    with (
        evaluation_mode(model),
        without_fast_path(),
        disable_fused_attention(),
        direct_checkpoints(),
        compilation_refused(),
    ):
        for index, batch in enumerate(batches):
            if not batch.is_floating_point():
                raise Undefined(
                    f"the inputs are {str(batch.dtype).removeprefix('torch.')}: a network has no "
                    "derivative with respect to them"
                )
            sample_limit = SampleLimit(
                feasible_sizes,
                model,
                "samples of a derivative",
                batch,
                memory,
                # Memory required for a derivative, relative to a forward pass. In forward mode,
                # every tensor has a tangent; otherwise, the graph keeps every tensor in memory.
                times=4,
            )
            limit = sample_limit.limit
            in_parts = limit is not None and limit < len(batch) and sample_limit.is_required
            with preserve_attributes(model), preserve_rng_state(batch.device):
                _refuse_dependence(model, batch, limit or len(batch))
                if len(batch) > 1 and in_parts not in checked:
                    _refuse_mixing(model, batch, limit if in_parts else None)
                    checked |= {False, in_parts}
            function = _function(model, limit, precision)
            on_observation(FunctionBatch(function, batch, index, model, limit, precise))
            samples += len(batch)
    return samples


def _refuse_dependence(model: nn.Module, batch: Tensor, limit: int) -> None:
    """Raise if a model's output is not a function of its own sample."""
    reason = describe_dependence(lambda part: _outputs(model, part).detach(), batch, limit)
    if reason == CHANGES:
        raise Undefined(f"{CHANGES}: it is not a function of the input")
    if reason:
        raise Undefined(f"the output: {reason}, and {_SAMPLE_BY_SAMPLE}")


def _refuse_mixing(model: nn.Module, batch: Tensor, limit: int | None) -> None:
    """Raise if a model's output for a sample depends on the other samples in its batch."""

    def rows(part: Tensor) -> dict[str, Tensor]:
        return {"the output": _outputs(model, part)}

    if limit is not None:
        check_batch_independence(rows, batch, limit)
    else:
        check_batch_independence(
            rows, batch, len(batch), because=_SAMPLE_BY_SAMPLE, allow_random=True
        )


def _function(
    model: nn.Module, limit: int | None, precision: Callable[[], AbstractContextManager[None]]
) -> Callable[[Tensor], Tensor]:
    """Return a model as a function that runs at most `limit` samples at a time."""

    def function(inputs: Tensor) -> Tensor:
        # The network has run on these inputs before, without gradients.
        needs_gradient = torch.is_grad_enabled() and inputs.requires_grad
        with precision(), undefined_without_gradient() if needs_gradient else nullcontext():
            if limit is None or len(inputs) <= limit:
                return _outputs(model, inputs)
            parts = torch.split(inputs, microbatch_sizes(len(inputs), limit))
            return torch.cat([_outputs(model, part) for part in parts])

    return function


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    # Copied, since a first layer that works in place would change the caller's data.
    output = validated_outputs(model(inputs.clone()), len(inputs))
    return output.flatten(1) if output.dim() > 1 else output[:, None]


def observe(probe_pass: ProbePass) -> ProbeFacts:
    """Pass a subject's model, as a function, to listeners along with shuffled batches of inputs."""
    distinct = DistinctRows()
    needs_sources = any(getattr(listener, "replicated", False) for listener in probe_pass.listeners)
    if needs_sources:
        distinct.add(probe_pass.samples.inputs)

    def on_observation(observation: FunctionBatch) -> None:
        if needs_sources:
            observation = replace(observation, sources=distinct.add(observation.inputs))
        probe_pass.show(observation)

    def batches() -> Iterator[Tensor]:
        for batch in probe_pass.samples.shuffled(int(probe_pass.options["batch"])):
            yield batch.to(resources.device)
            probe_pass.step()

    resources = probe_pass.resources
    samples = observe_function(
        probe_pass.model,
        batches(),
        on_observation,
        memory=resources.memory,
        feasible_sizes=resources.feasible_sizes,
    )
    return ProbeFacts(samples=samples)
