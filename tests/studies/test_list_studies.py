"""docs/list_studies.py copies verdicts with the day of their measurement, and tables without."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "list_studies.py"


def test_verdicts_have_the_day_of_the_newest_run(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    for part, day in (("open", "2026-01-02"), ("closed", "2026-01-03")):
        folder = tmp_path / "noise" / part
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"created": f"{day}T10:00:00"}))
    header = "study,version,claim,published,here,agrees,remark\n"
    rows = "noise,full,It rises,,1,yes,\nnoise,quick,It rises,,2,no,\n"
    (tmp_path / "verdicts.csv").write_text(header + rows)
    shipped = tmp_path / "shipped.csv"
    shipped.write_text("study,claim,published,here,agrees,remark,measured\nnoise,Old,,,no,,2025\n")
    script["copy_verdicts"].__globals__["VERDICTS"] = shipped
    script["copy_verdicts"](tmp_path)
    assert shipped.read_text().splitlines()[1:] == ["noise,It rises,,1,yes,,2026-01-03"]


def test_tables_are_copied_without_verdicts(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    for name in ("verdicts.csv", "table.csv"):
        (tmp_path / name).write_text("a\n")
    script["copy_tables"](tmp_path, tmp_path / "target")
    assert [file.name for file in (tmp_path / "target").iterdir()] == ["table.csv"]


def test_orders_without_a_direction_are_marked(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    folder = tmp_path / "benchmark" / "ladders"
    folder.mkdir(parents=True)
    rows = [
        "measure,ladder,tau,what it does",
        "a,relu,-1,inverts",
        'b,relu,-1,"inverts, no direction"',
    ]
    (folder / "order-tau.csv").write_text("\n".join(rows))
    script["order_table"].__globals__["BENCHMARK"] = tmp_path / "benchmark.md"
    lines = script["order_table"]("ladders", ["relu"]).splitlines()
    assert lines[2:] == ["| `a` | inverts, −1.00 |", "| `b` | inverts, −1.00, no direction |"]
