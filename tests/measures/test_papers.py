"""BibTeX of the measures' papers."""

import re
from pathlib import Path

import nlbench.measures.papers as papers


def test_every_entry_is_cited_by_its_key():
    folder = Path(papers.__file__).resolve().parent
    code = "".join(file.read_text() for file in folder.glob("*.py"))
    cited = re.findall(r'bibtex\(\s*("[^)]*")', code)
    keys = {key for call in cited for key in re.findall(r'"(.+?)"', call)}
    assert keys == papers._entries().keys()
    for key in keys:
        assert papers.bibtex(key).startswith("@")
