"""Facts about registered classes, read from their source files without importing them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Mapping
from importlib.util import resolve_name

from .registry import Entry, find_source, is_readable, parse_source

MAX_BASES = 8
"""Number of base classes that are followed."""


def measure_facts(entry: Entry) -> dict[str, str]:
    """Return direction, probe, version, cost and docstring of a measure, as its source states them.

    Examples
    --------
    >>> from nlbench import registry
    >>> facts = measure_facts(registry.find("measures", "density"))
    >>> facts["larger"], facts["probe"]
    ('more nonlinear', 'lines')
    """
    point = entry.claims[0]
    attributes: Mapping[str, str] = {}
    doc = ""
    # A source that Python can't import either has no facts.
    if is_readable(point):
        with contextlib.suppress(OSError, SyntaxError, ValueError, ImportError):
            attributes, doc = _attributes(point.module, point.attr.split(".")[0])
    cost = re.search(r"^Cost\n-+\n((?:\([^()]*\)|.)+?)(?:[.;,:](?:\s|$)|\n\n)", doc, re.M | re.S)
    return {
        "larger": attributes.get("more_means", "neither"),
        "probe": attributes.get("probe", ""),
        "version": attributes.get("version", "1"),
        "cost": " ".join(cost[1].split()).replace("``", "") if cost else "",
        "docstring": inspect.cleandoc(doc),
    }


def _attributes(module: str, name: str) -> tuple[Mapping[str, str], str]:
    """Return the constant attributes of a class, those of its bases included, and its docstring.

    A decorated function has the arguments of its decorator.
    """
    attributes: dict[str, str] = {}
    doc = ""
    for _ in range(MAX_BASES):
        tree = parse_source(module)
        node = next((n for n in tree.body if getattr(n, "name", "") == name), None)
        if isinstance(node, ast.FunctionDef):
            calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
            stated = {k.arg or "": k.value for call in calls for k in call.keywords}
            return {"probe": "sites", **_constants(stated)}, ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            doc = doc or ast.get_docstring(node) or ""
            attributes = {**_constants(_assigned(node)), **attributes}
            name = next((b.id for b in node.bases if isinstance(b, ast.Name)), "")
            if any(getattr(n, "name", "") == name for n in tree.body):
                continue
        module, name = _origin(tree, module, name)
        if not module:
            break
    return attributes, doc


def _assigned(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the values that a class's body assigns to names, pairs of tuples included."""
    assigned: dict[str, ast.expr] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.value is not None:
                assigned[statement.target.id] = statement.value
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
            value = statement.value
            if isinstance(target, ast.Name):
                assigned[target.id] = value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                names = (getattr(element, "id", "") for element in target.elts)
                assigned.update(zip(names, value.elts, strict=False))
    return assigned


def _constants(values: Mapping[str, ast.expr]) -> dict[str, str]:
    constants = {n: v.value for n, v in values.items() if isinstance(v, ast.Constant)}
    return {name: value for name, value in constants.items() if isinstance(value, str)}


def _origin(tree: ast.Module, module: str, name: str) -> tuple[str, str]:
    """Return the module and the name that a class is imported from, or empty texts."""
    spec = find_source(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                imported = "." * node.level + (node.module or "")
                return resolve_name(imported, package) if node.level else imported, alias.name
    return "", ""
