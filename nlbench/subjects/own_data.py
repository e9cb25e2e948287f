"""Datasets from PyTorch's objects: tensors, datasets and loaders."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.introspection import pytree
from nlbench.introspection.model_output import output_parts
from nlbench.introspection.random_state import RandomStream

from .data import Dataset, Items
from .facts import LABELS_LEFT_OUT
from .inputs import LABEL_KEYS, BatchReader, dense, is_identifier
from .samples import MAX_SAMPLE_BYTES, READ_BATCH, InMemoryItems, drawn_indices, joined

Read = Callable[[Any], tuple[Tensor, Tensor | None]]
"""Returns the inputs of a batch, and its labels if they are class indices."""


class ForeignItems(TorchDataset[tuple[Tensor, int]]):
    """Items of a dataset in PyTorch's form, read as batches.

    `collate` makes a batch of a list of items, and `read` returns its inputs and labels. Unless
    `has_labels`, all labels are 0.
    """

    def __init__(
        self,
        label: str,
        items: Any,
        collate: Callable[[list[Any]], Any],
        read: Read,
        *,
        has_labels: bool,
    ) -> None:
        self._label = label
        self._items = items
        self._collate = collate
        self._read = read
        self._has_labels = has_labels

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Read several items. Random ones are the same in every call with these indices."""
        rows, labels = self._read_batch(indices)
        if len(rows) != len(indices):
            raise RequestError(
                f"{self._label}: its collate_fn returns {len(rows)} samples for {len(indices)} "
                "items, expected one for each"
            )
        if not self._has_labels:
            labels = None
        elif labels is None:
            raise RequestError(
                f"{self._label} has items without a class index, unlike its first one; expected "
                "integers from 0 for all"
            )
        return InMemoryItems(rows, labels).__getitems__(range(len(rows)))

    def class_indices(self) -> list[int | None]:
        """Return all labels, which are None for items without a class index."""
        labels = (self._read_batch([index])[1] for index in range(len(self)))
        return [None if each is None else int(each[0]) for each in labels]

    def _read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        with RandomStream("items").active():
            return self._read(self._collate([self._items[index] for index in indices]))


def as_dataset(label: str, value: Any) -> Dataset:
    """Return the dataset in a tensor, a tuple of tensors, a PyTorch dataset or a loader.

    Batches of a loader are drawn like those of any dataset: its order doesn't matter. A loader
    that can only be iterated is read to its end. Batches may be mappings, objects or tuples of
    several arguments, which are read as soon as their model is known.

    Examples
    --------
    >>> as_dataset("mine", (torch.zeros(5, 2), torch.tensor([0, 1, 2, 0, 1]))).classes
    3
    """
    if isinstance(value, Dataset):
        return value
    if _is_array(value) or _is_pair(value):
        return _Source(label, value, [value]).dataset(are_arrays=True)
    if isinstance(value, IterableDataset):
        # Its items are samples, as those of a dataset with indices.
        value = DataLoader(value, READ_BATCH)
    if _is_map_style(value) and not isinstance(value, nn.Module):
        return _Source(label, value).dataset()
    if hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict | nn.Module):
        return _Source(label, value, *_read_stream(value)).dataset()
    raise RequestError(
        f"{label} is a {type(value).__name__}, expected a Dataset, a DataLoader, a tensor, a "
        "tuple of tensors (inputs, labels) or a function that returns one of those"
    )


