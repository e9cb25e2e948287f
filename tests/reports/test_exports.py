"""CSV, Markdown, LaTeX and Parquet."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.reports.exports import latex_text, read_csv, to_csv, to_latex, to_markdown
from nlbench.serialization.files import spreadsheet_text

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)


@given(st.lists(st.tuples(texts, st.floats(-1e9, 1e9)), min_size=1, max_size=5), texts)
def test_tables_read_back_unchanged(rows, name) -> None:
    table = pd.DataFrame(rows, columns=[f"={name}", "value"], dtype=object)
    stream = io.StringIO(to_csv(table))
    again = pd.read_csv(stream, keep_default_na=False, dtype={0: str})
    assert [spreadsheet_text(text) for text in again.columns] == list(table.columns)
    assert [spreadsheet_text(str(t)) for t in again.iloc[:, 0]] == [row[0] for row in rows]
    assert again["value"].astype(float).tolist() == [row[1] for row in rows]


def test_formulas_are_plain_text_in_written_files(tmp_path) -> None:
    table = pd.DataFrame({"model": ["=cmd|' /C calc'!A0", "@SUM(1)", "vgg8"], "x": [-1.5, 2, 3]})
    file = tmp_path / "t.csv"
    file.write_text(to_csv(table), encoding="utf-8")
    assert "\n=" not in file.read_text()
    assert "\n-1.5" not in file.read_text()
    assert ",-1.5" in file.read_text()
    pd.testing.assert_frame_equal(read_csv(file), table)


def test_latex_prints_names_as_they_are() -> None:
    assert latex_text(r"a_b\50%~") == r"a\_b\textbackslash{}50\%\textasciitilde{}"


def test_latex_and_markdown_tables_have_all_cells() -> None:
    run = make_run(4, measures=("affinity", "r2", "density"))
    latex = to_latex(run).splitlines()
    assert latex[3].strip() == r"\begin{tabular}{lrrr}"
    assert latex[5].split(" & ")[1] == r"affinity $\downarrow$"
    rows = latex[7:-3]
    assert len(rows) == 4
    assert all(row.count("&") == 3 and row.endswith(r"\\") for row in rows)
    assert not any(r"$\pm$" in row for row in rows)
    errors = to_latex(run, error=True).splitlines()
    assert all(r"$\pm$" in row for row in errors[7:-3])
    assert "standard error over samples" in errors[2]
    markdown = to_markdown(run, ranks=False).splitlines()
    assert len(markdown) == 6
    assert "undefined" in "".join(markdown)
    assert "(" not in "".join(markdown)


@pytest.mark.parametrize("seeds", [1, 3])
def test_captions_state_the_number_of_samples(seeds) -> None:
    run = make_run(2, measures=("affinity", "density"), seeds=seeds)
    samples = {r.result.n for r in run.records if r.measure.name == "affinity"}
    assert len(samples) == 1
    assert f"n = {samples.pop():,} samples." in to_latex(run, error=True)


def has_booktabs():
    """True if LaTeX is installed here, with the package of the table's rules."""
    if not (shutil.which("pdflatex") and shutil.which("kpsewhich")):
        return False
    found = subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, check=False)
    return found.returncode == 0


@pytest.mark.skipif(not has_booktabs(), reason="there is no LaTeX with booktabs on this machine")
def test_latex_takes_the_table(tmp_path) -> None:
    table = to_latex(make_run(4))
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    text = head + table + r"\end{document}"
    (tmp_path / "t.tex").write_text(text)
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True)
