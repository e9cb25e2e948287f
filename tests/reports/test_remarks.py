"""What a page says beside the numbers."""

import pandas as pd
import pytest

from nlbench.reports.layout import NamedRun
from nlbench.reports.remarks import differences


def run(name, *gpus, device="cuda"):
    facts = [{"device_name": gpu, "capability": "9.0"} for gpu in gpus]
    manifest = {"nlbench": "1", "device": device, "dtype": "float32"}
    if facts:
        manifest |= {"environment": facts[0], "environments": facts if len(facts) > 1 else ()}
    return NamedRun(name, pd.DataFrame(), manifest)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([run("one", "A"), run("two", "A")], []),
        ([run("one", "A", "B")], ["GPU: A and B in one"]),
        ([run("one", "A"), run("two", "B")], ["GPU: A in one; B in two"]),
        ([run("one", "A"), run("two", device="cpu")], ["device: cuda in one; cpu in two"]),
    ],
)
def test_numbers_of_several_gpu_models_are_said_to_be(runs, said):
    assert differences(runs) == said
