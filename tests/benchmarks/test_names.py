"""The imports of benchmarks exist; running all of them would take too long."""

import ast
import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_benchmarks_import_existing_names(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nlbench"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def test_recorded_figures_are_json():
    for file in SCRIPTS[0].parent.glob("*.json"):
        json.loads(file.read_text())
