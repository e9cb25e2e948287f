"""Exported programs as networks with the modules that they were exported from.

`torch.export` inlines all modules into one graph of operations, but records the module of each
operation.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MethodType
from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from nlbench.errors import RequestError, Undefined, first_line

from .function_calls import unobserved_calls
from .operations import named_modules


def is_exported(module: nn.Module) -> bool:
    """Return True for a module made by ``torch.export.export(...).module()``.

    Examples
    --------
    >>> is_exported(nn.ReLU())
    False
    """
    # Its own `eval`, an attribute, raises an error.
    return isinstance(module, fx.GraphModule) and "eval" in vars(module)


@dataclass(frozen=True)
class _Reference:
    """The result of a node, as an argument of another one."""

    name: str


@dataclass(frozen=True)
class _Step:
    """A node of the graph, with plain data as arguments."""

    name: str
    function: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, node: fx.Node) -> _Step:
        args, kwargs = _with_references((node.args, node.kwargs))
        return cls(node.name, node.target, args, kwargs)

    def run(self, values: dict[str, Any]) -> None:
        args, kwargs = pytree.tree_map_only(
            _Reference, lambda reference: values[reference.name], (self.args, self.kwargs)
        )
        values[self.name] = self.function(*args, **kwargs)


@dataclass(frozen=True)
class _Block:
    """Consecutive operations of one call of a module.

    Parameters
    ----------
    inputs : sequence of str
        Names of the tensors from outside.
    unused : sequence of str
        Names of the results that no later block uses.
    """

    path: str
    steps: Sequence[_Step]
    inputs: Sequence[str]
    unused: Sequence[str]


class _Scope(nn.Module):
    """Stands for a module of the network, and runs its operations."""

    def forward(self, *inputs: Any) -> Any:
        """Run the operations of the current call. The inputs are only shown to hooks."""
        steps, values = self._call  # type: ignore[misc]
        for step in steps:
            step.run(values)
        return values[steps[-1].name]


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
        self._in_spec, self._out_spec = _specs(program)
        nodes = list(program.graph.nodes)
        self._classes = dict(_innermost_module(node) for node in nodes)
        self._placeholders = [node.name for node in nodes if node.op == "placeholder"]
        self._output = _with_references(nodes[-1].args[0])
        self._constants: dict[str, Any] = {}
        for name, parameter in program.named_parameters(remove_duplicate=False):
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, parameter)
        for name, buffer in program.named_buffers(remove_duplicate=False):
            owner, leaf = self._owner(name)
            owner.register_buffer(leaf, buffer)
        for node in nodes:
            if node.op == "get_attr" and not self._has(node.target):
                self._constants[node.name] = _attribute(program, node.target)
        self._attributes = {
            node.name: node.target
            for node in nodes
            if node.op == "get_attr" and node.name not in self._constants
        }
        # Checks of the sizes for which the program holds.
        self._guards = [
            (_attribute(program, node.target), _Step.of(node))
            for node in nodes
            if node.op == "call_module"
        ]
        calls = [node for node in nodes if node.op == "call_function"]
        last_user = {source: node for node in calls for source in node.all_input_nodes}
        kept = {node for node in nodes if node.op == "get_attr"} | {*nodes[-1].all_input_nodes}
        self._blocks = [
            self._block(list(group), last_user, kept)
            for _, group in itertools.groupby(calls, key=_innermost_call)
        ]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._module(path), leaf

    def _has(self, name: str) -> bool:
        path, _, leaf = name.rpartition(".")
        modules = dict(self.named_modules())
        owner = modules.get(path)
        return owner is not None and (leaf in owner._parameters or leaf in owner._buffers)

    def _module(self, path: str) -> nn.Module:
        """Return the module of a path, created with its parents if there is none."""
        module: nn.Module = self
        for number, part in enumerate(path.split(".") if path else (), 1):
            if part not in module._modules:
                place = ".".join(path.split(".")[:number])
                module.add_module(part, _scope(self._classes.get(place, "")))
            module = module._modules[part]  # type: ignore[assignment]
        return module

    def _block(
        self, nodes: Sequence[fx.Node], last_user: Mapping[fx.Node, fx.Node], kept: set[fx.Node]
    ) -> _Block:
        path, _ = _innermost_module(nodes[0])
        self._module(path)
        inside = {node.name for node in nodes}
        sources = [source for node in nodes for source in node.all_input_nodes]
        inputs = dict.fromkeys(
            source.name
            for source in sources
            if source.name not in inside and source.op != "get_attr"
        )
        unused = [
            source.name
            for source, user in last_user.items()
            if user in nodes and source not in kept
        ]
        return _Block(path, [_Step.of(node) for node in nodes], list(inputs), unused)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operations, each inside a call of its module."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise RequestError(
                f"the exported program takes {self.signature}, but it is called with "
                f"{len(args) + len(kwargs)} arguments of another structure"
            )
        values: dict[str, Any] = dict(zip(self._placeholders, flat, strict=True))
        for guard, step in self._guards:
            try:
                with unobserved_calls():
                    _Step(step.name, guard, step.args, step.kwargs).run(values)
            except AssertionError as error:
                raise Undefined(
                    f"the program was exported for inputs of another size ({first_line(error)}); "
                    "export it with dynamic_shapes"
                ) from error
        for name, target in self._attributes.items():
            values[name] = _attribute(self, target)
        values.update(self._constants)
        for block in self._blocks:
            if block.path:
                self._call_module(block, values)
            else:
                for step in block.steps:
                    step.run(values)
            for name in block.unused:
                del values[name]
        output = pytree.tree_map_only(
            _Reference, lambda reference: values[reference.name], self._output
        )
        return pytree.tree_unflatten(pytree.tree_leaves(output), self._out_spec)

    def _call_module(self, block: _Block, values: dict[str, Any]) -> None:
        module = self.get_submodule(block.path)
        module._call = block.steps, values  # type: ignore[assignment]
        try:
            module(*(values[name] for name in block.inputs))
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


def _specs(program: fx.GraphModule) -> tuple[Any, Any]:
    info = program.graph._codegen.pytree_info  # type: ignore[attr-defined]
    return info.in_spec, info.out_spec


def _with_references(arguments: Any) -> Any:
    """Replace the nodes in arguments by references."""
    return map_arg(arguments, lambda node: _Reference(node.name))  # type: ignore


def _attribute(owner: Any, target: str) -> Any:
    return reduce(getattr, target.split("."), owner)


def _innermost_call(node: fx.Node) -> str:
    """Return the key of the innermost module call of a node."""
    keys = list(node.meta.get("nn_module_stack") or ("",))
    return str(keys[-1])


def _innermost_module(node: fx.Node) -> tuple[str, str]:
    """Return the path and the class name of a node's innermost module."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    path, kind = next(reversed(stack.values()))
    return path.partition("@")[0], kind
