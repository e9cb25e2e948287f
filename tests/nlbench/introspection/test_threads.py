"""Numbers of threads."""

import pytest
import torch

from nlbench.introspection import threads as module
from nlbench.introspection.threads import measure_threads, overlap_pays


@pytest.mark.parametrize(("asked", "cores", "threads"), [(4, 16, 4), (16, 4, 4), (1, 4, 1)])
def test_measure_threads_are_limited_by_cores(monkeypatch, asked, cores, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked)
    monkeypatch.setattr(module, "_available_cores", lambda: cores)
    assert measure_threads(torch.device("cuda")) == threads
    assert measure_threads(torch.device("cpu")) == 1


def test_mps_work_does_not_overlap():
    assert not overlap_pays(torch.device("mps"))
    assert overlap_pays(torch.device("cuda"))
