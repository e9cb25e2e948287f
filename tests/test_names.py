"""One name for one thing."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def public_classes(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for folder in ("nlbench", "measures", "models", "reports", "studies"):
        for name, place in public_classes(folder):
            places[name].append(place)
    assert len(places) > 300
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert repeated == {}
