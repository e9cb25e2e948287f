"""Measures that a function computes from a network."""

import torch
from torch import nn

import nlbench
from nlbench.measure import Result
from nlbench.studies.framework.network_measure import network_measure


def test_function_sees_the_first_batch():
    def width(batch):
        """Width of the output."""
        return Result({"value": batch.model(batch.inputs).shape[1]}, n=len(batch.inputs))

    measure = network_measure("width", width)
    settings = {"function.batch": 4}
    run = nlbench.evaluate(
        nn.Linear(2, 3), torch.randn(8, 2), [measure], settings=settings, errors="none"
    )
    assert run["width"].summary["value"] == 3
    assert run["width"].n == 4
    assert run.manifest["measures"]["width"]["description"] == "Width of the output."
