"""Bounds of the numbers that commands and datasets accept."""

import inspect
import math
import typing

import pytest

from nlbench import registry
from nlbench.cli.app import app
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.subjects.data import dataset_info


def numeric_options():
    for command in app.registered_commands:
        parameters = inspect.signature(command.callback, eval_str=True).parameters.values()
        for parameter in parameters:
            kind, *details = typing.get_args(parameter.annotation) or (None,)
            if {kind, *typing.get_args(kind)} & {int, float}:
                yield f"{command.callback.__name__} {parameter.name}", details[0]


def test_each_number_of_a_command_has_bounds():
    options = dict(numeric_options())
    assert {"plane seed", "remove seed", "train learning_rate", "study workers"} <= set(options)
    assert [name for name, option in options.items() if None in (option.min, option.max)] == []


@pytest.mark.parametrize("group", ["measures", "probes", "datasets"])
def test_each_number_of_a_sample_index_has_bounds(group):
    for name in registry.entries(group):
        if name.endswith("/*"):
            continue
        owner = registry.load(group, name)
        options = dataset_info(owner).options if group == "datasets" else owner.options
        for key, option in options.items():
            if option.kind in ("integer", "number"):
                assert math.isfinite(option.minimum + option.maximum), f"{name}.{key}"


@pytest.mark.parametrize("value", [2**63, "1e19", -(2**63)])
def test_an_integer_has_64_bits(value):
    with pytest.raises(RequestError):
        Option(1).parse(value)