class _Source:
    """Batches in memory, or a dataset whose items are collated to batches."""

    def __init__(
        self, label: str, value: Any, batches: Sequence[Any] | None = None, note: str = ""
    ) -> None:
        self._label = label
        self._batches = batches
        self._note = note
        is_loader = isinstance(value, DataLoader)
        self._source: Any = value.dataset if is_loader else value
        self._collate: Any = value.collate_fn if is_loader else self._collate_items
        is_drawn = is_loader and batches is None
        self._items: Any = _drawn_items(value) if is_drawn else self._source
        if batches is None and not len(self._items):
            raise RequestError(f"{label} is empty, expected samples")
        if batches is not None and not batches:
            raise RequestError(f"{label} yields nothing, expected batches of tensors")
        self._first = self._collate([self._items[0]]) if batches is None else batches[0]

    def dataset(self, *, are_arrays: bool = False) -> Dataset:
        """Return the dataset of the first inputs in each batch and their labels.

        If all `are_arrays`, the second one holds labels, whatever the model takes.
        """

        def read(batch: Any) -> tuple[Tensor, Tensor | None]:
            return _rows(self._label, *_split(self._label, batch))

        items, has_labels = self._read_items(read)
        classes = _class_count(self._source, items) if has_labels else 0
        note = self._note
        if not classes and _split(self._label, self._first)[1] is not None:
            items, _ = self._read_items(read, are_labels_ignored=True)
            note += f"; {LABELS_LEFT_OUT}"
        dataset = make_dataset(self._label, items, classes, f"as {self._label} has it{note}")
        if are_arrays or _is_array(self._first) or _is_labelled_array(self._first):
            return dataset
        return replace(dataset, for_model=lambda model: self._pack_arguments(dataset, model))

    def _pack_arguments(self, dataset: Dataset, model: nn.Module) -> Dataset:
        """Return a dataset of all arguments that a model takes, packed into one tensor."""
        reader = BatchReader(model, None, guesses_labels=True)

        def read(batch: Any) -> tuple[Tensor, Tensor | None]:
            plain = batch if isinstance(batch, tuple | list) else output_parts(batch)
            tensors = pytree.tree_map(lambda v: _tensor("", v) if _is_array(v) else v, plain)
            return _rows(self._label, *reader.read(tensors))

        items, has_labels = self._read_items(read, are_labels_ignored=not dataset.labelled)
        assert reader.arguments is not None
        return replace(
            dataset,
            train=items,
            test=items,
            labelled=has_labels,
            arguments=reader.arguments,
            preprocessing=f"{dataset.preprocessing}; inputs {', '.join(reader.arguments.names)}",
        )

    def _read_items(self, read: Read, *, are_labels_ignored: bool = False) -> tuple[Items, bool]:
        """Return all samples, and True if they have labels."""
        if self._batches is None:
            has_labels = read(self._first)[1] is not None and not are_labels_ignored
            items = ForeignItems(
                self._label, self._items, self._collate, read, has_labels=has_labels
            )
            return items, has_labels
        parts = [read(batch) for batch in self._batches]
        _check_shapes(self._label, [inputs[0] for inputs, _ in parts])
        rows, labels = joined(parts)
        labels = None if are_labels_ignored else labels
        return InMemoryItems(rows, labels), labels is not None

    def _collate_items(self, items: list[Any]) -> Any:
        """Return the batch of a dataset's items."""
        is_tuple = isinstance(items[0], tuple | list)
        if not is_tuple and not _is_array(items[0]):
            return default_collate([output_parts(item) or item for item in items])
        if is_tuple and not _is_labelled_item(items[0]):
            return default_collate(items)
        pairs = [_split(self._label, item) for item in items]
        rows = [_tensor(self._label, x) for x, _ in pairs]
        _check_shapes(self._label, rows)
        return torch.stack(rows), _collate_labels([label for _, label in pairs])


def _drawn_items(loader: DataLoader[Any]) -> Subset[Any]:
    """Return the items that a loader's sampler draws, in the order of their indices."""
    indices = drawn_indices(loader)
    with contextlib.suppress(TypeError):  # Other keys than numbers keep the sampler's order.
        indices = sorted(indices)
    return Subset(loader.dataset, indices)


def _collate_labels(labels: list[Any]) -> Any:
    """Return the labels of items as a tensor if they are tensors, and None if some are missing."""
    if any(label is None for label in labels):
        return None
    if not all(isinstance(label, Tensor) for label in labels):
        return labels
    if any(label.shape != labels[0].shape for label in labels):
        return None
    stacked = torch.stack(labels)
    return stacked[:, 0] if stacked.shape[1:] == (1,) else stacked


def _check_shapes(label: str, samples: Sequence[Tensor]) -> None:
    """Raise unless all samples have the same shape."""
    for sample in samples:
        if sample.shape != samples[0].shape:
            raise RequestError(
                f"{label} yields samples of shapes {tuple(samples[0].shape)} and "
                f"{tuple(sample.shape)}, expected one"
            )


def make_dataset(label: str, items: Items, classes: int, preprocessing: str) -> Dataset:
    """Return a dataset whose two splits are all items. Without classes there are no labels."""
    return Dataset(
        name=label,
        train=items,
        test=items,
        shape=tuple(items[0][0].shape),
        classes=classes,
        preprocessing=f"{preprocessing}; both splits are all samples",
        labelled=classes > 0,
    )


def _is_map_style(value: object) -> bool:
    """Return True for a dataset with indices, or a loader of one."""
    if isinstance(value, list) and value:
        # A list of pairs (inputs, label) is a dataset; a list of batches is a loader.
        is_item = isinstance(value[0], tuple | Mapping) and len(value[0]) > 1
        return is_item and _is_scalar(_split("", value[0])[1])
    is_loader = isinstance(value, DataLoader)
    source = value.dataset if is_loader else value  # type: ignore[attr-defined]
    if is_loader and value.batch_sampler is None:  # type: ignore[attr-defined]
        return False  # The items are batches.
    is_plain = not is_loader and isinstance(source, dict | str | bytes | tuple | list)
    is_indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return is_indexed and not is_plain and not isinstance(source, IterableDataset)


