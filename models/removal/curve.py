"""Remove a network's calls one at a time, and evaluate the remaining network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nlbench.errors import RequestError, Undefined
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.probes.replacement import AffineFit, AffineMap, CallInterception, ReplaceableCall
from nlbench.probes.replacement.fits import rows_of
from nlbench.probes.replacement.interception import first_tensor
from nlbench.probes.replacement.prefix import replace_output, run_replaced

IGNORED_LABEL = -100

CHUNK_ROWS = 1024
"""Maximum number of rows of probabilities in memory, since vocabularies can be large."""

CALL_WEIGHTS = ("calls", "units", "positions", "flops")
"""Ways to weight calls when computing the remaining fraction of a network."""


@dataclass(frozen=True)
class Step:
    """A network with some calls removed.

    Parameters
    ----------
    removed : str
        Name of the call that was removed last; empty for the original network.
    remaining : mapping of str to float
        Remaining fraction, keyed by `CALL_WEIGHTS`.
    accuracy : float or None
        None without labels.
    kl : float
        KL divergence of the class probabilities from those of the original network, in nats.
    loss : float or None
        Cross-entropy in nats.
    """

    removed: str
    remaining: Mapping[str, float]
    accuracy: float | None
    kl: float
    loss: float | None


def refitted_maps(
    model: nn.Module, calls: Sequence[ReplaceableCall], inputs: Tensor, *, is_full: bool = False
) -> dict[str, AffineMap]:
    """Fit maps for some calls, each in the network whose earlier calls are already replaced.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode.
    inputs : tensor
        All samples to fit on, as one batch.
    is_full : bool
        Fit full maps, not per-channel maps.

    Returns
    -------
    dict of str to AffineMap
        Keyed by name, in call order.

    Raises
    ------
    nlbench.Undefined
        If a call doesn't occur on the samples, or there are too few rows to fit a full map.
    """
    by_call = {call.call: call for call in calls}
    maps: dict[str, AffineMap] = {}

    def replace(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        if identity not in by_call:
            return compute()
        call = by_call[identity]
        original, rows = x.clone(), rows_of(x, call.channel_axis)
        output = compute()
        y = first_tensor((output,))
        assert y is not None
        fit = AffineFit(is_full)
        fit.add(rows, rows_of(y, call.channel_axis))
        affine = fit.full() if is_full else fit.per_channel()
        if affine is None:
            raise Undefined(
                f"a full map at {call.name} requires at least {fit.min_rows:,} rows, but the "
                f"samples have {fit.rows:,}: raise --fit-samples (for text, also text.windows)"
            )
        maps[call.name] = affine
        return replace_output(x, lambda: output, lambda _: affine(original, call.channel_axis))

    CallInterception(model).run(inputs.clone(), replace)
    if missing := [call.name for call in calls if call.name not in maps]:
        raise Undefined(f"the network doesn't call {missing[0]} on the fitting samples")
    return maps


def weights_of_calls(
    model: nn.Module, calls: Sequence[ReplaceableCall], example: Tensor, *, is_full: bool = False
) -> dict[str, dict[str, float]]:
    """Return the weight of each call, keyed by `CALL_WEIGHTS` and name.

    A call's weight is 1 for ``calls``, its number of channels for ``units``, and the number of
    values that it computes per sample for ``positions``. For ``flops``, it
    is the number of operations in matrix products and convolutions since the previous call; they
    can be merged with the following ones once the call is removed. For modules, which are replaced
    by full maps, it is the number of operations inside the module.
    """
    counter, total = FlopCounterMode(display=False), 0
    by_call = {call.call: call for call in calls}
    flops: dict[str, float] = {}

    def replace(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        nonlocal total
        if is_full and identity in by_call:
            total = counter.get_total_flops()
        output = compute()
        if identity in by_call:
            so_far = counter.get_total_flops()
            flops[by_call[identity].name] = float(so_far - total)
            total = so_far
        return output

    with evaluation_mode(model), without_fast_path(), counter:
        CallInterception(model).run(example.clone(), replace)
    return {
        "calls": {call.name: 1.0 for call in calls},
        "units": {call.name: float(call.channels) for call in calls},
        "positions": {call.name: float(math.prod(call.shape)) for call in calls},
        "flops": flops,
    }


class Removal:
    """A network whose calls are removed one at a time.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    calls : sequence of ReplaceableCall
        See `nlbench.probes.replacement.find_calls`.
    fitting : tensor
        Samples to fit the maps on.
    inputs : tensor
        Samples to evaluate the networks on.
    labels : tensor or None
        -100 where there is nothing to predict.
    is_full : bool
        Replace calls by full maps, not by per-channel maps.

    Raises
    ------
    nlbench.RequestError
        If the outputs are not class logits, or the shape of the labels doesn't match theirs.

    Examples
    --------
    >>> from nlbench.probes.replacement import find_calls
    >>> model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Tanh()), torch.randn(8, 2)
    >>> removal = Removal(model, find_calls(model, inputs), inputs, inputs, None)
    >>> [step.remaining["calls"] for step in removal.curve(["2", "1"])]
    [1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[ReplaceableCall],
        fitting: Tensor,
        inputs: Tensor,
        labels: Tensor | None,
        *,
        is_full: bool = False,
    ) -> None:
        self._model, self._fitting, self._inputs, self._labels = model, fitting, inputs, labels
        self._calls, self._is_full = {call.name: call for call in calls}, is_full
        self._weights = weights_of_calls(model, calls, inputs[:2], is_full=is_full)
        self._original = outputs = self._outputs({})
        if outputs.ndim < 2 or outputs.shape[-1] < 2:
            raise RequestError(
                f"the network's outputs have shape {tuple(outputs.shape)}, expected class logits"
            )
        if labels is not None and labels.shape != outputs.shape[:-1]:
            raise RequestError(
                f"labels of shape {tuple(labels.shape)} don't match logits of shape "
                f"{tuple(outputs.shape)}"
            )

    def curve(self, order: Sequence[str]) -> list[Step]:
        """Remove calls in the given order, refit all maps after each, and evaluate each network."""
        return [self.step(order[:count]) for count in range(len(order) + 1)]

    def remaining(self, removed: Sequence[str]) -> dict[str, float]:
        """Return the fractions that remain after some calls are removed."""
        return {
            share: sum(w for name, w in weights.items() if name not in removed)
            / (sum(weights.values()) or 1.0)
            for share, weights in self._weights.items()
        }

    def total(self, share: str) -> float:
        """Return the weight of all calls together, of one of `CALL_WEIGHTS`."""
        return sum(self._weights[share].values())

    def maps(self, removed: Sequence[str]) -> dict[str, AffineMap]:
        """Fit the maps for the removed calls, keyed by name."""
        if not removed:
            return {}
        with evaluation_mode(self._model), without_fast_path():
            calls = [self._calls[name] for name in removed]
            return refitted_maps(self._model, calls, self._fitting, is_full=self._is_full)

    def step(self, removed: Sequence[str]) -> Step:
        """Evaluate the network with some calls removed."""
        outputs = self._outputs(self.maps(removed))
        chunks = [
            torch.split(logits.flatten(0, -2), CHUNK_ROWS) for logits in (self._original, outputs)
        ]
        kl = torch.cat([_divergence(*pair) for pair in zip(*chunks, strict=True)]).mean()
        accuracy = loss = None
        if self._labels is not None:
            is_counted = self._labels != IGNORED_LABEL
            accuracy = float((outputs.argmax(-1) == self._labels)[is_counted].double().mean())
            labels = torch.split(self._labels.flatten(), CHUNK_ROWS)
            losses = [
                nn.functional.cross_entropy(
                    logits.double(), targets, ignore_index=IGNORED_LABEL, reduction="sum"
                )
                for logits, targets in zip(chunks[1], labels, strict=True)
            ]
            loss = float(torch.stack(losses).sum() / is_counted.sum())
        name = removed[-1] if removed else ""
        return Step(name, self.remaining(removed), accuracy, float(kl), loss)

    def _outputs(self, maps: Mapping[str, AffineMap]) -> Tensor:
        replacements = {
            self._calls[name].call: partial(affine, channel_axis=self._calls[name].channel_axis)
            for name, affine in maps.items()
        }
        with evaluation_mode(self._model), without_fast_path():
            output = run_replaced(CallInterception(self._model), self._inputs, replacements)
        return validated_outputs(output, len(self._inputs))


def _divergence(before: Tensor, after: Tensor) -> Tensor:
    """Return the KL divergence between the class probabilities in each row."""
    p, q = (logits.double().log_softmax(-1) for logits in (before, after))
    return (p.exp() * (p - q)).sum(-1)


def area_under(steps: Sequence[Step], statistic: str, share: str = "calls") -> float:
    """Return the mean of a statistic over the remaining fraction, from all calls to none.

    Examples
    --------
    >>> whole = Step("", {"calls": 1.0}, 0.9, 0.0, None)
    >>> nothing = Step("1", {"calls": 0.0}, 0.5, 1.0, None)
    >>> round(area_under([whole, nothing], "accuracy"), 6)
    0.7
    """
    remaining = torch.tensor([step.remaining[share] for step in steps]).double()
    values = torch.tensor([getattr(step, statistic) for step in steps]).double()
    return float(-torch.trapezoid(values, remaining))
