"""Commands that plugins bring along."""

import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from nlbench.cli.app import EXAMPLES, add_commands, app


def own(name, value):
    return EntryPoint(name, value, "nlbench.commands")


@pytest.fixture
def small():
    made = typer.Typer()

    @made.command()
    def run():
        """Say that it is the core's."""
        print("the core's")

    return made


def hello(to: str = "you"):
    """Greet somebody."""
    print(f"hello {to}")


def test_plugin_adds_command_under_its_entry_points_name(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "greeting", sys.modules[__name__])
    add_commands(small, [own("greet", "greeting:hello")])
    assert "hello me" in CliRunner().invoke(small, ["greet", "--to", "me"]).output
    assert "the core's" in CliRunner().invoke(small, ["run"]).output


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (own("run", "greeting:hello"), "the name is already taken"),
        (own("greet", "greeting_nowhere:hello"), "ModuleNotFoundError"),
        (own("greet", "greeting:missing"), "AttributeError"),
    ],
)
def test_broken_command_is_named_and_hides_no_other(small, monkeypatch, capsys, point, message):
    monkeypatch.setitem(sys.modules, "greeting", sys.modules[__name__])
    add_commands(small, [point, own("other", "greeting:hello")])
    said = capsys.readouterr().err
    assert f"command '{point.name}'" in said
    assert message in said
    assert "hello you" in CliRunner().invoke(small, ["other"]).output
    assert "the core's" in CliRunner().invoke(small, ["run"]).output


def test_thread_that_plugin_left_does_not_keep_process():
    code = (
        "import atexit, sys, threading, time; from nlbench.cli import main\n"
        "atexit.register(print, 'the end')\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "sys.argv = ['nlbench', '--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout.startswith("nlbench ")
    assert done.stdout.endswith("the end\n")


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_have_commands_and_options(example):
    _, name, *arguments = shlex.split(example)
    commands = typer.main.get_command(app).commands
    options = {text for parameter in commands[name].params for text in parameter.opts}
    assert {text for text in arguments if text.startswith("-")} <= options


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))
def test_help_shows_all_text_of_options(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
    shown = " ".join(shown.replace("│", " ").split())
    for parameter in typer.main.get_command(app).commands[name].params:
        help_text = " ".join((parameter.help or "").replace("\\[", "[").split())
        assert help_text in shown


def test_help_prints_defaults_of_run():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    for default in ("512", "test", "vgg8", "affinity,absdev", "up to 4", "failed"):
        assert f"[default: {default}]" in " ".join(shown.replace("│", " ").split())


def test_help_of_a_command_ends_with_its_examples():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "80"}).stdout
    for line in EXAMPLES["run"]:
        assert f" {line} " in shown
    assert shown.index("What to measure") < shown.index("Execution") < shown.index("Examples:")
    assert max(map(len, shown.splitlines())) <= 80
