"""How a model is called: with a tensor, with several arguments, with what a loader yields.

Probes know one thing: a model that takes one tensor (n, ...) and gives one. Where a model takes
more, its tensors are laid side by side in one, and taken apart again on the way into the model;
where it gives more, its logits are taken out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError, nearest

__all__ = [
    "Arguments",
    "BatchReader",
    "is_batch",
    "model_called",
    "refused",
    "tensor_of_output",
]


PLAIN = bool | int | float | str | None


@dataclass(frozen=True)
class Arguments:
    """The arguments of a model beside one tensor that holds them all.

    Parameters
    ----------
    names : tuple of int or str
        Of the tensors: positions, or keywords.
    shapes : tuple of tuple of int
        Of one sample of each.
    dtypes : tuple of torch.dtype
    constants : tuple of (int or str, value)
        Arguments that are no tensors, such as a flag; the same for all batches.

    Examples
    --------
    >>> arguments = Arguments.of((torch.zeros(2, 3), torch.ones(2, 1)))
    >>> packed = arguments.packed((torch.zeros(2, 3), torch.ones(2, 1)))
    >>> packed.shape, [one.shape for one in arguments.unpacked(packed)[0]]
    (torch.Size([2, 4]), [torch.Size([2, 3]), torch.Size([2, 1])])
    """

    names: tuple[int | str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    constants: tuple[tuple[int | str, PLAIN], ...] = ()

    @classmethod
    def of(cls, batch: object) -> Arguments:
        """Read from one batch how the model is called.

        Parameters
        ----------
        batch : tensor, tuple, list or mapping
            For ``model(x)``, ``model(*batch)`` or ``model(**batch)``.

        Raises
        ------
        nlbench.RequestError
            If there is no tensor in it, or there are tensors that can't be laid side by side:
            of different lengths, or some with integers and some with fractions.
        """
        tensors, constants = _sorted(batch)
        if not tensors:
            raise RequestError(f"inputs: {_kind(batch)} without a tensor, expected one at least")
        names, given = tuple(tensors), list(tensors.values())
        for name, tensor in tensors.items():
            if tensor.ndim == 0 or (tensor.ndim < 2 and len(tensors) == 1):
                raise RequestError(
                    f"inputs{_place(name, batch)} have shape {tuple(tensor.shape)}, "
                    "expected (n, ...) with n of at least 1"
                )
        lengths = [len(tensor) for tensor in given]
        if len(set(lengths)) > 1:
            raise RequestError(
                f"inputs: {_kind(batch)} of tensors with {_listed(lengths)} samples; a tuple or "
                "mapping is one batch of arguments, all with the same first axis (a list of "
                "tensors is a list of batches)"
            )
        dtypes = tuple(tensor.dtype for tensor in given)
        floats = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        if len(given) > 1 and floats and (len(floats) > 1 or len(set(dtypes)) > 1):
            kinds = _listed(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RequestError(
                f"inputs: {_kind(batch)} of {kinds}; several arguments are measured together as "
                "one tensor, so they have to be all of one floating type or all integers; wrap "
                "the model in a module that takes one of them"
            )
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in given)
        return cls(names, shapes, dtypes, tuple(constants.items()))

    @property
    def is_one_tensor(self) -> bool:
        """Whether the model is called with the tensor as it is."""
        return self.names == (0,) and not self.constants

    def packed(self, batch: object) -> Tensor:
        """Lay the tensors of a batch side by side; a single one stays as it is.

        Raises
        ------
        nlbench.RequestError
            If the batch has other arguments than the first.
        """
        tensors, constants = _sorted(batch)
        if tuple(tensors) != self.names or tuple(constants.items()) != self.constants:
            had, has = (_listed(names) for names in (self.names, tuple(tensors) or ("no tensors",)))
            raise RequestError(
                f"inputs: the loader yields batches of different arguments: {had}, then {has}"
            )
        given = list(tensors.values())
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in given)
        if shapes != self.shapes:
            raise RequestError(
                f"inputs: the loader yields samples of shapes {sorted({*shapes, *self.shapes})}"
            )
        if len(given) == 1:
            return given[0]
        wide = given[0].dtype if self.dtypes[0].is_floating_point else torch.int64
        return torch.cat([tensor.reshape(len(tensor), -1).to(wide) for tensor in given], 1)

    def unpacked(self, packed: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give positional and keyword arguments for what `packed` gave, or a part of it."""
        values: dict[int | str, Any] = dict(self.constants)
        if len(self.names) == 1:
            values[self.names[0]] = packed
        else:
            start = 0
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True):
                width = torch.Size(shape).numel()
                part = packed[:, start : start + width].reshape(len(packed), *shape)
                # Floats stay in the precision that a probe chose for them.
                values[name] = part if dtype.is_floating_point else part.to(dtype)
                start += width
        positions = sorted(name for name in values if isinstance(name, int))
        keywords = {name: value for name, value in values.items() if isinstance(name, str)}
        return tuple(values[position] for position in positions), keywords

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Do it as a forward pre-hook."""
        is_packed = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        return self.unpacked(args[0]) if is_packed else None


def is_batch(inputs: object) -> bool:
    """Whether inputs are one batch: a tensor, a tuple of arguments, a mapping of keywords."""
    return isinstance(inputs, Tensor | tuple | Mapping)


class BatchReader:
    """Takes what a loader yields apart into the model's arguments and labels.

    Parameters
    ----------
    model : torch.nn.Module
        Decides, where nobody says it, whether a pair is (inputs, labels): only if it takes one
        argument.
    labels : bool, str or None
        True: the last of a tuple, or a mapping's ``labels``, are labels; False: there are none;
        a text: the key of a mapping; None: as said above.

    Examples
    --------
    >>> reader = BatchReader(nn.Linear(2, 2), None)
    >>> inputs, labels = reader.read((torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    >>> inputs.shape, labels
    (torch.Size([3, 2]), tensor([0, 1, 1]))
    """

    def __init__(self, model: nn.Module, labels: bool | str | None) -> None:
        self._labels = labels
        self._most, self._keywords = _parameters(model)
        self.arguments: Arguments | None = None

    def read(self, batch: object) -> tuple[Tensor, Tensor | None]:
        """Give the model's arguments as one tensor, and the labels if there are any.

        Raises
        ------
        nlbench.RequestError
            If it can't be known, or isn't so, that the batch fits the model.
        """
        if not isinstance(batch, Tensor | tuple | list | Mapping):
            raise RequestError(f"inputs: the loader yields {_named(batch)}, {_expected(batch)}")
        given, labels = self._split(batch)
        if self.arguments is None:
            self.arguments = Arguments.of(given)
            self._check_number(self.arguments)
        inputs = self.arguments.packed(given)
        if isinstance(labels, Tensor) and labels.shape[:1] != inputs.shape[:1]:
            raise RequestError(
                f"inputs: a batch of {len(inputs)} samples with labels of shape "
                f"{tuple(labels.shape)}, expected as many"
            )
        return inputs, labels if isinstance(labels, Tensor) else None

    def _split(self, batch: Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]) -> Any:
        if isinstance(batch, Tensor):
            return batch, None
        if isinstance(batch, Mapping):
            return self._of_mapping(batch)
        if isinstance(self._labels, str):
            raise RequestError(
                f"labels: '{self._labels}' is a mapping's key, but the loader yields tuples; "
                "labels=True says that the last of a tuple are labels"
            )
        if self._labels is None and len(batch) == 2:
            if self._most is None or self._most > 1:
                raise RequestError(
                    "inputs: the loader yields pairs, and the model takes several arguments; say "
                    "labels=True if the second are labels, labels=False if both are the model's"
                )
            return _first(batch[:-1]), batch[-1]
        if self._labels and len(batch) > 1:
            return _first(batch[:-1]), batch[-1]
        return _first(batch), None

    def _of_mapping(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
        key = self._labels if isinstance(self._labels, str) else "labels"
        if self._labels is False or (self._labels is None and key not in batch):
            return batch, None
        if key not in batch:
            raise RequestError(f"labels: a batch has no '{key}'{nearest(key, map(str, batch))}")
        if self._labels is None and key in self._keywords:
            raise RequestError(
                "inputs: a batch has 'labels', and the model takes them; say labels=True to keep "
                "them from it, labels=False to give them to it"
            )
        return {name: value for name, value in batch.items() if name != key}, batch[key]

    def _check_number(self, arguments: Arguments) -> None:
        number = len(arguments.names) + len(arguments.constants)
        if self._most is not None and number > self._most:
            raise RequestError(
                f"inputs: a batch has {number} arguments, the model takes {self._most}; a tuple "
                "or mapping is one batch of arguments, model(*args) or model(**kwargs), and a list "
                "of tensors a list of batches"
            )


@contextmanager
def model_called(model: nn.Module, arguments: Arguments) -> Iterator[None]:
    """Let a model take its arguments as one tensor, and give one, for a while.

    A copy that is made of it meanwhile does so too.
    """
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        if not arguments.is_one_tensor:
            raise RequestError(
                "inputs: a compiled or scripted model is called with one tensor only; pass the "
                "module it was made from"
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
    """Take the logits out of what a model gives, as a forward hook.

    They are the attribute or entry ``logits``, else ``out``, else the only tensor that there is.
    Anything else stays as it is, and is refused by a probe that needs a tensor.

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
    for name in ("logits", "out"):
        entry = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(entry, Tensor):
            return entry
    values = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list):
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == 1:
            return tensors[0]
    return output


def refused(inputs: object) -> RequestError:
    """Say what is wrong with inputs that are neither a batch nor a loader."""
    if isinstance(inputs, TorchDataset):
        return RequestError(
            f"inputs: a {type(inputs).__name__} is a Dataset, which yields samples one by one, "
            "expected batches: torch.utils.data.DataLoader(dataset, batch_size=128) yields them"
        )
    return RequestError(f"inputs: {_named(inputs)}, {_expected(inputs, 'a tensor or a loader of')}")


def _sorted(batch: object) -> tuple[dict[int | str, Tensor], dict[int | str, PLAIN]]:
    """Tensors and other arguments of a batch, by position or keyword."""
    if isinstance(batch, Tensor):
        return {0: _plain(batch, "")}, {}
    entries: dict[Any, Any] = dict(batch) if isinstance(batch, Mapping) else {}
    if isinstance(batch, tuple | list):
        entries = dict(enumerate(batch))
    tensors: dict[int | str, Tensor] = {}
    constants: dict[int | str, PLAIN] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[name] = _plain(value, _place(name, batch))
        elif isinstance(value, PLAIN) and isinstance(name, int | str):
            constants[name] = value
        else:
            raise RequestError(f"inputs{_place(name, batch)}: {_named(value)}, {_expected(value)}")
    return tensors, constants


def _plain(tensor: Tensor, where: str) -> Tensor:
    """Refuse what is no dense tensor with numbers; of a subclass only its numbers are taken."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise RequestError(f"inputs{where}: a sparse or nested tensor, expected a dense one")
    if tensor.is_meta:
        raise RequestError(f"inputs{where}: a tensor on the meta device, which has no numbers")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        if getattr(tensor, "is_pretended", False):  # It differs from a tensor in its device alone.
            return tensor
        raise RequestError(
            f"inputs{where}: {_named(tensor)}, whose numbers only it knows; expected a torch.Tensor"
        )
    return tensor.as_subclass(Tensor)


def _parameters(model: nn.Module) -> tuple[int | None, frozenset[str]]:
    """How many arguments a model takes, None for any number, and their names."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None, frozenset()
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        most = None
    else:
        most = len(parameters)
    return most, frozenset(one.name for one in parameters)


def _first(entries: Any) -> Any:
    return entries[0] if len(entries) == 1 and isinstance(entries[0], Tensor) else tuple(entries)


def _place(name: object, batch: object) -> str:
    if isinstance(batch, Tensor):
        return ""
    return f"['{name}']" if isinstance(batch, Mapping) else f"[{name}]"


def _kind(batch: object) -> str:
    return "a mapping" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"


def _named(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[:1] in "AEIOUaeio" else f"a {kind}"


def _expected(value: object, what: str = "batches of") -> str:
    hint = ""
    if hasattr(value, "__array__"):
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        dtype = ", dtype=torch.float32" if kind == "f" else ""
        hint = f"; torch.as_tensor(inputs{dtype}) makes one of an array"
    return f"expected {what} tensors{hint}"


def _listed(entries: Any) -> str:
    names = [str(entry) for entry in entries]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
