"""Inputs to a model: a tensor, several arguments, or the batches of a loader.

Probes support only models that map one tensor (n, ...) to one tensor. For other models, the
arguments are packed into one tensor and unpacked by a forward pre-hook, and a forward hook extracts
the logits from the output.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from nlbench.errors import RequestError, Undefined, nearest
from nlbench.introspection import pytree
from nlbench.introspection.model_output import output_parts
from nlbench.introspection.model_state import evaluation_mode, preserve_attributes
from nlbench.introspection.operations.registry import describe_function
from nlbench.introspection.random_state import preserve_rng_state

Constant = bool | int | float | str | None

IGNORED_LABEL = -100
"""Label for positions without a prediction, as in PyTorch's cross-entropy."""

WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that PyTorch can store, and hardly compute with."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype that holds the bits of a float, keyed by the float's size in bytes."""


class Arguments:
    """The arguments of one call of a model, for `nlbench.evaluate`.

    Parameters
    ----------
    *args, **kwargs
        Tensors, numbers, strings, None, containers of them, and objects whose attributes are
        tensors, such as dataclasses and graphs. The first may be a list of images of any sizes, one
        per sample, as detectors of objects take.
    samples : sequence of bool, optional
        For each argument, in order, whether the first axis of its tensors holds samples. Others are
        passed whole to every call, such as the edges of a graph. By default, tensors without axes
        hold none; of tensors of different lengths, those hold samples that are as long as the
        model's output.

    Examples
    --------
    >>> nodes, edges = torch.zeros(4, 3), torch.zeros(2, 9, dtype=torch.long)
    >>> Arguments(nodes, edges, samples=(True, False)).samples
    (True, False)
    """

    def __init__(self, *args: Any, samples: Sequence[bool] | None = None, **kwargs: Any) -> None:
        self.args = tuple(map(_as_node, args))
        self.kwargs = {name: _as_node(value) for name, value in kwargs.items()}
        self.samples = None if samples is None else tuple(samples)
        if self.samples is not None and len(self.samples) != len(args) + len(kwargs):
            raise RequestError(
                f"Arguments: samples has {len(self.samples)} entries for "
                f"{len(args) + len(kwargs)} arguments"
            )


@dataclass(frozen=True)
class _Leaf:
    """A tensor or constant among a model's arguments."""

    name: str  # its place, such as [0] or ['mask']
    shape: tuple[int, ...] | None = None  # shape of one sample; None for a constant
    dtype: torch.dtype = torch.float32
    constant: Any = None

    def is_like(self, other: _Leaf) -> bool:
        """Return True for the same place and kind, and for the same constant."""
        if (self.name, self.shape is None) != (other.name, other.shape is None):
            return False
        mine = self.constant
        others = other.constant
        if isinstance(mine, Tensor) and isinstance(others, Tensor):
            return mine.shape == others.shape and bool((mine == others).all())
        return type(mine) is type(others) and (isinstance(mine, Tensor) or mine == others)


