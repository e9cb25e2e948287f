"""Update the tables of docs/studies.md and docs/benchmark.md from the studies and their verdicts.

With a folder of studies that ran in full, as in ``python docs/list_studies.py runs/studies``, their
verdicts replace earlier ones in docs/studies/verdicts.csv first, with the day of their measurement,
and the tables and the figure of the benchmark of measures those in docs/benchmark and the results
that ship. Tables that the page quotes in full are copied to docs/studies.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from nlbench import registry
from nlbench.studies.framework.verdicts import sign_test_power, smallest_mean, smallest_tolerance
from nlbench.studies.networks.held_out import FIRST, SECOND
from nlbench.studies.shared.benchmark_results import FILE, save_results
from nlbench.studies.shared.ladders import HELD_OUT
from nlbench.studies.shared.orders import CONSTANT, NO_DIRECTION, SEEN
from nlbench.studies.shared.orders import WORDS as ORDER_WORDS
from nlbench.studies.trained_ladders import PLANTS

PAGE = Path(__file__).resolve().with_name("studies.md")
BENCHMARK = PAGE.with_name("benchmark.md")
VERDICTS = Path(__file__).with_name("studies") / "verdicts.csv"
START = "<!-- {}: made by docs/list_studies.py -->\n"
END = "<!-- end -->\n"
WORDS = ("yes", "no", "can't tell", "needs more")
QUOTED = ("removal", "prediction")
"""Studies of which the page quotes tables."""
NETWORKS = (3, 5, 6, 8, 9, 12, 20, 42)
HELD = (0.98, 0.9, 0.8)
LADDERS = ("trained-ladders", "held-out-ladders")
# Claims that are confirmed, and others that are not, about the same networks and paths.
CONFIRMED = [
    ("noise", "Networks of wrong labels deviate more than those of clean ones"),
    ("ranking", "Deviation rises with the share of wrong labels"),
]
NOT_CONFIRMED = [
    ("paired", "Density of noise 0.4 is above that of clean on almost no paths"),
    ("test-error", "Density does not predict the test error"),
]


def study_table() -> str:
    """Return a table of the studies that ship."""
    rows = []
    for name in _shipped_studies():
        study = registry.load("studies", name)
        takes = ", ".join(f"`--{flag}`" for flag in study.takes)
        minutes = f"{study.minutes:g} ({study.quick_minutes:g})"
        rows.append((f"`{name}`", study.question, study.needs, minutes, takes))
    return _table(["study", "question", "needs", "minutes (quick)", "takes"], rows)


def _shipped_studies() -> list[str]:
    entries = registry.entries("studies").items()
    return [name for name, entry in entries if entry.claims[0].value.startswith("nlbench.")]


def paper_table() -> str:
    """Return the studies of each publication that they are compared with."""
    studies: dict[str, list[str]] = {}
    for name in _shipped_studies():
        citation = registry.load("studies", name).source.citation
        if citation:
            studies.setdefault(citation, []).append(f"`{name}`")
    return _table(["paper", "studies"], ((key, ", ".join(studies[key])) for key in sorted(studies)))


def power_table() -> str:
    """Return what the criteria can decide, by the number of networks."""
    head = ["networks", *(f"held in {share:.0%}" for share in HELD), "mean", "equivalence"]
    rows = []
    for n in NETWORKS:
        signs = (f"{sign_test_power(n, held=share):.2f}" for share in HELD)
        sizes = (smallest_mean(n), smallest_tolerance(n))
        rows.append([str(n), *signs, *(f"{size:.2f}" for size in sizes)])
    return _table(head, rows)


def count_table() -> str:
    """Return the number of verdicts of each study by answer."""
    verdicts = _verdicts()
    rows = [
        _counts("claims that were published", [row for row in verdicts if row["published"]]),
        _counts(
            "others: closed forms, and checks of our own",
            [row for row in verdicts if not row["published"]],
        ),
    ]
    for name in dict.fromkeys(row["study"] for row in verdicts):
        rows.append(_counts(f"`{name}`", [row for row in verdicts if row["study"] == name]))
    return _table(["study", *WORDS, "measured"], rows)


def _counts(name: str, verdicts: Sequence[dict[str, str]]) -> list[str]:
    """Return a row with the number of verdicts by answer, and the day of the oldest one."""
    counts = Counter(
        WORDS[3] if row["agrees"].startswith("needs") else row["agrees"] for row in verdicts
    )
    day = min(row["measured"] for row in verdicts)
    return [name, *(str(counts[word] or "") for word in WORDS), day]


def verdict_table() -> str:
    """Return a table of all verdicts."""
    columns = ("study", "claim", "published", "here", "agrees")
    return _table(columns, ([row[name] for name in columns] for row in _verdicts()))


def remark_table(claims: Sequence[tuple[str, str]]) -> str:
    """Return a table of some verdicts with their remarks."""
    rows = {(row["study"], row["claim"]): row for row in _verdicts()}
    columns = ("claim", "published", "here", "agrees", "remark")
    head = ("claim", "published", "here", "agrees", "remark")
    return _table(head, ([rows[claim][name] for name in columns] for claim in claims))


def order_table(name: str, ladders: Sequence[str]) -> str:
    """Return what each measure does on some ladders, with Kendall's tau."""
    (file,) = (BENCHMARK.with_name("benchmark") / name).glob("order-*.csv")
    cells: dict[str, dict[str, str]] = {}
    for row in _read(file):
        word = row["what it does"].removesuffix(NO_DIRECTION)
        direction = row["what it does"].removeprefix(word)
        text = "constant" if word == CONSTANT else "undefined"
        if word in ORDER_WORDS:
            text = f"{word}, {float(row['tau']):.2f}{direction}".replace("-", "−")
        cells.setdefault(f"`{row['measure']}`", {})[row["ladder"]] = text
    names = [name for name in ladders if any(name in row for row in cells.values())]
    rows = [[measure, *(row.get(name, "–") for name in names)] for measure, row in cells.items()]
    return _table(["measure", *(name.removesuffix(" blended") for name in names)], rows)


