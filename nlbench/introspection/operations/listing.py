"""Tables of known operations, for ``nlbench list ops`` and ``docs/operations.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nlbench.parsers import unique

from .registry import FACTS, Operation, known, registered


def supported() -> list[dict[str, str]]:
    """List the operations whose effect on values or channels is known, as rows of text by column.

    Examples
    --------
    >>> [row["lines"] for row in supported() if row["operation"] in ("exp", "relu")]
    ['refused: not piecewise affine', 'bends at 0']
    """
    entries = (entry for entry in registered() if entry.has_effect)
    return [_row(entry) for entry in sorted(entries, key=_alphabetical)]


def _alphabetical(entry: Operation) -> tuple[str, str]:
    return entry.name.lower(), entry.name


def _row(entry: Operation) -> dict[str, str]:
    lines = ""
    if entry.traced:
        lines = f"bends {entry.bends}" if entry.bends else "affine"
    elif known(entry.kind).traced:
        lines = f"as {entry.kind}"  # Another name of an operation, such as `_threshold`.
    elif entry.refused or entry.kind:
        lines = f"refused: {entry.refused or 'not piecewise affine'}"
    caveats = [f"{aspect}: {text}" for aspect, text in entry.caveats.items()]
    sources = "nlbench" if _is_built_in(entry) else "; ".join(unique(entry.sources.values()))
    return {
        "operation": entry.name,
        "kind": entry.kind,
        "lines": lines,
        "graph": "followed" if entry.graph is not None else "",
        "caveats": "; ".join(caveats),
        "from": sources,
    }


def _is_built_in(entry: Operation) -> bool:
    return all(source.startswith("nlbench") for source in entry.sources.values())


def page() -> str:
    """Return the documentation page that lists nlbench's own operations.

    To write it, run ``python -m nlbench.introspection.operations.listing > docs/operations.md``.
    """
    rows = [row for row in supported() if row["from"] == "nlbench"]
    traced = [row for row in rows if row["lines"] and not row["lines"].startswith("refused")]
    refused = [row for row in rows if row["lines"].startswith("refused")]
    kinds = [row for row in rows if row["kind"]]
    followed = [row for row in rows if row["graph"]]
    caveats = {row["operation"]: row["caveats"].replace("line: ", "") for row in rows}
    parts = [
        _PREFACE,
        "## Traced on a segment\n",
        "| operation | on a segment | caveat |\n| --- | --- | --- |",
        *(f"| `{r['operation']}` | {r['lines']} | {caveats[r['operation']]} |" for r in traced),
        "\n## Refused on a segment\n",
        "These are not piecewise affine: `absdev` integrates along the segment instead.\n",
        _names(row["operation"] for row in refused) + ".",
        "\n## Activations\n",
        "| operation | kind of its sites |\n| --- | --- |",
        *(f"| `{r['operation']}` | {r['kind']} |" for r in kinds),
        "\n## Followed in the channel graph\n",
        _names(row["operation"] for row in followed) + ".",
        "\n## Facts\n",
        _FACTS,
        "| fact | the operation | operations |\n| --- | --- | --- |",
        *_fact_rows(FACTS),
    ]
    return "\n".join([*parts, ""])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _fact_rows(facts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    entries = sorted(filter(_is_built_in, registered()), key=_alphabetical)
    for aspect, meanings in facts.items():
        for value, meaning in meanings.items():
            names = _names(entry.name for entry in entries if getattr(entry, aspect) == value)
            yield f'| `{aspect}="{value}"` | {meaning} | {names} |'


_PREFACE = """# Operations

Everything that nlbench knows about PyTorch's operations, generated from its registry. `nlbench list
ops` also lists the operations in your plugins. Each operation has a single name, however it is
called: `mul` stands for `*`, `torch.mul` and `Tensor.mul_`. An operation that PyTorch implements
with others, such as `relu6` with `hardtanh`, is traced through those.

Operations that are not listed are refused as unknown. Register your own in one line:

```python
import nlbench, torch


@torch.library.custom_op("mylib::hat", mutates_args=())
def hat(x: torch.Tensor) -> torch.Tensor:
    return (1 - x.abs()).relu()


nlbench.register_op(torch.ops.mylib.hat, kind="hat", kinks=(-1.0, 0.0, 1.0), acts="bends")
```

The first argument is an operation of `torch.library` or a subclass of `torch.autograd.Function`.
With `kinks`, it must act elementwise, be continuous and be affine between the kinks. Otherwise,
pass rules: `line=` maps a call to its rule for points on a segment (see
`nlbench.probes.lines.rules.rule`), `graph=` maps it to the nodes of its output (see
`nlbench.probes.graph.rules`), and `axes=` maps the axes of its input to those of its output (see
`nlbench.introspection.axis_rules`). The facts below are also arguments. Packages use an entry point
in the group `nlbench.ops`: a module that registers operations on import, or a function to call.
"""

_FACTS = """Each fact is an argument of `nlbench.register_op`. So is `gates=True`: the output of the
activation may be a factor in a gate, like the output of `sigmoid` and `hardsigmoid`.
"""


if __name__ == "__main__":
    print(page(), end="")
