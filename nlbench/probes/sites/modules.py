"""Places that are module calls: blocks, their attention and MLPs, or any modules.

Places are found by structure. Blocks are the members of the longest module list that preserve the
shape of their input. Inside a block, attention is the child that mixes positions and the MLP the
child that does not. To tell them apart, each child's input is changed at some positions.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nlbench.errors import RequestError, Undefined, nearest
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.axes import Layouts, batch_first, whole_arguments
from nlbench.introspection.function_calls import (
    FunctionCall,
    get_storage_ref,
    is_transformed,
    unobserved_calls,
)
from nlbench.introspection.model_state import evaluation_mode, refuse_unobservable
from nlbench.introspection.module_stack import CallId, ModuleCall, ModuleStack
from nlbench.introspection.wrappers import through_wrappers

from .sites_probe import parse_lengths, parse_places

# A child mixes positions if changing some positions changes its output at the others by more than
# this many eps of its maximum output. In a mixture of experts, rounding alone changes the output,
# because the experts receive different numbers of tokens.
MIXING_TOLERANCE_EPS = 2**10

REORDERED = "the network reorders the samples of a batch before it"


@dataclass(frozen=True)
class Axes:
    """Axes of a tensor."""

    batch: int
    channel: int  # channel axis after the batch axis is moved to 0
    assumed: bool = False  # True if no operation determines the channel axis
    problem: str = ""  # why its rows belong to unknown samples

    def rows(self, tensor: Tensor) -> Tensor:
        """Reshape a tensor to (n, positions, channels)."""
        moved = batch_first(tensor, self.batch).movedim(self.channel, -1)
        return moved.reshape(len(moved), -1, moved.shape[-1])


@dataclass(frozen=True, eq=False)
class ModulePlace:
    """A call of a module, or of consecutive modules, in one forward pass."""

    # Path of the module, h.0.mlp; its second call is h.0.mlp:1. An MLP whose layers are several
    # children of its block is named after the first and the last: 0.linear1..linear2. So is a span
    # of blocks: layers.2..5.
    name: str
    kind: str  # block, mlp, attention, span or module
    module: nn.Module  # the module that receives the input
    last: nn.Module  # the module that returns the output, usually the same module
    call: int  # index of the call of each of the two modules in a forward pass, from 0
    argument: int | str  # position or keyword of the input among the arguments of `module`
    # Position or key of the output in the return value of `last`; None if it is the whole value.
    result: int | str | None
    # before, after: axes of the input and the output
    before: Axes
    after: Axes
    shape: tuple[int, ...]  # shape of one input sample

    @property
    def problem(self) -> str:
        """Why the place can't be measured, or ""."""
        return self.before.problem or self.after.problem

    def get_input(self, call: ModuleCall) -> Tensor:
        """Return the input from the arguments of a call of `module`."""
        return dict(call.arguments())[self.argument]

    def get_output(self, returned: Any) -> Tensor:
        """Return the output from the return value of `last`."""
        return returned if self.result is None else returned[self.result]

    def set_output(self, returned: Any, output: Tensor) -> Any:
        """Replace the output in the return value of `last`."""
        return replace_entry(returned, self.result, output)


def replace_entry(returned: Any, key: int | str | None, value: Any) -> Any:
    """Replace an entry of a module's return value, or all of it if the key is None.

    Examples
    --------
    >>> replace_entry((1, 2), 1, 3), replace_entry({"hidden": 1}, "hidden", 3)
    ((1, 3), {'hidden': 3})
    """
    if key is None:
        return value
    if isinstance(returned, Mapping):
        copied: Any = copy.copy(returned)
        copied[key] = value
        return copied
    entries = list(returned)
    entries[int(key)] = value
    is_named = isinstance(returned, tuple) and hasattr(returned, "_make")
    return type(returned)._make(entries) if is_named else type(returned)(entries)


