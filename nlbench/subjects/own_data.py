"""Datasets from PyTorch's objects: tensors, datasets and loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.introspection.random_state import RandomStream

from .data import Dataset, Items
from .samples import MAX_SAMPLE_BYTES

_NO_LABELS = "; labels that are no class indices are left out"
_CLASS_ATTRIBUTES = ("num_classes", "n_classes")


class TensorItems(TorchDataset[tuple[Tensor, int]]):
    """Rows of a tensor with their labels, which are 0 if there are none."""

    def __init__(self, rows: Tensor, labels: Tensor | None = None) -> None:
        self.rows = rows
        self.labels = torch.zeros(len(rows), dtype=torch.int64) if labels is None else labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several rows."""
        chosen = torch.as_tensor(indices)
        return list(zip(self.rows[chosen], self.labels[chosen].tolist(), strict=True))

    def read_labels(self) -> list[int]:
        """Return all labels."""
        return [int(label) for label in self.labels]


class ForeignItems(TorchDataset[tuple[Tensor, int]]):
    """Items of a dataset in PyTorch's form, read with the function that collates its batches."""

    def __init__(
        self, label: str, items: Any, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self._label = label
        self._items = items
        self._collate = collate

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Read several items. Random ones are the same in every call with these indices."""
        with RandomStream("items").active():
            return self._read(indices)

    def _read(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        items = [self._items[index] for index in indices]
        if self._collate is None:
            pairs = [_pair(self._label, item) for item in items]
            return [
                (_tensor(self._label, x), int(y) if _is_class_index(y) else 0) for x, y in pairs
            ]
        rows, labels = _pair(self._label, self._collate(items))
        return TensorItems(*_rows(self._label, rows, labels)).__getitems__(range(len(items)))


def as_dataset(label: str, value: Any) -> Dataset:
    """Return the dataset in a tensor, a tuple of tensors, a PyTorch dataset or a loader.

    Batches of a loader are drawn like those of any dataset: its order doesn't matter. A loader
    that can only be iterated is read to its end.

    Parameters
    ----------
    label : str
        Name of the dataset.

    Raises
    ------
    nlbench.RequestError
        If there are no samples, or they are not tensors of equal shape.

    Examples
    --------
    >>> as_dataset("mine", (torch.zeros(5, 2), torch.tensor([0, 1, 2, 0, 1]))).classes
    3
    """
    if isinstance(value, Dataset):
        return value
    note = ""
    items: Any
    if isinstance(value, Tensor | np.ndarray):
        items, is_labelled = TensorItems(*_rows(label, value, None)), False
    elif _is_tensor_pair(value):
        inputs, labels = value
        rows, numbers = _rows(label, inputs, labels)
        items, is_labelled = TensorItems(rows, numbers), numbers is not None
        note = "" if is_labelled else _NO_LABELS
    elif _is_map_style(value):
        loader = value if isinstance(value, DataLoader) else None
        source = loader.dataset if loader else value
        if not len(source):  # type: ignore[arg-type]
            raise RequestError(f"{label} is empty, expected samples")
        collate = loader.collate_fn if loader else None
        items = ForeignItems(label, source, collate)
        _, first = _pair(label, collate([source[0]]) if collate else source[0])
        is_labelled = _is_class_index(first)
        note = "" if is_labelled or first is None else _NO_LABELS
    elif hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict):
        rows, numbers, note = _read_batches(label, value)
        items, is_labelled = TensorItems(rows, numbers), numbers is not None
    else:
        raise RequestError(
            f"{label} is a {type(value).__name__}, expected a Dataset, a DataLoader, a tensor, a "
            "tuple of tensors (inputs, labels) or a function that returns one of those"
        )
    return make_dataset(
        label, items, _class_count(value, items) if is_labelled else 0, f"as {label} has it{note}"
    )


def make_dataset(label: str, items: Items, classes: int, preprocessing: str) -> Dataset:
    """Return a dataset whose two splits are all items. Without classes there are no labels.

    Raises
    ------
    nlbench.RequestError
        If there are no items.
    """
    size = len(items)  # type: ignore[arg-type]  # PyTorch's Dataset declares no __len__.
    if not size:
        raise RequestError(f"{label} is empty, expected samples")
    shape = tuple(items[0][0].shape)
    return Dataset(
        name=label,
        train=items,
        test=items,
        shape=shape,
        classes=classes,
        mean=(),
        std=(),
        preprocessing=f"{preprocessing}; both splits are all samples",
        labelled=classes > 0,
    )


def _is_tensor_pair(value: object) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_pair and all(isinstance(part, Tensor | np.ndarray) for part in value)  # type: ignore[attr-defined]


def _is_map_style(value: object) -> bool:
    source = value.dataset if isinstance(value, DataLoader) else value
    is_indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    is_plain = isinstance(source, dict | str | bytes | tuple | list)
    if isinstance(source, list) and source and isinstance(value, list):
        first = source[0]
        # A list of pairs (inputs, label) is a dataset; a list of batches is a loader.
        is_plain = not (isinstance(first, tuple) and len(first) > 1 and _is_scalar(first[1]))
    if isinstance(value, DataLoader):
        is_plain = False
    return is_indexed and not is_plain and not isinstance(source, IterableDataset)


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, Tensor) and value.ndim == 0)


def _pair(label: str, item: Any) -> tuple[Any, Any]:
    """Return the inputs and the label of an item or a batch. Other elements are ignored."""
    if isinstance(item, dict):
        raise RequestError(
            f"{label} yields mappings, expected tensors or (inputs, label); pass the loader to "
            "nlbench.evaluate for a model with several arguments"
        )
    if isinstance(item, tuple | list):
        if not item:
            raise RequestError(f"{label} yields empty tuples, expected (inputs, label)")
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _tensor(label: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        hint = "; use transforms.ToTensor()" if hasattr(value, "convert") else ""
        raise RequestError(f"{label} yields inputs of type {kind}, expected tensors{hint}")
    tensor = value.detach().cpu()
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _rows(label: str, inputs: Any, labels: Any) -> tuple[Tensor, Tensor | None]:
    """Return inputs as a tensor, and labels if they are class indices."""
    rows = _tensor(label, inputs)
    if rows.ndim < 2 or not len(rows):
        raise RequestError(
            f"{label} has inputs of shape {tuple(rows.shape)}, expected (n, ...) with n at least 1"
        )
    if labels is None:
        return rows, None
    numbers = torch.as_tensor(np.asarray(labels) if isinstance(labels, list) else labels).cpu()
    if len(numbers) != len(rows) if numbers.ndim else True:
        raise RequestError(f"{label} has {len(rows)} inputs and labels of {tuple(numbers.shape)}")
    numbers = numbers.squeeze(1) if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers
    is_index = numbers.ndim == 1 and not numbers.is_floating_point() and not numbers.is_complex()
    if not is_index or bool((numbers < 0).any()):
        return rows, None
    return rows, numbers.to(torch.int64)


def _is_class_index(label: Any) -> bool:
    try:
        value = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):
        return False
    is_real = value.is_floating_point() or value.is_complex()
    return value.numel() == 1 and not is_real and int(value) >= 0


def _class_count(value: Any, items: Any) -> int:
    """Return the number of classes: as declared, or the largest label plus one."""
    source = value.dataset if isinstance(value, DataLoader) else value
    for name in _CLASS_ATTRIBUTES:
        declared = getattr(source, name, None)
        if isinstance(declared, int):
            return declared
    classes = getattr(source, "classes", None)
    if isinstance(classes, list | tuple):
        return len(classes)
    labels = getattr(source, "targets", None)
    tensors = getattr(source, "tensors", None)
    if labels is None and tensors is not None and len(tensors) > 1:
        labels = tensors[1]
    if labels is None and isinstance(items, TensorItems):
        labels = items.labels
    if labels is None:
        labels = [items[index][1] for index in range(len(items))]
    numbers = torch.as_tensor(labels)
    return int(numbers.max()) + 1 if numbers.numel() and not numbers.is_floating_point() else 0


def _read_batches(label: str, batches: Iterable[Any]) -> tuple[Tensor, Tensor | None, str]:
    """Read a stream to its end, or until the memory limit."""
    rows: list[Tensor] = []
    labels: list[Tensor | None] = []
    size = 0
    note = ""
    for batch in batches:
        inputs, numbers = _rows(label, *_pair(label, batch))
        if rows and inputs.shape[1:] != rows[0].shape[1:]:
            raise RequestError(
                f"{label} yields samples of shapes {tuple(rows[0].shape[1:])} and "
                f"{tuple(inputs.shape[1:])}, expected one"
            )
        rows.append(inputs.clone())
        labels.append(numbers)
        size += math.prod(inputs.shape) * inputs.element_size()
        if size > MAX_SAMPLE_BYTES:
            note = f"; the first {sum(map(len, rows))} samples of a stream"
            break
    if not rows:
        raise RequestError(f"{label} yields nothing, expected batches of tensors")
    known = [numbers for numbers in labels if numbers is not None]
    complete = torch.cat(known) if len(known) == len(labels) else None
    return torch.cat(rows), complete, note
