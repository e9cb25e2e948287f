"""Before and after training."""

from made_signatures import make_signatures

from nlbench.studies.training import Training

RISING = [0.5 + 0.49 * place / 14 for place in range(15)]


def answers(*deep, before=(0.9, 0.9, 0.9), after=(0.8, 0.7, 0.85), seeds=6):
    found = {}
    for seed in range(seeds):
        found["vgg16", "calibrated", "digits", seed] = deep[seed % len(deep)] if deep else RISING
        found["vgg8", "calibrated", "digits", seed] = before
        found["vgg8", "file", "digits", seed] = after
    findings = Training().analyse({"run": make_signatures(found)})
    (table,) = findings.tables.values()
    assert list(table.seed) == list(range(seeds))
    rises, linear, nonlinear, uneven = (v.agrees for v in findings.verdicts)
    return rises, linear, nonlinear, uneven


def test_the_published_pattern_agrees():
    deep = [*RISING[:-3], 0.97, 0.98, 0.99]
    assert answers(deep) == (True, True, True, True)


def test_each_verdict_follows_its_own_numbers():
    assert answers(RISING[::-1])[:2] == (False, False)
    assert answers(RISING, RISING[::-1])[0] is None
    assert answers(after=(0.95, 0.96, 0.95))[2] is False
    assert answers(after=(0.85, 0.8, 0.7))[3] is False


def test_two_networks_are_undecided():
    assert answers(seeds=2) == (None, None, None, None)