@through_wrappers
def find_places(model: nn.Module, example: Tensor, of: str = "blocks") -> list[ModulePlace]:
    """Find the places in a model, in call order.

    Comma-separated kinds of places are ``blocks``, ``mlp``, ``attention``, ``spans:L`` or
    ``spans:A..B`` for L, or A to B, consecutive blocks of a list, and ``modules:GLOB``, where the
    glob matches module paths. Places whose rows belong to unknown samples have a `problem`. Two
    samples are enough as an example. Raise Undefined if there are no such places.

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> x = torch.randn(2, 5, 8)
    >>> [place.name for place in find_places(model, x, "blocks")]
    ['layers.0', 'layers.1']
    >>> [place.name for place in find_places(model, x, "attention,mlp")][:2]
    ['layers.0.self_attn', 'layers.0.linear1..linear2']
    """
    names = parse_places(of)
    if "activations" in names:
        raise RequestError("activation calls aren't modules; see nlbench.probes.sites.list_sites")
    refuse_unobservable(model)
    with evaluation_mode(model), without_fast_path():
        calls = _record_calls(model, example)
        by_name: dict[str, tuple[int, ModulePlace]] = {}
        for name in names:
            for index, place in _list_places(name, model, example, calls):
                by_name.setdefault(place.name, (index, place))
    return [place for _, place in sorted(by_name.values(), key=lambda entry: entry[0])]


def _list_places(
    name: str, model: nn.Module, example: Tensor, calls: Sequence[_Call]
) -> list[tuple[int, ModulePlace]]:
    if name.startswith("modules:"):
        return _match_modules(name.removeprefix("modules:"), model, calls)
    blocks = _blocks(model, calls)
    if not blocks:
        raise Undefined(
            "the network has no blocks: no module list has members that keep (n, positions, d)"
        )
    if name == "blocks":
        return [(call.index, call.place("block")) for call in blocks]
    if name.startswith("spans:"):
        return _spans(blocks, parse_lengths(name))
    # In convolutional blocks, every layer may mix positions.
    blocks = [call for call in blocks if call.has_tokens]
    parts = _parts(model, example, calls, blocks) if blocks else []
    places = [(index, place) for index, place in parts if place.kind == name]
    if not places:
        mark = (
            "mixes positions" if name == "attention" else "has two weights and mixes no positions"
        )
        raise Undefined(
            f"the network's blocks have no {name}: no child of a block of tokens {mark}"
        )
    return places


def _spans(blocks: Sequence[_Call], lengths: range) -> list[tuple[int, ModulePlace]]:
    """Return the spans of consecutive blocks of one list, by their first block and length."""
    runs = [
        list(run)
        for _, run in itertools.groupby(
            blocks, key=lambda call: (call.path.rpartition(".")[0], call.number)
        )
    ]
    spans = []
    for run in runs:
        for start, first in enumerate(run):
            for length in lengths:
                if start + length <= len(run):
                    last = run[start + length - 1]
                    spans.append((first.index, first.place("span", last)))
    if not spans:
        longest = max(len(run) for run in runs)
        raise Undefined(f"the network has no {lengths[0]} consecutive blocks, at most {longest}")
    return spans


def _match_modules(
    glob: str, model: nn.Module, calls: Sequence[_Call]
) -> list[tuple[int, ModulePlace]]:
    matching = [call for call in calls if call.path and fnmatch.fnmatchcase(call.path, glob)]
    if not matching:
        paths = [path for path, _ in model.named_modules() if path]
        raise RequestError(f"sites.of: no module is called '{glob}'{nearest(glob, paths)}")
    maps = [call for call in matching if call.is_map]
    if not maps:
        raise Undefined(f"no module '{glob}' maps a tensor with a batch axis to another one")
    return [(call.index, call.place("module")) for call in maps]


