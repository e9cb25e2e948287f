"""Replacement of ReLU calls by layers, including calls of ReLU as a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.errors import RequestError
from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.module_stack import running_module

from .layers import SparsePReLU
from .relu_calls import ReLUCall

SUBSTITUTE = "called_relu"
"""Module attribute with the name of the child that replaces its ReLU calls."""

# Number of calls of each module in the current forward pass. It is not stored in the modules, so
# that copies of a network and other threads count separately.
_CALLS: ContextVar[Counter[nn.Module] | None] = ContextVar("calls", default=None)


class PReLUPerCall(nn.Module):
    """Replacement for a ReLU that is called several times, with one PReLU per call.

    Parameters
    ----------
    calls : iterable of SparsePReLU
        In call order.
    """

    def __init__(self, calls: Iterable[SparsePReLU]) -> None:
        super().__init__()
        for index, call in enumerate(calls):
            self.add_module(str(index), call)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the PReLU for this call."""
        calls = _CALLS.get()
        index = 0
        if calls is not None:
            index = calls[self]
            calls[self] += 1
        if str(index) not in self._modules:
            raise RequestError(
                f"a ReLU is called {index + 1} times in one forward pass, but was called "
                f"{len(self._modules)} times on the example passed to sparsify"
            )
        output: Tensor = getattr(self, str(index))(input)
        return output


class _CountingModule(nn.Module):
    """Base class for modules that call ReLU as a function, and for modules that contain them.

    The counts are reset around each forward pass, not in hooks, which an interrupt would skip.
    """

    original: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _CALLS.set(Counter()) if _CALLS.get() is None else None
        try:
            if SUBSTITUTE not in vars(self):
                return super().__call__(*args, **kwargs)
            with _Substitution(self):
                return super().__call__(*args, **kwargs)
        finally:
            if token is not None:
                _CALLS.reset(token)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_counting, (self.original,), self.__getstate__()  # type: ignore[no-untyped-call]


@cache
def _counting_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class that counts calls and has the original's name."""
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(original, name) for name in names} | {"original": original}
    return type(original.__name__, (_CountingModule, original), attributes)


def _new_counting(original: type[nn.Module]) -> nn.Module:
    """Create an empty module for `copy` and `pickle`."""
    kind = _counting_class(original)  # type: ignore[arg-type]
    return kind.__new__(kind)


class _Substitution(TorchFunctionMode):
    """Mode that redirects functional ReLU calls in a module's own forward to its PReLU."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._descendants = module, set(module.modules())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        # Calls inside a child are skipped, even if the example didn't reach them.
        if call.operation.kind == "relu" and running_module(self._descendants) is self._module:
            return getattr(self._module, vars(self._module)[SUBSTITUTE])(call.input)
        return call.run()


def replace_calls(model: nn.Module, calls: Sequence[ReLUCall], layerwise: bool) -> None:
    """Replace each ReLU call of a model by a PReLU, in place."""
    by_owner: dict[nn.Module, list[SparsePReLU]] = {}
    for call in calls:
        layer = SparsePReLU(call.units, layerwise=layerwise, axis=call.axis)
        layer.to(call.device, call.dtype).train(model.training)
        by_owner.setdefault(call.owner, []).append(layer)
    for owner, layers in by_owner.items():
        substitute = layers[0] if len(layers) == 1 else PReLUPerCall(layers).train(model.training)
        if type(owner) is nn.ReLU and owner is not model:
            for parent in list(model.modules()):
                for name, child in parent._modules.items():
                    if child is owner:
                        parent._modules[name] = substitute
        else:
            name = _free_name(owner)
            owner.add_module(name, substitute)
            setattr(owner, SUBSTITUTE, name)
    for module in list(model.modules()):
        if any(SUBSTITUTE in vars(m) or isinstance(m, PReLUPerCall) for m in module.modules()):
            module.__class__ = _counting_class(type(module))  # type: ignore[arg-type]
        # Disable PyTorch's fused kernel for this layer, which would apply a ReLU.
        if isinstance(module, nn.TransformerEncoderLayer) and module.activation_relu_or_gelu == 1:
            module.activation_relu_or_gelu = 0
        # Nested tensors require that kernel.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _free_name(module: nn.Module) -> str:
    number, name = 0, "relu"
    while hasattr(module, name):
        number += 1
        name = f"relu_{number}"
    return name