@dataclass(frozen=True)
class ArgumentLayout:
    """The layout of a model's arguments in one packed tensor.

    Examples
    --------
    >>> layout = ArgumentLayout.of(Arguments(torch.zeros(2, 3), torch.ones(2, 1), 4))
    >>> packed = layout.pack(Arguments(torch.zeros(2, 3), torch.ones(2, 1), 4))
    >>> (first, second, third), keywords = layout.unpack(packed)
    >>> packed.shape, first.shape, second.shape, third
    (torch.Size([2, 4]), torch.Size([2, 3]), torch.Size([2, 1]), 4)
    """

    spec: Any  # structure of the pair of positional and keyword arguments
    # Tensors with samples, and constants, which are the same for all batches.
    leaves: tuple[_Leaf, ...]
    length: int | None = None  # length of the tensors that hold samples, if others don't
    # Number of packed tensors for a first argument that is a list of the samples: 1 for images of
    # one size, 2 for padded images and their sizes, 0 if it isn't a list.
    list_parts: int = 0

    @classmethod
    def of(cls, arguments: Arguments, length: int | None = None) -> ArgumentLayout:
        """Derive the layout from a batch."""
        spec, leaves, tensors = _flatten(arguments, length)
        if not tensors:
            raise RequestError("inputs: arguments without a tensor, expected at least one")
        if tensors[0].ndim == 0 or (tensors[0].ndim < 2 and len(tensors) == 1):
            name = next(leaf.name for leaf in leaves if leaf.shape is not None)
            raise RequestError(
                f"inputs{name} have shape {tuple(tensors[0].shape)}, expected (n, ...) with n at "
                "least 1"
            )
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise RequestError(
                f"inputs: arguments of tensors with {_list_text(lengths)} samples, expected the "
                "same length; a tuple or mapping is one batch of arguments (a list of tensors is "
                "a list of batches), and nlbench.Arguments(*args, samples=(True, False)) names "
                "tensors that hold no samples"
            )
        dtypes = {tensor.dtype: None for tensor in tensors}
        floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        is_mixed = len(dtypes) > 1 and any(dtype.is_complex for dtype in floats)
        if len(floats) > 1 or is_mixed:
            kinds = _list_text(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
            raise RequestError(
                f"inputs: arguments of {kinds}; several are packed into one tensor, so all floats "
                "must have the same real dtype; convert them, or wrap the model in a module that "
                "takes only one of them"
            )
        return cls(spec, tuple(leaves), length)

    @property
    def is_one_tensor(self) -> bool:
        """True if the model is called with the packed tensor itself."""
        return len(self.leaves) == 1 and self.spec == _ONE_TENSOR and not self.list_parts

    @property
    def names(self) -> list[str]:
        """Places of the arguments."""
        names = [leaf.name[1:-1].replace("'", "").replace("][", ".") for leaf in self.leaves]
        names[: self.list_parts] = ["images"] * bool(self.list_parts)
        return names or ["none"]

    @property
    def whole_tensors(self) -> dict[str, Tensor]:
        """Tensors with axes that hold no samples, by the place of the argument."""
        return {
            leaf.name: leaf.constant
            for leaf in self.leaves
            if isinstance(leaf.constant, Tensor) and leaf.constant.ndim
        }

    @property
    def _packed_dtype(self) -> torch.dtype:
        dtypes = [leaf.dtype for leaf in self.leaves if leaf.shape is not None]
        all_floats = all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
        return dtypes[0] if all_floats else torch.int64

    def pack(self, arguments: Arguments) -> Tensor:
        """Concatenate the tensors in a batch.

        A single tensor is returned unchanged. Floats packed with integers are stored as bit
        patterns. Therefore, inputs with a mask, for example, can't be interpolated or
        differentiated.
        """
        spec, leaves, tensors = _flatten(arguments, self.length)
        are_like = list(map(_Leaf.is_like, self.leaves, leaves))
        if spec != self.spec or not all(are_like):
            first = self.names
            later = ArgumentLayout(spec, tuple(leaves)).names
            if first == later and not all(are_like):
                name = first[are_like.index(False)]
                raise RequestError(
                    f"inputs: '{name}' holds no samples and differs between batches, so they can't "
                    "be joined; pass one batch, as nlbench.Arguments, instead of a loader"
                )
            raise RequestError(
                "inputs: the loader yields batches with different arguments: "
                f"{_list_text(first)}, then {_list_text(later)}"
            )
        pairs = [(a.shape, b.shape) for a, b in zip(self.leaves, leaves, strict=True)]
        different = [pair for pair in pairs if pair[0] != pair[1]]
        if different:
            raise RequestError(
                f"inputs: the loader yields samples of shapes {sorted(different[0])}, expected "  # type: ignore[type-var]
                "one; pad sequences to the same length in all batches and pass a mask, as "
                "tokenizer(texts, padding='max_length', max_length=N, truncation=True) does"
            )
        if len(tensors) == 1:
            return tensors[0]
        dtype = self._packed_dtype
        parts = []
        for tensor in tensors:
            part = tensor.reshape(len(tensor), -1)
            if dtype == torch.int64 and part.is_floating_point():
                part = part.contiguous().view(_BITS[part.dtype.itemsize])
            parts.append(part.to(dtype))
        return torch.cat(parts, 1)

    def unpack(
        self, packed: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments from packed samples (n, k).

        `dtype` is the minimum precision of floats that are constants or packed with integers; other
        floats have `packed`'s dtype.
        """
        values: list[Any] = []
        start = 0
        is_alone = sum(leaf.shape is not None for leaf in self.leaves) == 1
        for leaf in self.leaves:
            if leaf.shape is None:
                values.append(_constant_like(leaf.constant, packed, dtype))
            elif is_alone:
                values.append(packed)
            else:
                width = torch.Size(leaf.shape).numel()
                part = packed[:, start : start + width].reshape(len(packed), *leaf.shape)
                values.append(self._decode(part, leaf.dtype, dtype))
                start += width
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        if self.list_parts:
            images = list(args[0].unbind())
            if self.list_parts == 2:
                sizes = args[1].tolist()
                images = [i[:, :h, :w] for i, (h, w) in zip(images, sizes, strict=True)]
            args = (images, *args[self.list_parts :])
        return args, kwargs

    def _decode(self, part: Tensor, kind: torch.dtype, dtype: torch.dtype | None) -> Tensor:
        if not kind.is_floating_point:
            return part.to(kind)
        if self._packed_dtype != torch.int64:
            return part
        part = part.to(_BITS[kind.itemsize]).view(kind)
        return part.to(torch.promote_types(kind, dtype or kind))


@dataclass(frozen=True)
class _Unpacker:
    """Forward pre-hook that unpacks a model's arguments. With a count, only of all samples."""

    layout: ArgumentLayout
    count: int | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return None
        if self.count is not None and len(args[0]) != self.count:
            names = ", ".join(f"inputs{name}" for name in self.layout.whole_tensors)
            cause = names or ("the padding of images" if self.layout.list_parts > 1 else "")
            through = f" through {cause}" if cause else ""
            raise Undefined(
                f"the samples depend on each other{through}, so the network can only run on all "
                f"{self.count} samples, not on {len(args[0])}"
            )
        floats = (p.dtype for p in module.parameters() if p.is_floating_point())
        return self.layout.unpack(args[0], next(floats, None))


class BatchReader:
    """Separates a loader's batches into the model's inputs and labels.

    The labels are a tuple's last element or a mapping's entry ``labels`` if `labels` is True, a
    mapping's entry of that name if it is a string. If it is None, a pair is (inputs, labels) if the
    model takes one argument. Where that isn't certain, class indices and the names in `LABEL_KEYS`
    that the model doesn't take are chosen, if it `guesses_labels`, else an error is raised.

    Examples
    --------
    >>> reader = BatchReader(nn.Linear(2, 2), None)
    >>> inputs, labels = reader.read((torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    >>> inputs.shape, labels
    (torch.Size([3, 2]), tensor([0, 1, 1]))
    """

    def __init__(
        self, model: nn.Module, labels: bool | str | None, guesses_labels: bool = False
    ) -> None:
        self._labels = labels
        self._guesses_labels = guesses_labels
        self._model = model
        self._signature = _signature(model)
        parameters = self._signature.parameters.values()
        is_variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        self._max_arguments = None if is_variadic else len(parameters)
        self._keywords = frozenset(p.name for p in parameters)
        is_required = (
            p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in parameters
        )
        self._min_arguments = sum(is_required)
        # Set by the first batch.
        self.arguments: ArgumentLayout | None = None
        self._mapping_keys: list[str] | None = None
        self._takes_list = False

    def read(self, batch: object) -> tuple[Tensor, Tensor | None]:
        """Return a batch's packed arguments, and its labels if there are any."""
        source = batch
        parts = pytree.object_parts(batch)
        if parts:
            batch = parts
        if not isinstance(batch, Tensor | tuple | list | Mapping | Arguments):
            raise RequestError(
                f"inputs: the loader yields {_add_article(batch)}, {_expected_text(batch)}"
            )
        values, labels = self._split(batch)
        if parts:
            arguments = Arguments(pytree.ObjectOfTensors(source, values))
        else:
            arguments = self._call_arguments(values)
        if self.arguments is None:
            self._check_argument_count(arguments)
            self._takes_list = self._is_list_of_samples(arguments)
        list_parts = 0
        if self._takes_list:
            arguments, list_parts = _stacked(arguments)
        if self.arguments is None:
            layout = ArgumentLayout.of(arguments, self._sample_count(arguments))
            self.arguments = replace(layout, list_parts=list_parts)
        inputs = self.arguments.pack(arguments)
        if isinstance(labels, Tensor) and labels.shape[:1] != inputs.shape[:1]:
            raise RequestError(
                f"inputs: a batch of {len(inputs)} samples has labels of shape "
                f"{tuple(labels.shape)}, expected one label per sample"
            )
        return inputs, signed_labels(labels) if isinstance(labels, Tensor) else None

    def _call_arguments(self, batch: object) -> Arguments:
        """Return the arguments of the model's call on a batch."""
        if isinstance(batch, Arguments):
            return batch
        if isinstance(batch, Tensor):
            return Arguments(batch)
        if not isinstance(batch, Mapping):
            return Arguments(*batch)  # type: ignore[misc]
        keywords = {str(name): value for name, value in batch.items()}
        taken = {n: v for n, v in keywords.items() if n in self._keywords or not is_identifier(v)}
        if self._takes(**taken):
            return Arguments(**taken)
        if self._takes(**keywords) or not self._takes(batch):
            return Arguments(**keywords)
        # A model of one argument takes the mapping itself, or its only tensor next to identifiers.
        others = {name: value for name, value in batch.items() if not is_identifier(value)}
        if self._mapping_keys is None:
            candidates = [mapping for mapping in (others, dict(batch)) if mapping]
            runs = (m for m in candidates if self._run(Arguments(m)) is not None)
            self._mapping_keys = list(next(runs, {}))
        if self._mapping_keys:
            return Arguments({name: batch.get(name) for name in self._mapping_keys})
        return Arguments(*others.values()) if len(others) == 1 else Arguments(**keywords)

    def _takes(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if a call with these arguments has the signature."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return self._signature is not _ANY_SIGNATURE

    def _sample_count(self, arguments: Arguments) -> int | None:
        """Return the length of the arguments that hold samples, where their lengths differ.

        It is that of the model's output, or of the floats if the output has another length, such as
        one row for each of several graphs. None if it isn't known.
        """
        leaves = pytree.tree_leaves((arguments.args, arguments.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        lengths = {len(tensor) for tensor in tensors}
        if arguments.samples is not None or len(lengths) < 2:
            return None
        output = OutputChoice()(self._model, (), self._run(arguments))
        if not isinstance(output, Tensor):
            return None
        # A label for each of several graphs is as long as the output, and holds no samples.
        others = {len(tensor) for tensor in tensors if not is_identifier(tensor)}
        if output.ndim and len(output) in (others or lengths):
            return len(output)
        lengths = {len(tensor) for tensor in tensors if tensor.is_floating_point()}
        return lengths.pop() if len(lengths) == 1 else None

    def _is_list_of_samples(self, arguments: Arguments) -> bool:
        """Return True if the first argument is a list of images, as detectors of objects take.

        The output is then a list of the same length, and not a tensor for each of several inputs.
        """
        samples: Any = arguments.args[0] if arguments.args else None
        if not _is_list_of(Tensor, samples):
            return False
        if any(image.ndim != 3 or not image.is_floating_point() for image in samples):
            return False
        output = self._run(Arguments(list(samples), *arguments.args[1:], **arguments.kwargs))
        if not isinstance(output, list | tuple) or len(output) != len(samples):
            return False
        lengths = {part.shape[:1] if isinstance(part, Tensor) else None for part in output}
        return lengths != {samples[0].shape[:1]}

    def _run(self, arguments: Arguments) -> object:
        """Return the model's output for a batch, or None if the model refuses it."""
        parameter = next(self._model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        try:
            call = copy.deepcopy((arguments.args, arguments.kwargs))
            is_moved = parameter is not None
            args, kwargs = pytree.tree_map(
                lambda v: v.to(device) if is_moved and isinstance(v, Tensor) else v, call
            )
            with (
                evaluation_mode(self._model),
                preserve_attributes(self._model),
                preserve_rng_state(device),
            ):
                return self._model(*args, **kwargs)
        except Exception:  # A model may refuse its inputs in any way.
            return None

    def _split(self, batch: Any) -> Any:
        if isinstance(batch, Tensor | Arguments):
            return batch, None
        if isinstance(batch, Mapping):
            return self._split_mapping(batch)
        if isinstance(self._labels, str):
            raise RequestError(
                f"labels: '{self._labels}' is a mapping's key, but the loader yields tuples; "
                "labels=True uses the last element as labels"
            )
        takes_one = self._max_arguments == 1
        if self._labels is not False and self._max_arguments is not None:
            # The model doesn't take an index after the labels.
            while len(batch) > self._max_arguments + 1 and is_identifier(batch[-1]):
                batch = batch[:-1]
        has_labels = self._labels is True
        if len(batch) > 1 and _is_list_of(Mapping, batch[-1]):
            has_labels = self._labels is not False  # Boxes of a detector, one mapping per image.
        elif self._guesses_labels and not takes_one and len(batch) > 1:
            has_labels = self._ends_with_labels(batch)
        elif self._labels is None and len(batch) == 2:
            has_labels = True
            if not takes_one:
                raise RequestError(
                    "inputs: the loader yields pairs, and the model takes several arguments; pass "
                    "labels=True if the second element is the labels, labels=False otherwise"
                )
        if not has_labels or len(batch) < 2:
            return tuple(batch), None
        is_one = len(batch) == 2 and isinstance(batch[0], Tensor | Mapping)
        return batch[0] if is_one else tuple(batch[:-1]), batch[-1]

    def _ends_with_labels(self, batch: Sequence[Any]) -> bool:
        """Return True if the last of several elements is no argument of the model.

        Raise if it may be one, or labels that are no class indices.
        """
        if len(batch) <= self._min_arguments:
            return False
        is_surplus = self._max_arguments is not None and len(batch) > self._max_arguments
        if is_identifier(batch[-1]) or is_surplus:
            return True
        raise RequestError(
            f"inputs: the data yield tuples of {len(batch)}, whose last element may be labels or "
            "an optional argument of the model; yield mappings with the names of the arguments, "
            "and 'labels' for the labels"
        )

    def _split_mapping(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
        key = self._labels if isinstance(self._labels, str) else "labels"
        other = next((name for name in LABEL_KEYS if name in batch), None)
        is_taken = other is None or other in self._keywords
        if self._guesses_labels and other is not None and not is_taken:
            key = other
        if self._labels in (None, True) and key not in batch and not is_taken:
            raise RequestError(
                f"inputs: a batch has '{other}'; pass labels=\"{other}\" if it holds the labels, "
                "labels=False if the model takes it"
            )
        if self._labels is False or (self._labels is None and key not in batch):
            return batch, None
        if key not in batch:
            raise RequestError(f"labels: a batch has no '{key}'{nearest(key, map(str, batch))}")
        config = getattr(self._model, "config", None)
        has_decoder = getattr(config, "is_encoder_decoder", False)
        if self._labels is None and key in self._keywords and has_decoder:
            raise RequestError(
                "inputs: a batch has 'labels', and the model may derive its decoder's inputs from "
                "them; pass labels=False if they are for the model, labels=True if they are not"
            )
        values = {name: value for name, value in batch.items() if name != key}
        labels = batch[key]
        return values, _as_next_tokens(labels, values) if key in self._keywords else labels

    def _check_argument_count(self, arguments: Arguments) -> None:
        count = len(arguments.args) + len(arguments.kwargs)
        limit = self._max_arguments
        if limit is not None and count > limit:
            raise RequestError(
                f"inputs: a batch has {count} arguments, but the model takes {limit}; a tuple or "
                "mapping is one batch of arguments, as in model(*args) or model(**kwargs), and a "
                "list of tensors is a list of batches"
            )


@contextmanager
def single_tensor_call(
    model: nn.Module,
    arguments: ArgumentLayout,
    count: int | None = None,
    output: OutputChoice | None = None,
) -> Iterator[None]:
    """Make a model, and copies of it, map one packed tensor to one tensor inside the block.

    `count` is the only number of samples that the model may run on, if there is one.
    """
    if isinstance(model, torch.jit.ScriptModule) and arguments.is_one_tensor:
        yield
        return
    handles = []
    if count is not None or not arguments.is_one_tensor:
        handles.append(unpack_arguments(model, arguments, count))
    handles.append(model.register_forward_hook(output or OutputChoice()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unpack_arguments(
    model: nn.Module, arguments: ArgumentLayout, count: int | None = None
) -> RemovableHandle:
    """Make a model and its copies take one packed tensor, until the handle is removed."""
    if isinstance(model, torch.jit.ScriptModule):
        raise RequestError(
            "inputs: a scripted model can only be called with one tensor; pass the module it was "
            "made from"
        )
    return model.register_forward_pre_hook(
        _Unpacker(arguments, count), prepend=True, with_kwargs=True
    )


@dataclass(frozen=True)
class OutputChoice:
    """Forward hook that selects a tensor from a model's output.

    Examples
    --------
    >>> choice = OutputChoice("boxes.1")
    >>> choice(nn.Identity(), (), {"boxes": [torch.zeros(1), torch.ones(1)]})
    tensor([1.])
    >>> OutputChoice()(nn.Identity(), (), (torch.ones(1), None))
    tensor([1.])
    """

    # Name or position of the tensor, with dots for parts of parts, or a function of the output. By
    # default, the logits: the first of the attributes or entries logits, out and last_hidden_state,
    # or else the only tensor. Any other output is returned unchanged.
    choice: str | Callable[[Any], Any] = ""

    @property
    def description(self) -> str:
        """Text for records, empty by default."""
        if not self.choice:
            return ""
        name = self.choice if isinstance(self.choice, str) else describe_function(self.choice)
        return f"; output {name}"

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        """Return the selected tensor."""
        if self.choice and not isinstance(self.choice, str):
            return self.choice(output)
        # Copies of the model may call the hook on a tensor that is selected already.
        if isinstance(output, Tensor):
            return output
        value: Any = output
        for name in self.choice.split(".") if self.choice else ():
            parts = output_parts(value)
            if name not in parts:
                raise Undefined(
                    f"model.output={self.choice}: the output has no '{name}'{nearest(name, parts)}"
                )
            value = parts[name]
        if self.choice:
            return value
        for name in ("logits", "out", "last_hidden_state"):
            entry = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
            if isinstance(entry, Tensor):
                return entry
        tensors = [part for part in output_parts(output).values() if isinstance(part, Tensor)]
        return tensors[0] if len(tensors) == 1 else output


def input_error(inputs: object) -> RequestError:
    """Return the error for inputs that are neither a batch nor a loader."""
    expected = _expected_text(inputs, "a tensor or a loader of")
    return RequestError(f"inputs: {_add_article(inputs)}, {expected}")


def _flatten(
    arguments: Arguments, length: int | None = None
) -> tuple[Any, list[_Leaf], list[Tensor]]:
    """Return the structure of arguments, their leaves, and the tensors that hold samples."""
    entries, spec = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
    is_one = spec == _ONE_TENSOR
    keys = [*range(len(arguments.args)), *arguments.kwargs]
    holds_samples = dict(zip(keys, arguments.samples or [True] * len(keys), strict=True))
    leaves: list[_Leaf] = []
    tensors: list[Tensor] = []
    for path, value in entries:
        name = "" if is_one else pytree.keystr(path[1:])
        key = getattr(path[1], "idx", getattr(path[1], "key", None))
        if isinstance(value, Tensor):
            tensor = dense(f"inputs{name}", value)
            has_length = length is None or tensor.shape[:1] == (length,)
            if (tensor.ndim or is_one) and holds_samples[key] and has_length:
                tensors.append(tensor)
                leaves.append(_Leaf(name, tuple(tensor.shape[1:]), tensor.dtype))
            else:
                leaves.append(_Leaf(name, constant=tensor.detach().clone()))
        elif isinstance(value, str) and len(path) > 2 and isinstance(path[-1], pytree.SequenceKey):
            raise RequestError(f"inputs{name}: a string for a sample, expected tensors; drop them")
        elif isinstance(value, Constant):
            leaves.append(_Leaf(name, constant=value))
        else:
            raise RequestError(f"inputs{name}: {_add_article(value)}, {_expected_text(value)}")
    return spec, leaves, tensors


def _as_node(value: Any) -> Any:
    """Return a node in place of an object of tensors, anything else unchanged."""
    parts = pytree.object_parts(value)
    return pytree.ObjectOfTensors(value, parts) if parts else value


def _is_list_of(kind: type[Any], value: object) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(entry, kind) for entry in value)  # type: ignore[attr-defined]


def _stacked(arguments: Arguments) -> tuple[Arguments, int]:
    """Replace a list of images by one tensor, padded if their sizes differ, and their sizes."""
    images, *others = arguments.args
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).tolist()
    padded = [
        functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1]))
        for image in images
    ]
    parts = [torch.stack(padded)]
    if bool((sizes != sizes[0]).any()):
        parts.append(sizes.to(parts[0].device))
    flags = arguments.samples
    if flags is not None:
        flags = (*[True] * len(parts), *flags[1:])
    return Arguments(*parts, *others, samples=flags, **arguments.kwargs), len(parts)


_ONE_TENSOR = pytree.tree_structure(((0,), {}))
"""Structure of the arguments of a model that is called with one tensor."""


def _constant_like(value: Any, packed: Tensor, dtype: torch.dtype | None) -> Any:
    """Return a constant on the device of the samples, at least as precise as the model."""
    if not isinstance(value, Tensor):
        return value
    kind = value.dtype
    if kind.is_floating_point:
        kind = torch.promote_types(kind, dtype or kind)
    # A copy, which the model may overwrite.
    return value.to(packed.device, kind, copy=True)


def dense(label: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to a plain `Tensor`. Raise unless it is dense and has values."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise RequestError(f"{label}: a sparse or nested tensor, expected a dense one")
    if tensor.is_quantized:
        raise RequestError(f"{label}: a quantised tensor, expected numbers; use dequantize()")
    if tensor.is_meta:
        raise RequestError(f"{label}: a tensor on the meta device, without values")
    if tensor.dtype in WIDE_UNSIGNED:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise RequestError(
            f"{label}: a tensor of {kind}, expected floats, signed integers or bytes; use .float() "
            "or .long()"
        )
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise RequestError(
            f"{label}: {_add_article(tensor)}, a subclass with its own dispatch; "
            "expected a torch.Tensor"
        )
    return tensor.as_subclass(Tensor)


def _signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of a model's forward method, or one of any arguments if it has none."""
    if isinstance(signature := getattr(model, "signature", None), inspect.Signature):
        return signature
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return _ANY_SIGNATURE


_ANY_SIGNATURE = inspect.signature(lambda *args, **kwargs: None)


LABEL_KEYS = ("labels", "label", "target", "targets", "y")
"""Keys of labels in batches; all but the first are those of other libraries."""


def is_identifier(value: object) -> bool:
    """Return True for an index or a name per sample, as some loaders add to their batches."""
    if isinstance(value, Tensor):
        return value.ndim == 1 and not value.is_floating_point()
    return isinstance(value, list | tuple) and all(isinstance(entry, str | int) for entry in value)


def signed_labels(labels: Tensor) -> Tensor:
    """Return labels of an unsigned type that PyTorch can't compare as signed integers."""
    return labels.long() if labels.dtype in WIDE_UNSIGNED else labels


def _as_next_tokens(labels: Any, values: Mapping[str, Any]) -> Any:
    """Shift labels (n, t) that repeat the input's tokens, so that each label is the next token.

    Language models in transformers do this internally. Labels of -100 are ignored.
    """
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        return labels
    for tokens in values.values():
        if not isinstance(tokens, Tensor) or tokens.shape != labels.shape:
            continue
        if tokens.dtype == labels.dtype and bool(((labels == tokens) | (labels < 0)).all()):
            return functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return labels


def _add_article(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[:1] in "AEIOUaeio" else f"a {kind}"


def _expected_text(value: object, what: str = "batches of") -> str:
    hint = ""
    if hasattr(value, "__array__"):
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        dtype = ", dtype=torch.float32" if kind == "f" else ""
        hint = f"; convert an array with torch.as_tensor(inputs{dtype})"
    return f"expected {what} tensors{hint}"


def _list_text(entries: Any) -> str:
    names = [str(entry) for entry in entries]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
