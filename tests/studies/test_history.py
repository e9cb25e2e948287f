"""Statistics of signatures by year."""

import numpy as np
import pytest
from made_signatures import make_signatures

from nlbench.studies.history import History, signature_statistics
from nlbench.studies.shared.classifiers import CLASSIFIERS


def made(top, vit=0.1, weights="trained"):
    """Each network from 0.5 up to what `top` says of its year; ViTs around `vit`."""
    return make_signatures(
        {
            (name, weights, "imagenet", 0): [vit, vit + 0.1]
            if one.family == "ViT"
            else list(np.linspace(0.6, top(one.year), 5))
            for name, one in CLASSIFIERS.items()
        }
    )


def answers(run):
    # The last verdict is of networks of the zoo.
    return [verdict.agrees for verdict in History().analyse({"run": run}).verdicts[:-1]]


@pytest.mark.parametrize(
    ("mean", "word"), [(0.3, "needs 4 networks"), (0.7, "can't tell")], ids=["below", "among"]
)
def test_too_few_zoo_transformers_decide_nothing(mean, word):
    means = {"minilm-l6": mean, "rxnmapper": 0.2, "mtcnn-onet": 0.6, "crepe-tiny": 0.8}
    means |= {"mtcnn-rnet": 0.6, "efficientnet-lite0": 0.8}
    zoo = {
        (f"zoo/{name}", "trained", "own", 0): [mean - 0.1, None, mean + 0.1]
        for name, mean in means.items()
    }
    runs = {"run": made(lambda year: 0.8), "zoo": make_signatures(zoo)}
    findings = History().analyse(runs)
    verdict = findings.verdicts[-1]
    assert verdict.word == word
    assert "0.60" in verdict.ours
    assert sum("zoo/mtcnn-pnet was not measured" in remark for remark in findings.remarks) == 1
    assert History().analyse({"run": runs["run"]}).verdicts[-1].agrees is None


def test_published_pattern_agrees_and_its_opposite_does_not():
    rising = made(lambda year: 0.6 + 0.04 * (year - 2011))
    assert answers(rising) == [True, True, True, True, None, True]
    falling = made(lambda year: 1 - 0.02 * (year - 2011), vit=1.1)
    assert answers(falling)[:4] == [False, False, False, False]
    assert answers(made(lambda year: 0.8, vit=0.65))[3] is None


def test_random_weights_are_undecided():
    assert answers(made(lambda year: 0.8, weights="init")) == [None] * 6


def test_the_statistics_are_those_of_a_signature():
    run = make_signatures({("torchvision/swin_t", "trained", "imagenet", 0): [0.2, None, 0.8, 0.5]})
    (row,) = signature_statistics(run).to_dict("records")
    assert (row["year"], row["group"], row["sites"]) == (2021, "post-ViT", 3)
    kept = [row[name] for name in ("min", "median", "mean", "max", "spread")]
    assert kept == pytest.approx([0.2, 0.5, 0.5, 0.8, 0.6])
