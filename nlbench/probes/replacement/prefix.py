"""Repeated forward passes with one call replaced, which share the computation before it.

The outputs of module calls before the replaced one are taken from a recorded forward pass.
Operations between modules are run again, which is cheap and repeats their in-place effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nlbench.introspection.function_calls import get_storage_ref, is_transformed, tensors_in
from nlbench.introspection.module_stack import CallId
from nlbench.introspection.random_state import preserve_rng_state, rng_state

from .interception import (
    Around,
    CallInterception,
    ReplaceableCall,
    get_tensor,
    replace_tensor,
    shares_memory,
)

Replacement = Callable[[Tensor], Tensor]
"""Maps the input of a call to the output that replaces its own."""

Substitute = Callable[[Tensor, Callable[[], Any]], Any]
"""Maps the input of a call, and a function that runs it, to the call's output."""


def run_replaced(
    interception: CallInterception, inputs: Tensor, maps: Mapping[CallId, Replacement]
) -> Any:
    """Run a model with the outputs of some calls replaced, and return its output.

    An in-place call writes the replacement into its input.
    """

    def replace(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        if call not in maps:
            return compute()
        return replace_output(x, compute, maps[call], interception.results.get(call))

    return interception.run(inputs.clone(), replace)


def replace_output(
    x: Tensor, compute: Callable[[], Any], new: Replacement, key: int | str | None = None
) -> Any:
    """Replace an output of a call, keeping the others and its effect on the input.

    The output is an entry of what the call returns, or the first tensor if `key` is None.
    """
    replacement = new(x)  # Computed before the call, which may overwrite its input.
    output = compute()
    tensor = get_tensor(output, key)
    if shares_memory(tensor, x):
        return replace_tensor(output, key, tensor.copy_(replacement))
    return replace_tensor(output, key, replacement.to(tensor))


@dataclass
class _ModuleCall:
    """A module call, with the times at which it starts and ends."""

    begin: int
    end: int = 0
    is_cacheable: bool = True
    is_changed_later: bool = False
    bytes: int = 0
    parents: tuple[CallId, ...] = ()
    calls_inside: Counter[str] = field(default_factory=Counter)
    # Tensors that it returns, their versions and their content.
    returned: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)


