"""``nlbench doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what this machine can run and what is missing; status 1 if something is broken."""
    from nlbench.doctor import diagnose

    findings = []
    for finding in diagnose():
        findings.append(finding)
        if not as_json:
            print(f"{finding.state:<8} {finding.what:<20} {finding.detail}", flush=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)
