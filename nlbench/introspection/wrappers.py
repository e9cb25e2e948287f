"""Networks inside wrappers: compiled, parallel, averaged and exported modules."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce, wraps
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from nlbench.errors import RequestError, Undefined, first_line

from .function_calls import unobserved_calls
from .operations import named_modules


class _Interpreter(fx.Interpreter):
    """Runs the nodes of a graph in parts."""

    def run_nodes(self, nodes: Iterable[fx.Node]) -> Any:
        """Run nodes, and return the result of the last one."""
        result = None
        for node in nodes:
            self.env[node] = result = self.run_node(node)
            for unused in self.user_to_last_uses.get(node, ()):
                del self.env[unused]
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Check the sizes for which the program holds."""
        try:
            with unobserved_calls():
                return super().call_module(target, args, kwargs)
        except AssertionError as error:
            raise Undefined(
                f"the program was exported for inputs of another size ({first_line(error)}); "
                "export it with dynamic_shapes"
            ) from error


class _Scope(nn.Module):
    """Stands for a module of the network, and runs its operations."""

    def forward(self, *inputs: Any) -> Any:
        """Run the operations of the current call. The inputs are only shown to hooks."""
        interpreter, nodes = self._call  # type: ignore[misc]
        return interpreter.run_nodes(nodes)


class ExportedNetwork(nn.Module):
    """An exported program, run module by module.

    It shares the program's tensors, and stays in the mode in which the program was exported.

    Examples
    --------
    >>> import torch
    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)
    >>> network = ExportedNetwork(torch.export.export(model, (x,)).module())
    >>> [name for name, _ in network.named_modules()], network(x).shape
    (['', '0', '1'], torch.Size([1, 3]))
    """

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__()
        self.signature = inspect.signature(program.forward)
        self._graph = program.graph
        self._classes = dict(map(_innermost_module, self._graph.nodes))
        for name, parameter in program.named_parameters(remove_duplicate=False):
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, parameter)
        for name, buffer in program.named_buffers(remove_duplicate=False):
            owner, leaf = self._owner(name)
            owner.register_buffer(leaf, buffer)
        for node in self._graph.nodes:
            if node.op == "call_function":
                self._module(_innermost_module(node)[0])
            elif node.op in ("get_attr", "call_module"):
                owner, leaf = self._owner(node.target)
                if not hasattr(owner, leaf):
                    # A constant, or a check of sizes, which is no module of the network.
                    vars(owner)[leaf] = reduce(getattr, node.target.split("."), program)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._module(path), leaf

    def _module(self, path: str) -> nn.Module:
        """Return the module of a path, created with its parents if there is none."""
        module: nn.Module = self
        for number, part in enumerate(path.split(".") if path else (), 1):
            if part not in module._modules:
                place = ".".join(path.split(".")[:number])
                module.add_module(part, _scope(self._classes.get(place, "")))
            module = module._modules[part]  # type: ignore[assignment]
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operations, each inside a call of its module."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._graph._codegen.pytree_info.in_spec:  # type: ignore[attr-defined]
            raise RequestError(
                f"the exported program takes {self.signature}, but it is called with "
                f"{len(args) + len(kwargs)} arguments of another structure"
            )
        interpreter = _Interpreter(self, graph=self._graph)
        interpreter.args_iter = iter(flat)
        *nodes, output = self._graph.nodes
        calls = [node for node in nodes if node.op == "call_function"]
        interpreter.run_nodes(node for node in nodes if node.op != "call_function")
        for _, group in itertools.groupby(calls, key=_innermost_call):
            self._call_module(interpreter, list(group))
        return self._graph.process_outputs(interpreter.run_nodes([output]))

    def _call_module(self, interpreter: _Interpreter, nodes: Sequence[fx.Node]) -> None:
        """Run consecutive operations of one call of a module."""
        path, _ = _innermost_module(nodes[0])
        if not path:
            interpreter.run_nodes(nodes)
            return
        module = self.get_submodule(path)
        sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
        outside = [s for s in sources if s not in nodes and s.op != "get_attr"]
        module._call = interpreter, nodes  # type: ignore[assignment]
        try:
            module(*(interpreter.env[source] for source in outside))
        finally:
            del module._call


def _scope(class_name: str) -> nn.Module:
    """Return a module without parameters that stands for one of a class, given by its full name."""
    home, _, name = class_name.rpartition(".")
    for kind in named_modules():
        if (kind.__module__, kind.__qualname__) == (home, name):
            # Sites are named after modules of this class itself.
            activation = kind.__new__(kind)
            nn.Module.__init__(activation)
            activation.forward = MethodType(_Scope.forward, activation)
            return activation
    stand_in: type[nn.Module] = type(name or "Module", (_Scope,), {"__module__": home or __name__})
    return stand_in()


def _innermost_call(node: fx.Node) -> str:
    """Return the key of the innermost module call of a node."""
    keys = list(node.meta.get("nn_module_stack") or ("",))
    return str(keys[-1])


