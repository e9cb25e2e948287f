"""Write the list of studies in docs/studies.md anew, from their classes.

``python docs/list_studies.py`` does it.
"""

from __future__ import annotations

from pathlib import Path

from nlbench import registry

PAGE = Path(__file__).with_name("studies.md")
START = "<!-- made by docs/list_studies.py -->\n"
END = "<!-- end -->\n"


def listed() -> str:
    rows = [
        "| study | question | needs | minutes (quick) | takes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, entry in registry.entries("studies").items():
        if any(claim.value.startswith("nlbench.") for claim in entry.claims):
            one = registry.load("studies", name)
            takes = ", ".join(f"`--{flag}`" for flag in one.takes)
            minutes = f"{one.minutes:g} ({one.quick_minutes:g})"
            rows.append(f"| `{name}` | {one.question} | {one.needs} | {minutes} | {takes} |")
    return "\n".join([*rows, ""])


def written(page: str) -> str:
    before, _, rest = page.partition(START)
    return before + START + listed() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