class SharedPrefix:
    """Forward passes with one call replaced, which share the outputs of earlier calls.

    A pass with a few inputs determines what can be cached.
    """

    def __init__(
        self, model: nn.Module, places: Sequence[ReplaceableCall], example: Tensor
    ) -> None:
        self._interception = CallInterception(model, places)
        self._device = example.device
        self._calls: dict[CallId, _ModuleCall] = {}
        self._times: dict[CallId, int] = {}
        self._clock = 0
        # Memory that activation calls write into.
        self._written: set[StorageWeakRef | None] = set()
        replaceable = {place.call for place in places}
        before = rng_state(example.device)
        with preserve_rng_state(example.device):
            running: list[CallId] = []
            output = self._interception.run(example.clone(), self._structure(replaceable, running))
            # False if every pass runs the whole network, because it generates random numbers or a
            # pass with cached outputs differs from one without.
            self.is_cached = rng_state(example.device) == before
        for call in self._calls.values():
            call.is_changed_later = any(self._is_changed(*each) for each in call.returned)
            call.returned.clear()
        self._written.clear()
        self._needed = self._needed_calls()
        total = sum(self._calls[call].bytes for call in self._needed)
        # Size of the cached outputs for one sample.
        self.bytes_per_sample = max(1, total // max(1, len(example)))
        size = sum(tensor.nbytes for tensor in tensors_in((output,)))
        # Size of the network's output for one sample.
        self.output_bytes = max(1, size // max(1, len(example)))
        self._outputs: dict[CallId, Any] = {}
        self._inputs = example
        if not self.is_cached or not self._is_exact(places):
            self.disable()

    def _is_changed(self, tensor: Tensor, version: int, content: Tensor) -> bool:
        """Return True if a tensor was changed, also through ``.data``, which keeps the version."""
        if _version(tensor) != version or get_storage_ref(tensor) in self._written:
            return True
        # Others, such as nested tensors, can't be compared.
        is_comparable = tensor.layout == torch.strided and not tensor.is_nested
        return is_comparable and not is_transformed(tensor) and not torch.equal(tensor, content)

    def _is_exact(self, places: Sequence[ReplaceableCall]) -> bool:
        """Return True if cached passes without a replacement reproduce the output.

        They follow a pass with all places changed, the last place first, so that none of them reads
        a feature that a skipped module has kept, without finding it changed.
        """
        expected = self.record(self._inputs)
        replaceable = {place.call for place in places}
        results = self._interception.results

        def change(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            output = compute()
            return _changed(output, results.get(call)) if call in replaceable else output

        try:
            with preserve_rng_state(self._device):
                self._interception.run(self._inputs.clone(), change)
            return all(
                _are_close(self._run_from(place.call, {}), expected)
                for place in sorted(places, key=lambda p: self._times[p.call], reverse=True)
            )
        except Exception:
            # A module may fail in any way if it depends on state set by a skipped module.
            return False

    def disable(self) -> None:
        """Disable the cache, so that every later pass runs the whole network."""
        self.is_cached = False
        self._needed = set()
        self._outputs = {}

    def _structure(self, replaceable: set[CallId], running: list[CallId]) -> Around:
        def replace(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            self._clock += 1
            if call in replaceable:
                self._times[call] = self._clock
            if call.position is not None:
                output = compute()
                if any(shares_memory(tensor, x) for tensor in tensors_in((output,))):
                    self._written.add(get_storage_ref(x))
                return output
            entry = self._calls[call] = _ModuleCall(self._clock, parents=tuple(running))
            running.append(call)
            calls_before = Counter(self._interception.module_calls)
            # In-place modules modify their first tensor.
            version = _version(x)
            output = compute()
            running.pop()
            self._clock += 1
            entry.end = self._clock
            tensors = list(tensors_in((output,))) if _is_plain(output) else []
            entry.is_cacheable = (
                bool(tensors)
                and not any(tensor.is_inference() for tensor in (x, *tensors))
                and _version(x) == version
                and not any(shares_memory(tensor, x) for tensor in tensors)
            )
            entry.bytes = sum(tensor.nbytes for tensor in tensors)
            entry.returned = [(tensor, _version(tensor), tensor.clone()) for tensor in tensors]
            entry.calls_inside = self._interception.module_calls - calls_before
            return output

        return replace

    def _needed_calls(self) -> set[CallId]:
        """Return the calls whose outputs are read from the cache in at least one forward pass."""
        times = self._times.values()
        needed = set()
        for call, entry in self._calls.items():
            ends = (self._calls[parent] for parent in reversed(entry.parents))
            until = next((parent.end for parent in ends if parent.is_cacheable), self._clock + 1)
            if entry.is_cacheable and any(entry.end < time < until for time in times):
                needed.add(call)
        return needed

    def record(self, inputs: Tensor) -> Any:
        """Run the network on a batch, cache the outputs for later passes, and return its output."""
        self._inputs = inputs
        self._outputs = {}

        def replace(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            output = compute()
            if call in self._needed:
                is_changed = self._calls[call].is_changed_later
                self._outputs[call] = _clone(output) if is_changed else output
            return output

        with preserve_rng_state(self._device):
            return self._interception.run(inputs.clone(), replace)

    def run(self, place: ReplaceableCall, new: Replacement) -> Any:
        """Run the network on the recorded batch with one call, or span of calls, replaced."""
        if place.last is None:
            return self._run_from(
                place.call,
                {place.call: lambda x, compute: replace_output(x, compute, new, place.result)},
            )
        replacements: list[Tensor] = []

        def begin(x: Tensor, compute: Callable[[], Any]) -> Any:
            replacements.append(new(x))
            return compute()

        def end(x: Tensor, compute: Callable[[], Any]) -> Any:
            return replace_output(x, compute, lambda _: replacements.pop(), place.result)

        return self._run_from(place.call, {place.call: begin, place.last: end})

    def _run_from(self, place: CallId, substitutes: Mapping[CallId, Substitute]) -> Any:
        """Run the network with some calls substituted, of which `place` is the first."""
        time = self._times[place]

        def replace(call: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            if call in substitutes:
                return substitutes[call](x, compute)
            if call not in self._outputs or self._calls[call].end > time:
                return compute()
            entry = self._calls[call]
            self._interception.module_calls.update(entry.calls_inside)
            output = self._outputs[call]
            return _clone(output) if entry.is_changed_later else output

        with preserve_rng_state(self._device):
            return self._interception.run(self._inputs.clone(), replace)


def _version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor. 0 in inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def _is_plain(output: Any) -> bool:
    """Return True for a tensor, or for a tuple or list of tensors and None."""
    if isinstance(output, Tensor):
        return True
    return type(output) in (tuple, list) and all(
        value is None or isinstance(value, Tensor) for value in output
    )


def _clone(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    return type(output)(None if value is None else value.clone() for value in output)


def _changed(output: Any, key: int | str | None) -> Any:
    """Change one tensor of an output, in a way that no normalisation undoes."""
    tensor = get_tensor(output, key)
    waves = torch.arange(tensor.numel(), device=tensor.device).float().cos().reshape(tensor.shape)
    return replace_tensor(output, key, tensor + (waves * (1 + tensor.abs().max())).to(tensor))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _are_close(output: Any, expected: Any) -> bool:
    return all(
        torch.allclose(_real(a), _real(b), rtol=1e-4, atol=1e-5 * float(b.abs().max()))
        for a, b in zip(tensors_in((output,)), tensors_in((expected,)), strict=True)
        if a.numel()
    )
