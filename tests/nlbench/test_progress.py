import pytest

from nlbench import progress
from nlbench.progress import create_progress


@pytest.fixture
def clock(monkeypatch):
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    return times


def steps(style, clock, seconds):
    with create_progress(style) as shown:
        shown.show_status("loading")
        shown.begin(len(seconds))
        for passed in seconds:
            clock[0] += passed
            shown.step("vgg8")
        shown.warn("one sample is missing")


def test_a_log_has_a_line_every_five_seconds(clock, capsys):
    steps("plain", clock, [1, 1, 4])
    assert capsys.readouterr().err.splitlines() == [
        "nlbench: loading",
        "nlbench: 1/3 steps, 1.0/s, 2 s left: vgg8",
        "nlbench: 3/3 steps, 0.5/s, 0 s left: vgg8",
        "nlbench: one sample is missing",
        "nlbench: 3 of 3 steps done",
    ]


def test_without_terminal_short_command_prints_only_warnings(clock, capsys):
    steps("auto", clock, [10, 10])
    assert capsys.readouterr().err == "nlbench: one sample is missing\n"


def test_without_a_terminal_a_long_command_prints_lines(clock, capsys):
    steps("auto", clock, [10, 25, 10, 25, 40])
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" steps")[0] for line in lines[:-1]] == ["nlbench: 2/5", "nlbench: 4/5"]


def test_none_prints_no_steps(clock, capsys):
    steps("none", clock, [100, 100])
    assert capsys.readouterr().err == "nlbench: one sample is missing\n"


def test_unexpected_steps_raise_the_total(clock, capsys):
    with create_progress("plain") as shown:
        shown.begin(1)
        for _ in range(3):
            clock[0] += 5
            shown.step("vgg8")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" steps")[0] for line in lines] == [
        "nlbench: 1/1", "nlbench: 2/2", "nlbench: 3/3", "nlbench: 3 of 3"
    ]  # fmt: skip
