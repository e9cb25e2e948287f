"""Private parts of PyTorch are used in one folder."""

import re
from pathlib import Path

PRIVATE = re.compile(
    r"\btorch\.(?:[a-z.]+\.)?_[a-zA-Z]|from torch[\w.]*\._|from torch[\w.]* import _"
)


def test_only_introspection_uses_private_parts_of_pytorch():
    root = Path(__file__).parents[3]
    files = [
        f
        for top in ("nlbench", "measures", "models", "reports", "studies")
        for f in (root / top).rglob("*.py")
    ]
    others = [f for f in files if "introspection" not in f.parts]
    assert len(others) > 100
    users = [str(f.relative_to(root)) for f in others if PRIVATE.search(f.read_text("utf-8"))]
    assert users == []
