import inspect

from nlbench.reporting import Reports, load_reports


def test_the_installed_reports_have_all_functions_and_their_parameters():
    reports = load_reports()
    declared = {name: f for name, f in vars(Reports).items() if not name.startswith("_")}
    assert declared
    for name, function in declared.items():
        expected = list(inspect.signature(function).parameters)[1:]
        assert list(inspect.signature(getattr(reports, name)).parameters) == expected, name