def _is_pair(value: object) -> bool:
    """Return True for arrays of inputs and labels, and False for a list of batches."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(_is_array, value)):
        return False
    if isinstance(value, tuple):
        return True
    first, second = value
    return bool(first.ndim < 2 or first.shape[1:] != second.shape[1:])


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, Tensor) and value.ndim == 0)


def _is_labelled_array(value: object) -> bool:
    """Return True for an array in a tuple, followed by nothing but labels and indices."""
    if not isinstance(value, tuple | list) or not value or not _is_array(value[0]):
        return False
    return all(part is None or _is_scalar(part) or is_identifier(part) for part in value[1:])


def _is_labelled_item(item: Sequence[Any]) -> bool:
    """Return True for an array, followed by nothing but labels and indices of one sample."""
    if not _is_array(item[0]):
        return False
    # A longer vector of integers is a mask or further tokens.
    is_short = (len(part) == 1 for part in item[1:] if isinstance(part, Tensor) and part.ndim)
    return _is_labelled_array(item) and all(is_short)


def _split(label: str, batch: Any) -> tuple[Any, Any]:
    """Return the first inputs and the labels of an item or a batch."""
    if _is_array(batch):
        return batch, None
    if isinstance(batch, tuple | list):
        if not batch:
            raise RequestError(f"{label} yields empty tuples, expected (inputs, label)")
        inputs = _split(label, batch[0])[0] if isinstance(batch[0], Mapping) else batch[0]
        labels = [part for part in batch[1:] if _is_scalar(part) or is_identifier(part)]
        return inputs, next(iter(labels or batch[1:]), None)
    parts = output_parts(batch)
    key = next((name for name in LABEL_KEYS if name in parts), "")
    labels = parts.pop(key, None)
    arrays = list(filter(_is_array, parts.values()))
    inputs = [array for array in arrays if not is_identifier(array)] or arrays or [batch]
    return inputs[0], labels


def _tensor(label: str, value: Any) -> Tensor:
    """Convert an array to a tensor on the CPU, and float64 to float32."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(native_array(value))
    if isinstance(value, list | tuple) and value and all(map(_is_array, value)):
        # A detector's list of images.
        images = [_tensor(label, image) for image in value]
        _check_shapes(label, images)
        return torch.stack(images)
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        hint = "; use transforms.ToTensor()" if hasattr(value, "convert") else ""
        raise RequestError(f"{label} yields inputs of type {kind}, expected tensors{hint}")
    tensor = dense(label, value).detach().cpu()
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _rows(label: str, inputs: Any, labels: Any) -> tuple[Tensor, Tensor | None]:
    """Return inputs as a tensor, and labels if they are class indices."""
    rows = _tensor(label, inputs)
    if rows.ndim < 2 or not rows.numel():
        raise RequestError(
            f"{label} has inputs of shape {tuple(rows.shape)}, expected (n, features) or (n, ...) "
            "with n at least 1, and no empty axis"
        )
    numbers = _as_numbers(labels)
    if numbers is None:
        return rows, None
    if not numbers.ndim or len(numbers) != len(rows):
        raise RequestError(f"{label} has {len(rows)} inputs and labels of {tuple(numbers.shape)}")
    numbers = numbers.squeeze(1) if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers
    is_index = numbers.ndim == 1 and not numbers.is_floating_point() and not numbers.is_complex()
    numbers = numbers.cpu().to(torch.int64) if is_index else numbers
    if not is_index or bool((numbers < 0).any()):
        return rows, None
    return rows, numbers


def _as_numbers(labels: Any) -> Tensor | None:
    """Return labels as a tensor, and None if there are none, or text or objects."""
    if isinstance(labels, list | tuple):
        labels = np.asarray(labels)
    if isinstance(labels, np.ndarray):
        labels = native_array(labels)
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        return None


def native_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in a byte order, a memory order and a precision that PyTorch has.

    Examples
    --------
    >>> native_array(np.ones(2, ">f8")).dtype, native_array(np.ones(2, np.longdouble)).dtype
    (dtype('float64'), dtype('float64'))
    """
    kind = array.dtype.newbyteorder("=")
    if kind.kind == "f" and kind.itemsize > 8:
        kind = np.dtype(np.float64)
    return np.ascontiguousarray(array.astype(kind, copy=False)).reshape(array.shape)


def _class_count(source: Any, items: Any) -> int:
    """Return the number of classes: as declared, or the largest label plus one.

    It is 0 if some items have no class index.
    """
    for name in ("num_classes", "n_classes"):
        declared = getattr(source, name, None)
        if isinstance(declared, int):
            return declared
    classes = getattr(source, "classes", None)
    if isinstance(classes, list | tuple):
        return len(classes)
    labels = getattr(source, "targets", None)
    if labels is None:
        labels = next(filter(is_identifier, getattr(source, "tensors", ())[1:]), None)
    if labels is None and isinstance(items, InMemoryItems):
        labels = items.labels
    if labels is None:
        labels = items.class_indices()
    if isinstance(labels, list) and None in labels:
        return 0
    numbers = torch.as_tensor(labels)
    is_index = numbers.numel() > 0 and not numbers.is_floating_point() and int(numbers.min()) >= 0
    return int(numbers.max()) + 1 if is_index else 0


def _read_stream(batches: Iterable[Any]) -> tuple[list[Any], str]:
    """Read a stream to its end, or until the memory limit."""
    read: list[Any] = []
    size = 0
    for batch in batches:
        # Some loaders reuse the same tensors for all batches.
        read.append(copy.deepcopy(batch))
        leaves = pytree.tree_leaves(batch)
        size += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if size > MAX_SAMPLE_BYTES:
            return read, f"; the first {len(read)} batches of a stream"
    return read, ""
