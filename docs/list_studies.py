"""Write the list of studies in docs/studies.md anew, from their classes, and what they found.

``python docs/list_studies.py`` does it; with a folder of studies that were carried out in full, as
in ``python docs/list_studies.py studies``, their verdicts are taken from there first.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from nlbench import registry

PAGE = Path(__file__).with_name("studies.md")
VERDICTS = Path(__file__).with_name("studies") / "verdicts.csv"
START = "<!-- {}: made by docs/list_studies.py -->\n"
END = "<!-- end -->\n"
WORDS = ("yes", "no", "can't tell")
# A claim that is confirmed and one that is not, from the same networks and paths.
CONFIRMED = [("paired", "Deviation of noise 0.4 is above that of clean on nearly all paths")]
NOT_CONFIRMED = [
    ("paired", "Density of noise 0.4 is above that of clean on almost no paths"),
    ("paired", "Density tells noise 0.4 from clean labels where the seeds differ too"),
]


def listed() -> str:
    """Every study that ships, as its class says."""
    rows = []
    for name, entry in registry.entries("studies").items():
        if any(claim.value.startswith("nlbench.") for claim in entry.claims):
            one = registry.load("studies", name)
            takes = ", ".join(f"`--{flag}`" for flag in one.takes)
            minutes = f"{one.minutes:g} ({one.quick_minutes:g})"
            rows.append((f"`{name}`", one.question, one.needs, minutes, takes))
    return _table(["study", "question", "needs", "minutes (quick)", "takes"], rows)


def counted() -> str:
    """How many verdicts of each study say what."""
    found = Counter((row["study"], row["agrees"]) for row in _verdicts())
    names = dict.fromkeys(row["study"] for row in _verdicts())
    rows = [(f"`{name}`", *(str(found[name, word] or "") for word in WORDS)) for name in names]
    total = ("all", *(str(sum(found[name, word] for name in names)) for word in WORDS))
    return _table(["study", *WORDS], [*rows, total])


def judged() -> str:
    """Every verdict."""
    columns = ("study", "claim", "published", "here", "agrees")
    return _table(columns, ([row[name] for name in columns] for row in _verdicts()))


def chosen(claims: Sequence[tuple[str, str]]) -> str:
    """Verdicts with what was done to make sure."""
    found = {(row["study"], row["claim"]): row for row in _verdicts()}
    columns = ("claim", "published", "here", "agrees", "remark")
    head = ("claim", "published", "here", "agrees", "what was done to make sure")
    return _table(head, ([found[claim][name] for name in columns] for claim in claims))


def _verdicts() -> list[dict[str, str]]:
    with VERDICTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)


def written(page: str) -> str:
    """Give the page with all its tables made anew."""
    parts = {
        "list": listed(),
        "confirmed": chosen(CONFIRMED),
        "not confirmed": chosen(NOT_CONFIRMED),
        "count": counted(),
        "verdicts": judged(),
    }
    for name, table in parts.items():
        before, start, rest = page.partition(START.format(name))
        page = before + start + table + END + rest.partition(END)[2]
    return page


def take(studies: Path) -> None:
    """Keep the verdicts of studies as they are, in full and with nothing chosen."""
    with (studies / "verdicts.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("version") == "full"]
    VERDICTS.parent.mkdir(exist_ok=True)
    with VERDICTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        take(Path(folder))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
