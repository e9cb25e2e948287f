"""``nlbench check-measure``."""

from typing import Annotated

import typer

from nlbench.parsers import parse_settings

from .common import name_completer, note, print_table
from .parameters import JsonFlag


def check_measure(
    name: Annotated[
        str, typer.Argument(help="A registered measure.", autocompletion=name_completer("measures"))
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Measure option, NAME.OPTION=VALUE.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a measure's declarations and behaviour.

    Exit with status 1 if a check fails.
    """
    from nlbench.measure.contract import load_measure

    measure = load_measure(name)
    options = parse_settings(settings or [], "--set")

    from nlbench import conformance

    checks = conformance.check_measure(measure, options)
    rows = [
        {"check": check.name, "outcome": check.outcome, "detail": check.detail} for check in checks
    ]
    print_table(rows, as_json)
    broken = [check.name for check in checks if check.outcome == "broken"]
    if broken:
        note(f"measure '{name}' fails: {', '.join(broken)}")
        raise typer.Exit(1)