@dataclass(frozen=True)
class _Memory:
    """The memory of a tensor, which it doesn't keep alive."""

    storage: StorageWeakRef | None
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Memory:
        storage = get_storage_ref(tensor)
        return cls(storage, 0 if storage is None else int(tensor.storage_offset()))

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor starts at the same place."""
        return self.storage is not None and self == _Memory.of(tensor)


@dataclass(eq=False)
class _Call:
    """One call of a module in a forward pass."""

    path: str
    module: nn.Module
    number: int
    index: int
    parent: _Call | None
    # Shapes of the floating-point tensors among the arguments, with their axes.
    inputs: dict[int | str, tuple[torch.Size, Axes | None]]
    argument: int | str | None = None
    result: int | str | None = None
    shapes: tuple[torch.Size, torch.Size] = field(default=(torch.Size(), torch.Size()))
    before: Axes | None = None
    after: Axes | None = None
    # Entries of the return value that have the input's shape, if there are several, with their
    # axes and memory.
    choices: dict[int | str, tuple[Axes | None, _Memory]] = field(default_factory=dict)
    # For each argument that is a choice of an earlier call of the same list: that call and entry.
    received: dict[int | str, tuple[_Call, int | str]] = field(default_factory=dict)

    @property
    def list_path(self) -> str:
        """Path of the module list that the module may be a member of."""
        return self.path.rpartition(".")[0]

    def choose(self, key: int | str) -> None:
        """Take another entry of the return value as the output."""
        self.result = key
        self.set_axes(self.choices[key][0])

    def set_axes(self, after: Axes | None) -> None:
        """Set the axes of input and output, given those of the output."""
        assert self.argument is not None
        before = self.inputs[self.argument][1]
        if before is not None and after is not None and self.shapes[0] == self.shapes[1]:
            # The axes determined for one of the two tensors also apply to the other.
            shared = after if before.assumed else before
            before = replace(shared, problem=before.problem)
            after = replace(shared, problem=after.problem)
        self.before = before
        self.after = after

    @property
    def is_map(self) -> bool:
        """True if input and output are tensors that depend on the samples."""
        return self.before is not None and self.after is not None

    @property
    def preserves_shape(self) -> bool:
        """True if input and output have the same shape, including positions."""
        return self.is_map and self.shapes[0] == self.shapes[1] and len(self.shapes[0]) > 2

    @property
    def has_tokens(self) -> bool:
        """True if channels are along the last axis, as in a sequence of tokens."""
        return self.before is not None and self.before.channel == len(self.shapes[0]) - 1

    @property
    def is_composite(self) -> bool:
        """True unless the module is a single layer."""
        if any(True for _ in self.module.children()):
            return True
        is_torch = type(self.module).__module__.startswith("torch.nn.")
        return not is_torch and any(p.ndim > 1 for p in self.module.parameters())

    @property
    def weights(self) -> int:
        """Number of weight matrices."""
        return sum(parameter.ndim > 1 for parameter in self.module.parameters())

    @property
    def width(self) -> int:
        """Number of channels of the input."""
        assert self.before is not None
        return batch_first(torch.empty(self.shapes[0], device="meta"), self.before.batch).shape[
            self.before.channel
        ]

    def is_inside(self, others: set[_Call]) -> bool:
        """Return True if one of the other calls makes this call, directly or indirectly."""
        return self.parent is not None and (self.parent in others or self.parent.is_inside(others))

    def place(self, kind: str, last: _Call | None = None) -> ModulePlace:
        """Return the place that spans this call to `last`, or this call alone by default."""
        last = last or self
        assert self.before is not None
        assert last.after is not None
        assert self.argument is not None
        number = f":{self.number}" if self.number else ""
        name = self.path
        if last is not self:
            parents = self.path.split("."), last.path.split(".")
            shared = 0
            while parents[0][shared] == parents[1][shared]:
                shared += 1
            name += ".." + ".".join(parents[1][shared:])
        shape = list(self.shapes[0])
        del shape[self.before.batch]
        return ModulePlace(
            name + number,
            kind,
            self.module,
            last.module,
            self.number,
            self.argument,
            last.result,
            self.before,
            last.after,
            tuple(shape),
        )


def _record_calls(model: nn.Module, example: Tensor) -> list[_Call]:
    """Run a model, and record its module calls."""

    def record(inputs: Tensor) -> _CallRecorder:
        recorder = _CallRecorder(model, inputs)
        with recorder.hooked(), recorder:
            model(inputs.clone())
        _choose_streams(recorder.calls)
        return recorder

    recorder = record(example)
    if recorder.layouts.reorders:
        # Samples that are sorted may be in order already.
        for call, other in zip(recorder.calls, record(example.flip(0)).calls, strict=False):
            if other.before and other.before.problem:
                call.before = other.before
            if other.after and other.after.problem:
                call.after = other.after
    return recorder.calls


class _CallRecorder(ModuleStack):
    """Records the module calls of a forward pass, with the axes of their tensors."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__(model)
        self.layouts = Layouts(len(inputs))
        constants = [*model.parameters(), *model.buffers()]
        self.layouts.begin(inputs, constants, whole=whole_arguments(model))
        self.calls: list[_Call] = []
        self._recorded: dict[CallId, _Call] = {}
        # The call that returned last, by the path of its list.
        self._returned: dict[str, _Call] = {}

    def around(self, call: ModuleCall) -> Any:
        """Record the inputs and the output of a call."""
        with unobserved_calls():
            tensors = filter(lambda pair: _is_float(pair[1]), call.arguments())
            inputs = {key: (tensor.shape, self.axes(tensor)) for key, tensor in tensors}
        path, number, _ = call.id
        parent = self._recorded[self.stack[-1].id] if self.stack else None
        recorded = _Call(path, call.module, number, len(self.calls), parent, inputs)
        with unobserved_calls():
            self._receive(recorded, call)
        self.calls.append(recorded)
        self._recorded[call.id] = recorded
        output = super().around(call)
        with unobserved_calls():
            _record_output(recorded, output, self)
        self._returned[recorded.list_path] = recorded
        return output

    def _receive(self, recorded: _Call, call: ModuleCall) -> None:
        """Find the arguments that the previous call of the same list has returned."""
        previous = self._returned.get(recorded.list_path)
        if previous is None or not previous.choices:
            return
        for argument, tensor in call.arguments():
            if argument not in recorded.inputs:
                continue
            for key, (_, memory) in previous.choices.items():
                if memory.holds(tensor):
                    recorded.received[argument] = previous, key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        output = call.run()
        self.layouts.follow(call, output)
        return output

    def axes(self, tensor: Tensor) -> Axes | None:
        """Return the axes of a tensor, or None if it doesn't depend on the samples."""
        # Inside torch.func.vmap an axis is hidden, maybe that of the samples.
        if tensor.ndim < 2 or is_transformed(tensor) or self.layouts.is_constant(tensor):
            return None
        try:
            batch, channel, assumed = self.layouts.describe(tensor)
        except Undefined as reason:
            return Axes(0, tensor.ndim - 1, True, str(reason))
        problem = REORDERED if self.layouts.order(tensor) is not None else ""
        return Axes(batch, channel + 1 if channel < batch else channel, assumed, problem)


