"""The same network on several datasets."""

from made_signatures import make_signatures

from nlbench.studies.datasets import Datasets


def answers(noise=0.5, pictures=0.2, unseen=0.01, seeds=6):
    runs = {}
    for split, moves in (
        ("run", {"digits": 0.0, "synthetic": pictures, "random": noise}),
        ("train", {"digits": unseen}),
    ):
        runs[split] = make_signatures(
            {
                ("vgg8", "file", data, seed): [0.3 + move, 0.3 + move]
                for seed in range(seeds)
                for data, move in moves.items()
            }
        )
    findings = Datasets().analyse(runs)
    (table,) = findings.tables.values()
    far = table[table.data == "random"].distance
    assert abs(far - 2**0.5 * noise).max() < 1e-12
    return [verdict.agrees for verdict in findings.verdicts]


def test_published_pattern_agrees_and_its_opposite_does_not():
    assert answers() == [True, True]
    assert answers(noise=0.1) == [False, True]
    assert answers(unseen=0.3) == [True, False]
    assert answers(seeds=5) == [None, None]
