"""Recognition of activation functions in handwritten modules."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

UNOBSERVED_THREAD = "nlbench, unobserved"
"""Name of the threads that run modules outside of a forward pass."""

# Maximum difference in float64 between a module and the function that it computes. Constants such
# as sqrt(2 / pi) are written with at least seven digits. The two forms of GELU differ by 5e-4.
TOLERANCE = 1e-6

_FUNCTIONS: Mapping[str, Sequence[Callable[[Tensor], Tensor]]] = {
    kind: (getattr(functional, kind),)
    for kind in (
        "celu", "gelu", "hardsigmoid", "hardswish", "logsigmoid", "mish", "relu", "relu6", "selu",
        "sigmoid", "silu", "softplus", "softsign", "tanh", "tanhshrink",
    )
} | {"gelu": (functional.gelu, partial(functional.gelu, approximate="tanh"))}  # fmt: skip


_KINDS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def known_kind(module: nn.Module) -> str:
    """Return the kind of function that a module without parameters computes.

    Return "" if it is unknown.

    Examples
    --------
    >>> class NewGELU(nn.Module):
    ...     def forward(self, x):
    ...         return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    >>> known_kind(NewGELU())
    'gelu'
    """
    if module not in _KINDS:
        _KINDS[module] = _identify(module)
    return _KINDS[module]


def _identify(module: nn.Module) -> str:
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return ""
    grid = torch.linspace(-8, 8, 97, dtype=torch.float64)[None]
    values = _compute_unobserved(lambda: module.forward(grid.clone()))
    if values is None or values.shape != grid.shape:
        return ""
    for kind, functions in _FUNCTIONS.items():
        for function in functions:
            expected = _compute_unobserved(partial(function, grid))
            if expected is not None and bool(((values - expected).abs() < TOLERANCE).all()):
                return kind
    return ""


def _compute_unobserved(compute: Callable[[], Tensor]) -> Tensor | None:
    """Compute a tensor in a separate thread, hidden from probes. Return None on failure."""
    results: list[Tensor] = []

    def work() -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            results.append(compute())

    thread = threading.Thread(target=work, name=UNOBSERVED_THREAD)
    thread.start()
    thread.join()
    return results[0] if results and isinstance(results[0], Tensor) else None


def is_root_mean_square_norm(module: nn.Module, width: int) -> bool:
    """Return True if a module maps x (..., width) to w x / sqrt(mean x²) for some weights w.

    The module is run with random parameters, so the values of its own don't matter.

    Examples
    --------
    >>> is_root_mean_square_norm(nn.RMSNorm(4), 4), is_root_mean_square_norm(nn.LayerNorm(4), 4)
    (True, False)
    """
    generator = torch.Generator().manual_seed(0)

    def deviation() -> Tensor:
        x, other = torch.randn(2, 3, width, generator=generator)
        trial = copy.copy(module)
        vars(trial).pop("forward", None)  # It may be wrapped, and belong to the original.
        trial._parameters = {
            name: nn.Parameter(1 + torch.rand(parameter.shape, generator=generator))
            for name, parameter in module.named_parameters(recurse=False)
        }
        weights = torch.stack(
            [
                trial.forward(rows) / rows * rows.square().mean(-1, keepdim=True).sqrt()
                for rows in (x, other, 4 * x)
            ]
        )
        return (weights / weights[0, 0] - 1).abs().max()

    largest = _compute_unobserved(deviation)
    # Relative tolerance for a normalisation that computes in float32 and adds an epsilon.
    return largest is not None and bool(largest < 1e-3)