def _record_output(call: _Call, returned: Any, recorder: _CallRecorder) -> None:
    """Record the output of a call, and which of its arguments is the input."""
    outputs = [(None, returned)] if isinstance(returned, Tensor) else list(_entries(returned))
    floats = [(key, value) for key, value in outputs if _is_float(value)]
    if not floats or not call.inputs:
        return
    call.result, output = floats[0]
    same = [key for key, (shape, _) in call.inputs.items() if shape == output.shape]
    call.argument = same[0] if same else next(iter(call.inputs))
    call.shapes = (call.inputs[call.argument][0], output.shape)
    call.set_axes(recorder.axes(output))
    similar = [(key, v) for key, v in floats if key is not None and v.shape == output.shape]
    if same and len(similar) > 1:
        call.choices = {key: (recorder.axes(value), _Memory.of(value)) for key, value in similar}


def _choose_streams(calls: Sequence[_Call]) -> None:
    """Choose the output that the next call of a list receives as its input, among several."""
    streams: dict[_Call, int | str] = {}
    for call in calls:
        if call.argument in call.received:
            previous, key = call.received[call.argument]
            streams[previous] = key
    usual = {(call.list_path, type(call.module)): key for call, key in streams.items()}
    for call in calls:
        # The last call of a list returns what the others do.
        stream = streams.get(call, usual.get((call.list_path, type(call.module))))
        if stream in call.choices:
            call.choose(stream)


