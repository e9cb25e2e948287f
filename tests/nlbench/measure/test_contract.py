"""What a plugin's mistakes are called when it is loaded: one line that says how to mend it."""

import pytest
import torch

import nlbench
from nlbench.errors import PluginError
from nlbench.measure import Measure, PooledMeasure, Result, Value, site_measure
from nlbench.measure.contract import as_measure, validated_result
from nlbench.options import Option


def refusal(given, name="odd"):
    with pytest.raises(PluginError) as error:
        as_measure(given, name)
    text = str(error.value)
    assert "\n" not in text
    assert f"'{name}'" in text
    return text


def plain(x, y):
    """Not decorated."""
    return 1.0


class Sound(Measure):
    """Nothing is wrong with it."""

    name, probe = "odd", "sites"

    def update(self, observation):
        self.seen = observation

    def compute(self):
        return Result.of({"all": 1.0})


def changed(**attributes):
    return type("Changed", (Sound,), {"name": "odd", **attributes})


def test_valid_measure_is_returned_unchanged():
    assert as_measure(Sound, "odd") is Sound
    assert as_measure(Sound) is Sound


def test_an_undecorated_function_is_refused_with_the_decorator():
    assert "put @nlbench.site_measure(...) above it" in refusal(plain)


def test_an_instance_is_refused_with_its_class():
    assert "is an instance of Sound; pass the class Sound" in refusal(Sound())


@pytest.mark.parametrize("given", [None, 3, "text", torch.zeros(3), nlbench])
def test_other_objects_are_refused_with_kinds_of_measures(given):
    assert "expected a class derived from nlbench.Measure" in refusal(given)


def test_another_name_than_the_entry_points_is_named():
    assert "has the name 'odd'" in refusal(Sound, "other")


def test_missing_method_is_named_with_advice():
    class Half(Measure):
        name, probe = "odd", "sites"

        def update(self, observation): ...

    assert "has no compute(); add `def compute(self): return nlbench.Result" in refusal(Half)
    old_verb = type("Old", (Half,), {"name": "odd", "finish": lambda self: 1})
    assert "has no compute()" in refusal(old_verb)
    pooled = type("Pooled", (PooledMeasure,), {"name": "odd"})
    assert "has no accumulator()" in refusal(pooled)
    assert "has no update()" in refusal(changed(update=None))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ({"update": lambda self: None}, "write `def update(self, observation)`"),
        ({"compute": lambda self, place: 1}, "write `def compute(self)`"),
        ({"reset": lambda: None}, "write `def reset(self)`"),
    ],
)
def test_method_that_could_not_be_called_is_named(method, says):
    assert says in refusal(changed(**method))


def test_function_without_return_is_found_statically():
    def compute(self):
        print("never")

    def unfinished(self): ...

    def sometimes(self):
        if self.seen:
            return Result.of({"all": 1.0})

    def never(self):
        raise nlbench.Undefined("nothing to measure")

    assert "compute() returns nothing; write `return nlbench.Result" in refusal(
        changed(compute=compute)
    )
    assert "compute() returns nothing" in refusal(changed(compute=unfinished))
    assert as_measure(changed(compute=sometimes), "odd")
    assert as_measure(changed(compute=never), "odd")


def test_a_function_of_one_parameter_is_refused():
    @site_measure()
    def odd(x):
        return x.mean()

    text = refusal(odd)
    assert "odd(x) can't be called with (x, y); write `def odd(x, y)`" in text


def test_non_parameter_options_raise():
    @site_measure(options={"center": Option(False)})
    def odd(x, y):
        return (x - y).mean()

    assert "write `def odd(x, y, center)`" in refusal(odd)

    @site_measure()
    def undeclared(x, y, center):
        return (x - y).mean()

    assert "with the options declared" in refusal(undeclared, "undeclared")


def test_function_without_return_is_refused():
    @site_measure()
    def odd(x, y):
        (x - y).mean()

    assert "the function returns nothing; end it with `return`" in refusal(odd)


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("version", 1, 'version is 1, expected a string: `version = "1"`'),
        ("bounds", [0, 1], "two numbers, the smaller first: `bounds = (0.0, 1.0)`"),
        ("bounds", (1.0, float("nan")), "two numbers"),
        ("more_means", "less", "'less nonlinear'"),
        ("unreduced", {"share": 0.5}, "functions of a tensor"),
        ("independent_sites", 1, "True or False"),
        ("probe", None, 'probe is None, expected a name: `probe = "sites"`'),
    ],
)
def test_invalid_declaration_is_named_with_advice(attribute, value, says):
    assert says in refusal(changed(**{attribute: value}))


def test_every_registered_measure_is_sound():
    from nlbench import registry

    for name in registry.entries("measures"):
        assert as_measure(registry.load("measures", name), name).name == name


@pytest.mark.parametrize(
    ("number", "is_sound"),
    [(1.0, True), (1.0 + 1e-12, True), (-1.0, True), (1.001, False), (-7.0, False)],
)
def test_result_beyond_declared_bounds_raises(number, is_sound):
    result = Result.of({"a": 0.0, "b": number})
    if is_sound:
        assert validated_result(result, (-1.0, 1.0)) is result
        return
    with pytest.raises(PluginError):
        validated_result(result, (-1.0, 1.0))
    assert validated_result(result, (-float("inf"), float("inf"))) is result


def test_summary_beyond_bounds_is_refused():
    result = Result({"value": 2.0}, (Value("a", {"value": 1.0}),))
    with pytest.raises(PluginError):
        validated_result(result, (0.0, 1.0))


def test_a_measure_beyond_its_bounds_fails_alone():
    @site_measure(bounds=(-1, 1))
    def seven(x, y):
        """Give seven."""
        return 7

    model, inputs = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(40, 4)
    run = nlbench.evaluate(model, inputs, [seven, "r2"])
    assert run["seven"].status == "failed"
    assert run["seven"].reason == "1: 7 is out of the declared bounds -1 to 1"
    assert run["r2"].status == "ok"


def test_bounds_are_those_of_the_options_in_force():
    model, inputs = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(40, 4)
    settings = {"affinity.shrinkage": "none"}
    (record,) = nlbench.evaluate(model, inputs, ["affinity"], settings=settings).records
    assert record.measure.bounds == (0.0, 1.0)
    (record,) = nlbench.evaluate(model, inputs, ["affinity"]).records
    assert record.measure.bounds == (None, 1.0)


def test_a_statistic_is_not_called_error():
    result = Result({"value": 1.0, "error": 0.1})
    with pytest.raises(PluginError):
        validated_result(result, (0.0, 1.0))
