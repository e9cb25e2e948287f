"""Inputs that a network refuses are described by what its layer takes."""

import re

import pytest
import torch
from torch import nn

import nlbench
from nlbench.introspection.refused_inputs import describe_refusal

REFUSED = {
    "integers": (nn.Linear(6, 2), torch.zeros(4, 6, dtype=torch.int64), "float32 .* gets int64"),
    "float64": (nn.Linear(6, 2), torch.zeros(4, 6).double(), "float32 numbers, and gets float64"),
    "features": (nn.Linear(6, 2), torch.zeros(4, 7), r"\(..., 6\), and gets \(4, 7\)"),
    "images": (nn.Linear(6, 2), torch.zeros(4, 3, 8, 8), r"\(..., 6\), and gets \(4, 3, 8, 8\)"),
    "grey images": (nn.Conv2d(3, 2, 3), torch.zeros(4, 1, 8, 8), r"\(n, 3, height, width\)"),
    "channels last": (nn.Conv2d(3, 2, 3), torch.zeros(4, 8, 8, 3), r"\(n, 3, height, width\)"),
    "rows for images": (nn.Conv2d(3, 2, 3), torch.zeros(4, 6), r"gets \(4, 6\)"),
    "bytes": (nn.Conv2d(3, 2, 3), torch.zeros(4, 3, 8, 8).byte(), "float32 .* gets uint8"),
    "sound": (nn.Conv1d(2, 2, 3), torch.zeros(4, 16), r"\(n, 2, length\)"),
    "floats for ids": (nn.Embedding(9, 2), torch.zeros(4, 6), "integers from 0 to 8.*float32"),
    "large ids": (nn.Embedding(9, 2), torch.full((4, 6), 9), "0 to 8, and gets integers from 9"),
    "steps": (nn.GRU(6, 2, batch_first=True), torch.zeros(4, 3, 5), r"\(n, steps, 6\)"),
    "images for steps": (nn.LSTM(6, 2), torch.zeros(4, 3, 5, 6), r"\(steps, n, 6\)"),
    "normalised": (nn.BatchNorm1d(6), torch.zeros(4, 5), r"\(n, 6, ...\), and gets \(4, 5\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_input_is_described(name):
    layer, x, message = REFUSED[name]
    model = nn.Sequential(layer).eval()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        model(x)
    assert re.search(message, describe_refusal(caught.value, model))


def test_other_errors_of_a_layer_are_not_described():
    class Bug(nn.Linear):
        def forward(self, x):
            raise RuntimeError("a bug")

    model = Bug(3, 2)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 3))
    assert describe_refusal(caught.value, model) == ""


@pytest.mark.parametrize("x", [torch.zeros(16, 6).long(), torch.zeros(16, 7)], ids=["type", "size"])
def test_every_measure_names_the_layer_that_refuses_the_inputs(x):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    run = nlbench.evaluate(model, x, ["r2", "affine-residual", "substitution"], errors="none")
    for record in run.records:
        if record.result.status != "undefined":  # Integers have no derivative anyway.
            assert record.result.status == "failed"
            assert "don't fit: the layer 0 (Linear) takes" in record.result.reason