def _is_float(value: object) -> bool:
    # Nested tensors have no shape.
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested


def _entries(values: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(values, Mapping):
        yield from values.items()
    elif isinstance(values, tuple | list):
        yield from enumerate(values)


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _blocks(model: nn.Module, calls: Sequence[_Call]) -> list[_Call]:
    """Return the calls of the members of the longest module list and of similar lists."""
    modules = dict(model.named_modules())
    candidates = []
    for call in calls:
        parent = modules.get(call.path.rpartition(".")[0])
        if call.path and isinstance(parent, _LISTS) and call.preserves_shape and call.is_composite:
            candidates.append(call)
    # A sequence of blocks is a stage, not a block.
    stages = {
        call
        for call in candidates
        if type(call.module) is nn.Sequential
        and any(other.is_inside({call}) for other in candidates)
    }
    lists: dict[str, list[_Call]] = defaultdict(list)
    for call in candidates:
        if call not in stages:
            lists[call.path.rpartition(".")[0]].append(call)
    if not lists:
        return []
    # Among equally long lists, take the outermost, whose members are called first.
    longest = max(
        lists.values(), key=lambda calls: max(Counter(type(call.module) for call in calls).values())
    )
    classes = {type(call.module) for call in longest}
    reference = longest[0]
    chosen = {call for member in lists.values() for call in member if type(call.module) in classes}
    chosen = {call for call in chosen if not call.is_inside(chosen)}
    for members in lists.values():
        # Include lists of the same width, such as a decoder's in addition to an encoder's.
        is_stack = len(reference.shapes[0]) == 3 and all(
            len(c.shapes[0]) == 3 and c.width == reference.width and not c.is_inside(chosen)
            for c in members
        )
        holds_blocks = any(call.is_inside(set(members)) for call in chosen)
        if is_stack and not holds_blocks:
            chosen |= set(members)
    return sorted(chosen, key=lambda call: call.index)


def _parts(
    model: nn.Module, example: Tensor, calls: Sequence[_Call], blocks: Sequence[_Call]
) -> list[tuple[int, ModulePlace]]:
    """Return the attention and the MLP of each block."""
    children: dict[_Call, list[_Call]] = defaultdict(list)
    for call in calls:
        if call.parent is not None:
            children[call.parent].append(call)
    parts_of_block: dict[_Call, list[tuple[int, ModulePlace]]] = {}
    level = {block: block for block in blocks}
    # Maximum number of nested single-child modules to search for attention and MLP.
    for depth in range(3):
        composite = {}
        for block, inner in level.items():
            inside = children[inner]
            composite[block] = [c for c in inside if c.preserves_shape and c.is_composite]
        members = [call for part in composite.values() for call in part]
        test = _MixingTest(model, members)
        with test.hooked():
            for _ in range(2):
                test.restart()
                model(example.clone())
        wrapped = {}
        for block, inner in level.items():
            parts = list(_find_parts(inner, composite[block], test.mixing, children))
            has_both = len({place.kind for _, place in parts}) == 2
            if has_both or depth == 0:
                parts_of_block[block] = parts
            if not has_both and len(composite[block]) == 1:
                # The only child may contain both.
                wrapped[block] = composite[block][0]
        level = wrapped
    return [part for parts in parts_of_block.values() for part in parts]


def _find_parts(
    block: _Call,
    composite: Sequence[_Call],
    mixing: set[_Call],
    children: Mapping[_Call, Sequence[_Call]],
) -> Iterator[tuple[int, ModulePlace]]:
    """Yield the attention and the MLP among the children of a block."""
    mlps = [call for call in composite if call not in mixing and call.weights > 1]
    yield from ((call.index, call.place("attention")) for call in composite if call in mixing)
    if mlps:
        yield from ((call.index, call.place("mlp")) for call in mlps)
        return
    layers = [
        call
        for call in _layers(block, children)
        if call not in mixing and not call.is_inside(mixing)
    ]
    first = next((call for call in layers if call.shapes[0] == block.shapes[0]), None)
    last = next((call for call in layers[::-1] if call.shapes[1] == block.shapes[0]), None)
    if first and last and first.index < last.index and first.number == last.number:
        yield first.index, first.place("mlp", last)


def _layers(call: _Call, children: Mapping[_Call, Sequence[_Call]]) -> Iterator[_Call]:
    """Yield the calls of single linear layers inside a call."""
    for child in children.get(call, ()):
        weights = [p for p in child.module.parameters(recurse=False) if p.ndim > 1]
        if children.get(child):
            yield from _layers(child, children)
        elif len(weights) == 1 and weights[0].ndim == 2 and child.is_map:
            yield child


class _MixingTest(ModuleStack):
    """Two passes that find the calls in which positions depend on each other.

    The second pass changes the first half of the positions in every input, and compares the outputs
    at the other half. Each call still returns its first output, so later calls are not affected.
    """

    def __init__(self, model: nn.Module, calls: Sequence[_Call]) -> None:
        super().__init__(model)
        self.mixing: set[_Call] = set()
        self._calls = {CallId(call.path, call.number): call for call in calls}
        self._outputs: dict[_Call, Tensor] = {}

    def around(self, call: ModuleCall) -> Any:
        """In the second pass, change the inputs of a call and compare its outputs."""
        recorded = self._calls.get(call.id)
        if recorded is None:
            return super().around(call)
        if recorded in self._outputs:
            call.args, call.kwargs = self._changed(recorded, call)
        output = super().around(call)
        place = recorded.place("module")
        tensor = place.get_output(output)
        if recorded not in self._outputs:
            self._outputs[recorded] = tensor.clone()
            return output
        if _differs(place.after.rows(tensor), place.after.rows(self._outputs[recorded])):
            self.mixing.add(recorded)
        return place.set_output(output, self._outputs[recorded])

    def _changed(self, recorded: _Call, call: ModuleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with other values at the first half of the positions."""
        axes = recorded.before
        assert axes is not None
        changed: dict[int, Tensor] = {}

        def change(value: Any) -> Any:
            if not _is_float(value) or value.ndim != len(recorded.shapes[0]):
                return value
            if batch_first(value, axes.batch).shape[axes.channel] != recorded.width:
                return value
            # An input that is passed as query, key and value remains a single tensor.
            return changed.setdefault(id(value), _changed_half(value, axes))

        return tuple(map(change, call.args)), {k: change(v) for k, v in call.kwargs.items()}


def _changed_half(tensor: Tensor, axes: Axes) -> Tensor:
    """Return a copy with different values at the first half of the positions."""
    moved = batch_first(tensor.clone(), axes.batch).movedim(axes.channel, -1)
    rows = moved.reshape(len(moved), -1, moved.shape[-1]).clone()
    half = -(-rows.shape[1] // 2)
    rows[:, :half] = -rows[:, :half].roll(1, -1)
    changed = rows.reshape(moved.shape).movedim(-1, axes.channel)
    return changed.movedim(0, axes.batch)


def _differs(rows: Tensor, before: Tensor) -> bool:
    """Return True if outputs (n, p, d) differ at the second half of the positions."""
    half = -(-rows.shape[1] // 2)
    values, expected = (part[:, half:].nan_to_num() for part in (rows, before))
    if not values.numel():
        return False
    tolerance = MIXING_TOLERANCE_EPS * torch.finfo(rows.dtype).eps * expected.abs().max()
    return bool((values - expected).abs().max() > tolerance)