def _innermost_module(node: fx.Node) -> tuple[str, str]:
    """Return the path and the class name of a node's innermost module."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    path, kind = next(reversed(stack.values()))
    return path.partition("@")[0], kind


F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the network inside a model's wrappers, which are put back on exit.

    The network runs without a compiler and in one thread. Its modules have the names that they have
    without wrappers. Wrappers of modules inside the model are taken off, too.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> model = nn.DataParallel(network)
    >>> with unwrapped(model) as inside:
    ...     inside is network
    True
    """
    with ExitStack() as stack:
        network = _take_off_wrappers(model, stack)
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            # For functions that are compiled where they are defined.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield network


def remove_wrappers(model: nn.Module) -> nn.Module:
    """Take a model's wrappers off for good, and return the network inside.

    Examples
    --------
    >>> remove_wrappers(nn.Sequential(nn.DataParallel(nn.ReLU())))
    Sequential(
      (0): ReLU()
    )
    """
    with ExitStack() as stack:
        network = _take_off_wrappers(model, stack)
        stack.pop_all()
    return network


def through_wrappers(function: F) -> F:
    """Call a function of a model with the network inside the model's wrappers."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = kwargs.pop("model") if not args else args[0]
        with unwrapped(model) as network:
            return function(network, *args[1:], **kwargs)

    return cast("F", call)


def _take_off_wrappers(model: nn.Module, stack: ExitStack) -> nn.Module:
    """Return the network inside a model's wrappers. The stack puts them back."""
    network = _inside(model)
    # The table of a scripted module can't be iterated.
    modules = [m for m in network.modules() if not isinstance(m, torch.jit.ScriptModule)]
    for module in modules:
        for name, child in list(module._modules.items()):
            if child is not None and (inner := _inside(child)) is not child:
                stack.callback(module._modules.__setitem__, name, child)
                module._modules[name] = inner
    for module in modules:
        _take_off_compiled_calls(module, stack)
    return network


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers of a module that compute nothing of their own."""
    while True:
        # Its class is not imported, since that takes seconds.
        if _full_name(type(module)) == "torch._dynamo.eval_frame.OptimizedModule":
            if _is_changed(module):
                return _Uncompiled(module)
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, _CALLING) and not _is_changed(module):
            module = module.module
        elif isinstance(module, fx.GraphModule) and "eval" in vars(module):
            # Made by `torch.export`: its own `eval`, an attribute, raises an error.
            return _exported(module)
        else:
            return module


_CALLING = (nn.DataParallel, DistributedDataParallel, AveragedModel)
"""Wrappers that call the network inside, unless a subclass or a hook does more."""
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_changed(wrapper: nn.Module) -> bool:
    """Return True if a wrapper may compute something of its own."""
    if wrapper._forward_hooks or wrapper._forward_pre_hooks:
        return True
    kind = type(wrapper)
    # A compiled module's forward is its own attribute, also before the first call.
    if not isinstance(wrapper, _CALLING):
        return _own_forward(wrapper) is not None
    original = next(each for each in _CALLING if issubclass(kind, each))
    is_overridden = any(
        getattr(kind, name) is not getattr(original, name) for name in ("forward", "__call__")
    )
    return is_overridden or "forward" in vars(wrapper)


def _own_forward(compiled: nn.Module) -> Any:
    """Return the function that replaces a compiled module's forward, or None."""
    forward = vars(compiled).get("forward")
    is_of_pytorch = hasattr(forward, "_torchdynamo_orig_callable") or (
        getattr(forward, "__self__", None) is compiled
    )
    is_of_pytorch = is_of_pytorch or type(forward).__module__.startswith("torch.")
    return None if is_of_pytorch else forward


class _Uncompiled(nn.Module):
    """Stands for a compiled module with hooks or a forward of its own, which copies would lose."""

    def __init__(self, compiled: nn.Module) -> None:
        super().__init__()
        self._orig_mod = _inside(compiled._orig_mod)  # type: ignore[arg-type]
        self.training = compiled.training
        for name in _HOOKS:
            vars(self)[name] = vars(compiled)[name].copy()
        if (forward := _own_forward(compiled)) is not None:
            vars(self)["forward"] = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module that was compiled."""
        return self._orig_mod(*args, **kwargs)


def _exported(program: fx.GraphModule) -> ExportedNetwork:
    """Return an exported program as a network, with the hooks that PyTorch has not added."""
    network = ExportedNetwork(program)
    for name in _HOOKS:
        vars(network)[name] = vars(program)[name].copy()
    for hooks in (network._forward_hooks, network._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith("torch."):
                del hooks[key]
    return network


def _take_off_compiled_calls(module: nn.Module, stack: ExitStack) -> None:
    """Replace compiled functions in a module's attributes by the functions themselves."""
    attributes = vars(module)
    for name, value in list(attributes.items()):
        original: Any = getattr(value, "_torchdynamo_orig_callable", None)
        if name == "_compiled_call_impl":
            original = None
        elif original is None:
            continue
        stack.callback(attributes.__setitem__, name, value)
        attributes[name] = original
