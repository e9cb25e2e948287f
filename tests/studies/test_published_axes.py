"""The axes of published code matter only where channels come last."""

from made_records import with_numbers

from nlbench.request import Request
from nlbench.runner import run
from nlbench.studies.published_axes import PublishedAxes


def runs(tmp_path):
    found = {}
    for reduction in ("spatial", "published"):
        for model, data in (("vgg8", "digits"), ("transformer-tiny", "number-words")):
            # A small corpus: its vocabulary is learnt first.
            small = {"number-words.train": 200, "number-words.test": 32}
            request = Request(
                ("affinity",),
                (model,),
                (data,),
                ("init",),
                samples=24,
                settings={
                    "sites.reduction": reduction,
                    "sites.batch": 24,
                    **(small if data == "number-words" else {}),
                },
            )
            found[reduction] = run(request, tmp_path / reduction)
    return found


def test_the_axes_are_compared_site_by_site(tmp_path):
    made = runs(tmp_path)
    findings = PublishedAxes().analyse(made)
    words = {verdict.claim.split(":")[0]: verdict.word for verdict in findings.verdicts}
    assert words == {"vgg8": "yes", "transformer-tiny": "yes"}
    assert len(findings.tables["Sites"]) == 11
    # Were both the same, nothing would be told of the Transformer.
    same = PublishedAxes().analyse({"spatial": made["spatial"], "published": made["spatial"]})
    words = {verdict.claim.split(":")[0]: verdict.word for verdict in same.verdicts}
    assert words == {"vgg8": "yes", "transformer-tiny": "no"}
    # And were published scores of VGG8 others, that would be said.
    turned = with_numbers(made["published"], lambda value: value / 2)
    verdicts = PublishedAxes().analyse({**made, "published": turned}).verdicts
    assert {v.word for v in verdicts if v.claim.startswith("vgg8")} == {"no"}
