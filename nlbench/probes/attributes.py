"""Give a model's modules their attributes back after a pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["attributes_kept"]


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a pass sets on modules, such as a mask that is made once and kept.

    A network run without numbers would keep a mask without numbers. Values that an attribute's
    tensor holds are not looked after.

    Examples
    --------
    >>> model = nn.Identity()
    >>> with attributes_kept(model):
    ...     model.mask = [1]
    >>> hasattr(model, "mask")
    False
    """
    before = [(module, _copied(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            for name, (value, content) in attributes.items():
                # The same containers again: others, as handles of hooks, refer to them.
                if isinstance(value, dict):
                    value.clear()
                    value.update(content)
                elif isinstance(value, list):
                    value[:] = content
                vars(module)[name] = value


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, copy.copy(value) if isinstance(value, dict | list) else None)
        for name, value in attributes.items()
    }
