"""Networks recorded as programs, kept for later calls with the same network.

Copying, recording and checking a small network takes longer than tracing it on a segment. A
recording is therefore reused as long as everything that it depends on is unchanged: the modules,
their attributes, and the contents of their tensors, which are compared, since version counters
would miss writes through ``parameter.data``. Global variables that a forward method reads are not
compared. A trace that disagrees with the network must be repeated with a new recording.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nlbench.introspection.memory import LiveBytes
from nlbench.introspection.model_copy import typed_copy

from .agreement import check_program
from .point_memory import PointMemory, measure_point_memory, min_point_memory, share_out
from .program import Program
from .recorder import record_program

MAX_RECORDINGS = 4
"""Maximum number of recordings that are kept."""
MAX_RECORDED_BYTES = 64 * 2**20
"""Size of a network's tensors above which its recording is not kept."""
MAX_CHECKED_POINTS = 16
"""Maximum number of points of a recording that are compared with the network at a time."""
MIN_CHECKED_POINTS = 4
"""Minimum number of points needed to compare a recording with the network."""


@dataclass(frozen=True)
class RecordedNetwork:
    """A network's copy, and the program recorded from it."""

    network: nn.Module  # copy in eval mode, in the dtype of the program
    program: Program
    needs: PointMemory  # memory required per point


# The only state of this package: recordings of the networks traced last, until these are deleted,
# with what they depend on.
_RECORDINGS: WeakKeyDictionary[nn.Module, tuple[RecordedNetwork, tuple[Any, ...], _ModelState]] = (
    WeakKeyDictionary()
)


def kept_recording(model: nn.Module, points: Tensor, dtype: torch.dtype) -> RecordedNetwork | None:
    """Return the recording of an earlier call if nothing that it depends on has changed.

    Only shape and device of the points matter.
    """
    with contextlib.suppress(TypeError):  # The model can't be hashed.
        recorded, settings, state = _RECORDINGS.get(model, (None, None, None))
        if state is not None and settings == _settings(points, dtype):
            if state.matches_model(model):
                return recorded
            del _RECORDINGS[model]
    return None


def record_network(
    model: nn.Module, points: Tensor, dtype: torch.dtype, memory: int | None
) -> RecordedNetwork:
    """Copy and record a network, check the program, and keep it for later calls."""
    network = typed_copy(model, dtype, points)
    state = _ModelState(model)
    state.keep_copies()
    with LiveBytes() as live:
        program = record_program(network, points[:1].clone())
    # Refuse a network that is too large before running it on more than one point.
    min_needs = replace(min_point_memory(program, dtype), constants=live.now)
    share_out(min_needs, points.device, memory, MAX_CHECKED_POINTS, needed=MIN_CHECKED_POINTS)
    needs = measure_point_memory(program, points)
    needs = replace(needs, constants=needs.constants + live.now)
    share_out(needs, points.device, memory, MAX_CHECKED_POINTS, needed=MIN_CHECKED_POINTS)
    check_program(program, network, torch.cat([points, points.mean(0, keepdim=True)]))
    recorded = RecordedNetwork(network, program, needs)
    if state.matches_model(model):
        with contextlib.suppress(TypeError):
            _RECORDINGS.pop(model, None)
            while len(_RECORDINGS) >= MAX_RECORDINGS:
                del _RECORDINGS[next(iter(_RECORDINGS))]
            _RECORDINGS[model] = recorded, _settings(points, dtype), state
    return recorded


def _settings(points: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return what a recording depends on in addition to the model."""
    is_autocast = torch.is_autocast_enabled(points.device.type)
    return dtype, points.shape[1:], points.device, torch.get_default_dtype(), is_autocast


class _ModelState:
    """Everything that a model's forward pass may depend on, apart from global variables."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []  # tensors of all modules
        # Names, classes and attributes of all modules; None if some can't be compared.
        self.structure: list[Any] | None = None
        with contextlib.suppress(_UnknownStateError):
            self.structure = [
                (name, type(module), type(module).forward, self._read_items(vars(module)))
                for name, module in model.named_modules(remove_duplicate=False)
            ]

    def keep_copies(self) -> None:
        """Replace the tensors by copies. Forget the state of a large model."""
        if sum(tensor.nbytes for tensor in self.tensors) > MAX_RECORDED_BYTES:
            self.structure = None
        if self.structure is not None:
            self.tensors = [tensor.detach().clone() for tensor in self.tensors]

    def matches_model(self, model: nn.Module) -> bool:
        """Return True if this state is known, and a model still has it."""
        if self.structure is None:
            return False
        other = _ModelState(model)
        is_equal = other.structure == self.structure
        return is_equal and all(map(torch.equal, other.tensors, self.tensors))

    def _read_items(self, items: Mapping[Any, Any]) -> tuple[Any, ...]:
        return tuple(
            (name if type(name) is str else self._read(name), self._read(value))
            for name, value in items.items()
            if name != "_modules"
        )

    def _read(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in _CONSTANTS or isinstance(value, enum.Enum):
            return kind, value
        if kind in _TENSORS and value.layout == torch.strided and not value.is_meta:
            self.tensors.append(value)
            return kind, value.shape, value.dtype, value.device
        if kind in _MAPPINGS:
            return kind, self._read_items(value)
        if kind in _SEQUENCES:
            return kind, tuple(map(self._read, value))
        if kind in _SETS and all(type(item) in _CONSTANTS for item in value):
            return kind, frozenset(value)
        if kind is types.FunctionType and value.__closure__ is None:
            return value, self._read(value.__defaults__), self._read(value.__kwdefaults__)
        if kind in _FUNCTIONS or isinstance(value, type):
            return kind, value
        raise _UnknownStateError


class _UnknownStateError(Exception):
    """An attribute may have state that can't be compared."""


_CONSTANTS = frozenset(
    {
        bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size,
        torch.layout, torch.memory_format,
    }
)  # fmt: skip
_TENSORS = frozenset({Tensor, nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict})
_SEQUENCES = frozenset({list, tuple})
_SETS = frozenset({set, frozenset})
_FUNCTIONS = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType})
