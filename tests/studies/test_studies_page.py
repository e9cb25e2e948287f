"""docs/studies.md lists every study that ships, and its example is one."""

import re
import runpy
from pathlib import Path

from nlbench.studies.framework import Context, Study

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "studies.md").read_text(encoding="utf-8")


def test_every_study_is_listed():
    script = runpy.run_path(str(DOCS / "list_studies.py"))
    for page in (PAGE, (DOCS / "benchmark.md").read_text(encoding="utf-8")):
        assert script["update"](page) == page, "update it: python docs/list_studies.py"
    assert "| `polynomials` | Does the affinity score fall" in script["study_table"]()


def test_the_example_is_a_study(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    found = {}
    exec(compile(code, "studies.md", "exec"), found)
    study = found["Wider"]()
    assert isinstance(study, Study)
    findings = study.analyse(study.measure(Context(tmp_path, "wider", True, seeds=(0,))))
    assert [verdict.agrees for verdict in findings.verdicts] in ([True], [False])