def held_out_table() -> str:
    """Return how many held-out ladders each measure sees, by draw and question."""
    (file,) = (BENCHMARK.with_name("benchmark") / "held-out-ladders").glob("order-*.csv")
    rows = _read(file)
    groups: dict[str, set[str]] = {}
    for word, names in (("first", FIRST), ("second", SECOND)):
        for name in names:
            groups.setdefault(f"{HELD_OUT[name].question}, {word}", set()).add(name)
    table = []
    for measure in dict.fromkeys(row["measure"] for row in rows):
        cells = [f"`{measure}`"]
        for names in groups.values():
            words = [
                row["what it does"]
                for row in rows
                if row["measure"] == measure and row["ladder"] in names
            ]
            seen = sum(word.removesuffix(NO_DIRECTION) in SEEN for word in words)
            mark = NO_DIRECTION if any(word.endswith(NO_DIRECTION) for word in words) else ""
            cells.append(f"{seen} of {len(words)}{mark}" if words else "–")
        table.append(cells)
    return _table(["measure", *groups], table)


def extent_table() -> str:
    """Return what was measured on each trained network, and why the rest was not."""
    folder = BENCHMARK.with_name("benchmark") / "trained-ladders"
    rows = [list(row.values()) for row in _read(folder / "what-was-measured-and-what-was-not.csv")]
    columns = ["network", "samples", "draws", "not run", "seconds of the slowest pass"]
    for row in rows:
        row[-1] = f"{float(row[-1]):.1f}" if row[-1] else "–"
    return _table(columns, rows)


def _verdicts() -> list[dict[str, str]]:
    return _read(VERDICTS)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)


def update(page: str) -> str:
    """Return a page with all its tables updated."""
    tables = {
        "list": study_table,
        "papers": paper_table,
        "confirmed": lambda: remark_table(CONFIRMED),
        "not confirmed": lambda: remark_table(NOT_CONFIRMED),
        "power": power_table,
        "count": count_table,
        "verdicts": verdict_table,
        "trained": lambda: order_table("trained-ladders", [plant.name for plant in PLANTS]),
        "extent": extent_table,
        "held-out": held_out_table,
    }
    for name, table in tables.items():
        before, start, rest = page.partition(START.format(name))
        if start:
            page = before + start + table() + END + rest.partition(END)[2]
    return page


def copy_verdicts(studies: Path) -> None:
    """Replace the verdicts of studies that ran in full and without chosen settings."""
    with (studies / "verdicts.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("version") == "full"]
    names = {row["study"] for row in rows}
    for row in rows:
        row["measured"] = _day(studies / row["study"])
    rows = sorted(
        [*rows, *(row for row in _verdicts() if row["study"] not in names)],
        key=lambda row: row["study"],
    )
    with VERDICTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _day(study: Path) -> str:
    """Return the day on which the newest run of a study began."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in study.glob("*/manifest.json")]
    return max((str(run["created"])[:10] for run in runs), default="")


def copy_tables(study: Path, target: Path) -> None:
    """Copy the tables of a study to a folder, in place of its tables.

    Verdicts stand in one file only.
    """
    target.mkdir(parents=True, exist_ok=True)
    for table in target.glob("*.csv"):
        table.unlink()
    for table in study.glob("*.csv"):
        if table.name != VERDICTS.name:
            shutil.copy(table, target)


def copy_benchmark(study: Path) -> None:
    """Copy the tables and the figure of the benchmark of measures, and renew what ships."""
    copy_tables(study, PAGE.with_name("benchmark"))
    shutil.copy(study / "criteria-by-measures.png", PAGE.with_name("benchmark.png"))
    # The installed file is a copy.
    save_results(study, PAGE.parents[1] / "studies" / "shared" / FILE.name)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        if (folder / "verdicts.csv").is_file():
            copy_verdicts(folder)
        if (folder / "measures").is_dir():
            copy_benchmark(folder / "measures")
        for name in LADDERS:
            if (folder / name).is_dir():
                copy_tables(folder / name, PAGE.parent / "benchmark" / name)
        for name in QUOTED:
            if (folder / name).is_dir():
                copy_tables(folder / name, VERDICTS.parent / name)
    for page in (PAGE, BENCHMARK):
        page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
