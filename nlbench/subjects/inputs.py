"""Inputs to a model: a tensor, several arguments, or the batches of a loader.

Probes support only models that map one tensor (n, ...) to one tensor. For other models, the
arguments are packed into one tensor and unpacked by a forward pre-hook, and a forward hook extracts
the logits from the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError, nearest

Constant = bool | int | float | str | None

IGNORED_LABEL = -100
"""Label for positions without a prediction, as in PyTorch's cross-entropy."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype that holds the bits of a float, keyed by the float's size in bytes."""


@dataclass(frozen=True)
class Arguments:
    """The layout of a model's arguments in one packed tensor.

    Parameters
    ----------
    names : tuple of int or str
        Positions or keywords of the tensors.
    shapes : tuple of tuple of int
        For each tensor, the shape of one sample.
    constants : tuple of (int or str, value)
        Non-tensor arguments, such as flags; the same for all batches.

    Examples
    --------
    >>> arguments = Arguments.of((torch.zeros(2, 3), torch.ones(2, 1)))
    >>> packed = arguments.pack((torch.zeros(2, 3), torch.ones(2, 1)))
    >>> packed.shape, [argument.shape for argument in arguments.unpack(packed)[0]]
    (torch.Size([2, 4]), [torch.Size([2, 3]), torch.Size([2, 1])])
    """

    names: tuple[int | str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    constants: tuple[tuple[int | str, Constant], ...] = ()

    @classmethod
    def of(cls, batch: object) -> Arguments:
        """Derive the layout from a batch: a tensor, or arguments by position or keyword.

        Raises
        ------
        nlbench.RequestError
            If the batch has no tensor, or its tensors can't be packed because their lengths or
            floating-point dtypes differ.
        """
        tensors, constants = _tensors_and_constants(batch)
        if not tensors:
            raise RequestError(f"inputs: {_kind(batch)} without a tensor, expected at least one")
        names, values = tuple(tensors), list(tensors.values())
        for name, tensor in tensors.items():
            if tensor.ndim == 0 or (tensor.ndim < 2 and len(tensors) == 1):
                raise RequestError(
                    f"inputs{_position(name, batch)} have shape {tuple(tensor.shape)}, "
                    "expected (n, ...) with n at least 1"
                )
        lengths = [len(tensor) for tensor in values]
        if len(set(lengths)) > 1:
            raise RequestError(
                f"inputs: {_kind(batch)} of tensors with {_list_text(lengths)} samples; a tuple or "
                "mapping is one batch of arguments, whose first axes must have the same length (a "
                "list of tensors is a list of batches)"
            )
        dtypes = tuple(tensor.dtype for tensor in values)
        floats = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        is_mixed = len(set(dtypes)) > 1 and any(dtype.is_complex for dtype in floats)
        if len(floats) > 1 or is_mixed:
            kinds = _list_text(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RequestError(
                f"inputs: {_kind(batch)} of {kinds}; several arguments are packed into one tensor, "
                "so all floats must have the same real dtype; convert them, or wrap the model in a "
                "module that takes only one of them"
            )
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in values)
        return cls(names, shapes, dtypes, tuple(constants.items()))

    @property
    def is_one_tensor(self) -> bool:
        """True if the model is called with the packed tensor itself."""
        return self.names == (0,) and not self.constants

    @property
    def _packed_dtype(self) -> torch.dtype:
        all_floats = all(dtype.is_floating_point or dtype.is_complex for dtype in self.dtypes)
        return self.dtypes[0] if all_floats else torch.int64

    def pack(self, batch: object) -> Tensor:
        """Concatenate the tensors in a batch; a single tensor is returned unchanged.

        Floats packed with integers are stored as bit patterns. Therefore, inputs with a mask, for
        example, can't be interpolated or differentiated.

        Raises
        ------
        nlbench.RequestError
            If the arguments differ from those of the first batch.
        """
        tensors, constants = _tensors_and_constants(batch)
        if tuple(tensors) != self.names or tuple(constants.items()) != self.constants:
            first, later = _list_text(self.names), _list_text(tuple(tensors) or ("no tensors",))
            raise RequestError(
                f"inputs: the loader yields batches with different arguments: {first}, then {later}"
            )
        values = list(tensors.values())
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in values)
        if shapes != self.shapes:
            raise RequestError(
                f"inputs: the loader yields samples of shapes {sorted({*shapes, *self.shapes})}, "
                "expected one; pad sequences to the same length in all batches and pass a mask, as "
                "tokenizer(texts, padding='max_length', max_length=N, truncation=True) does"
            )
        if len(values) == 1:
            return values[0]
        dtype = self._packed_dtype
        flat = [tensor.reshape(len(tensor), -1) for tensor in values]
        if dtype == torch.int64:
            flat = [
                part.contiguous().view(_BITS[part.dtype.itemsize])
                if part.dtype.is_floating_point
                else part
                for part in flat
            ]
        return torch.cat([part.to(dtype) for part in flat], 1)

    def unpack(
        self, packed: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments from packed samples.

        Parameters
        ----------
        packed : tensor of shape (n, k)
        dtype : torch.dtype, optional
            Minimum precision of floats packed with integers; other floats have `packed`'s dtype.
        """
        values: dict[int | str, Any] = dict(self.constants)
        if len(self.names) == 1:
            values[self.names[0]] = packed
        else:
            start = 0
            has_bits = self._packed_dtype == torch.int64
            for name, shape, kind in zip(self.names, self.shapes, self.dtypes, strict=True):
                width = torch.Size(shape).numel()
                part = packed[:, start : start + width].reshape(len(packed), *shape)
                if not kind.is_floating_point:
                    part = part.to(kind)
                elif has_bits:
                    part = part.to(_BITS[kind.itemsize]).view(kind)
                    part = part.to(torch.promote_types(kind, dtype or kind))
                values[name] = part
                start += width
        positions = sorted(name for name in values if isinstance(name, int))
        keywords = {name: value for name, value in values.items() if isinstance(name, str)}
        return tuple(values[position] for position in positions), keywords

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Unpack the arguments, as a forward pre-hook."""
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return None
        floats = (p.dtype for p in module.parameters() if p.is_floating_point())
        return self.unpack(args[0], next(floats, None))


def is_batch(inputs: object) -> bool:
    """Return True if inputs are a single batch: a tensor, or a tuple or mapping of arguments."""
    return isinstance(inputs, Tensor | tuple | Mapping)


class BatchReader:
    """Separates a loader's batches into the model's inputs and labels.

    Parameters
    ----------
    labels : bool, str or None
        True: the labels are a tuple's last element or a mapping's entry ``labels``. False: there
        are none. A string: the labels' key in a mapping. None: a pair is (inputs, labels) if the
        model takes one argument.

    Examples
    --------
    >>> reader = BatchReader(nn.Linear(2, 2), None)
    >>> inputs, labels = reader.read((torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    >>> inputs.shape, labels
    (torch.Size([3, 2]), tensor([0, 1, 1]))
    """

    def __init__(self, model: nn.Module, labels: bool | str | None) -> None:
        self._labels = labels
        self._max_arguments, self._keywords = _parameters(model)
        self._has_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self.arguments: Arguments | None = None

    def read(self, batch: object) -> tuple[Tensor, Tensor | None]:
        """Return a batch's packed arguments, and its labels if there are any.

        Raises
        ------
        nlbench.RequestError
            If the batch doesn't fit the model, or its labels are ambiguous.
        """
        if not isinstance(batch, Tensor | tuple | list | Mapping):
            raise RequestError(
                f"inputs: the loader yields {_with_article(batch)}, {_expected_text(batch)}"
            )
        values, labels = self._split(batch)
        if self.arguments is None:
            self.arguments = Arguments.of(values)
            self._check_argument_count(self.arguments)
        inputs = self.arguments.pack(values)
        if isinstance(labels, Tensor) and labels.shape[:1] != inputs.shape[:1]:
            raise RequestError(
                f"inputs: a batch of {len(inputs)} samples has labels of shape "
                f"{tuple(labels.shape)}, expected one label per sample"
            )
        return inputs, labels if isinstance(labels, Tensor) else None

    def _split(self, batch: Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]) -> Any:
        if isinstance(batch, Tensor):
            return batch, None
        if isinstance(batch, Mapping):
            return self._split_mapping(batch)
        if isinstance(self._labels, str):
            raise RequestError(
                f"labels: '{self._labels}' is a mapping's key, but the loader yields tuples; "
                "labels=True uses the last element as labels"
            )
        if self._labels is None and len(batch) == 2:
            if self._max_arguments is None or self._max_arguments > 1:
                raise RequestError(
                    "inputs: the loader yields pairs, and the model takes several arguments; pass "
                    "labels=True if the second element is the labels, labels=False otherwise"
                )
            return _first(batch[:-1]), batch[-1]
        if self._labels and len(batch) > 1:
            return _first(batch[:-1]), batch[-1]
        return _first(batch), None

    def _split_mapping(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
        key = self._labels if isinstance(self._labels, str) else "labels"
        if self._labels is False or (self._labels is None and key not in batch):
            return batch, None
        if key not in batch:
            raise RequestError(f"labels: a batch has no '{key}'{nearest(key, map(str, batch))}")
        if self._labels is None and key in self._keywords and self._has_decoder:
            raise RequestError(
                "inputs: a batch has 'labels', and the model may derive its decoder's inputs from "
                "them; pass labels=False if they are for the model, labels=True if they are not"
            )
        values = {name: value for name, value in batch.items() if name != key}
        labels = batch[key]
        return values, _as_next_tokens(labels, values) if key in self._keywords else labels

    def _check_argument_count(self, arguments: Arguments) -> None:
        count = len(arguments.names) + len(arguments.constants)
        limit = self._max_arguments
        if limit is not None and count > limit:
            raise RequestError(
                f"inputs: a batch has {count} arguments, but the model takes {limit}; a tuple or "
                "mapping is one batch of arguments, as in model(*args) or model(**kwargs), and a "
                "list of tensors is a list of batches"
            )


@contextmanager
def single_tensor_call(model: nn.Module, arguments: Arguments) -> Iterator[None]:
    """Make a model map one packed tensor to one tensor inside the block.

    The same applies to copies made inside the block.
    """
    if isinstance(model, torch.jit.ScriptModule):
        if not arguments.is_one_tensor:
            raise RequestError(
                "inputs: a scripted model can only be called with one tensor; pass the module it "
                "was made from"
            )
        yield
        return
    handles = [model.register_forward_hook(tensor_of_output)]
    if not arguments.is_one_tensor:
        handles.append(model.register_forward_pre_hook(arguments, prepend=True, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensor_of_output(module: nn.Module, args: object, output: object) -> object:
    """Extract the logits from a model's output, as a forward hook.

    The logits are the first of the attributes or entries ``logits``, ``out`` and
    ``last_hidden_state``, or else the only tensor. Any other output is returned unchanged.

    Examples
    --------
    >>> model = nn.Identity()
    >>> tensor_of_output(model, (), {"logits": torch.ones(1), "hidden": torch.zeros(1)})
    tensor([1.])
    >>> tensor_of_output(model, (), (torch.ones(1), None))
    tensor([1.])
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out", "last_hidden_state"):
        entry = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(entry, Tensor):
            return entry
    values = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list):
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == 1:
            return tensors[0]
    return output


def input_error(inputs: object) -> RequestError:
    """Return the error for inputs that are neither a batch nor a loader."""
    if isinstance(inputs, TorchDataset):
        return RequestError(
            f"inputs: a {type(inputs).__name__} is a Dataset, which yields samples one at a time; "
            "expected batches, as from torch.utils.data.DataLoader(dataset, batch_size=128)"
        )
    expected = _expected_text(inputs, "a tensor or a loader of")
    return RequestError(f"inputs: {_with_article(inputs)}, {expected}")


def _tensors_and_constants(
    batch: object,
) -> tuple[dict[int | str, Tensor], dict[int | str, Constant]]:
    """Return the tensors and the other arguments in a batch, keyed by position or keyword."""
    if isinstance(batch, Tensor):
        return {0: _dense(batch, "")}, {}
    entries: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else {}
    if isinstance(batch, tuple | list):
        entries = dict(enumerate(batch))
    tensors: dict[int | str, Tensor] = {}
    constants: dict[int | str, Constant] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[name] = _dense(value, _position(name, batch))
        elif isinstance(value, Constant) and isinstance(name, int | str):
            constants[name] = value
        else:
            raise RequestError(
                f"inputs{_position(name, batch)}: {_with_article(value)}, {_expected_text(value)}"
            )
    return tensors, constants


def _dense(tensor: Tensor, position: str) -> Tensor:
    """Convert a tensor to a plain `Tensor`; raise unless it is dense and has values."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise RequestError(f"inputs{position}: a sparse or nested tensor, expected a dense one")
    if tensor.is_meta:
        raise RequestError(f"inputs{position}: a tensor on the meta device, without values")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise RequestError(
            f"inputs{position}: {_with_article(tensor)}, a subclass with its own dispatch; "
            "expected a torch.Tensor"
        )
    return tensor.as_subclass(Tensor)


def _parameters(model: nn.Module) -> tuple[int | None, frozenset[str]]:
    """Return the number of arguments of a model (None if unlimited) and their names."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None, frozenset()
    is_variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return None if is_variadic else len(parameters), frozenset(p.name for p in parameters)


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


def _first(entries: Any) -> Any:
    return entries[0] if len(entries) == 1 and isinstance(entries[0], Tensor) else tuple(entries)


def _position(name: object, batch: object) -> str:
    if isinstance(batch, Tensor):
        return ""
    return f"['{name}']" if isinstance(batch, Mapping) else f"[{name}]"


def _kind(batch: object) -> str:
    return "a mapping" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"


def _with_article(value: object) -> str:
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
