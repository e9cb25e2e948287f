"""Measures of derivatives and of lines refuse masks, of any type, by their name."""

import pytest
import torch
from torch import nn

import nlbench

MEASURES = ["nlc", "affine-residual", "geometric-complexity", "absdev", "length-distortion"]
INPUTS = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(6) < torch.arange(16)[:, None] % 5 + 2


class Mean(nn.Module):
    """The mean of activations over tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)

    def forward(self, x, attention_mask, scale=None):
        mask = attention_mask.to(torch.float32)[..., None]
        h = (self.act(self.first(x)) * mask).sum(1) / mask.sum(1).clamp_min(1)
        return self.last(h if scale is None else h * scale)


def reasons(*args, **kwargs):
    inputs = nlbench.Arguments(*args, **kwargs)
    run = nlbench.evaluate(Mean(), inputs, MEASURES, settings={"lines.number": 1})
    return {record.result.status: record.result.reason for record in run.records}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_any_type_is_named(dtype):
    found = reasons(INPUTS, TOKENS.to(dtype))
    assert list(found) == ["undefined"]
    assert found["undefined"].startswith("'attention_mask' is a mask")
    assert reasons(INPUTS, attention_mask=TOKENS.to(dtype)) == found


def test_other_arguments_are_not_masks():
    soft = torch.rand(16, 6, generator=torch.Generator().manual_seed(1)) + 1
    run = nlbench.evaluate(Mean(), nlbench.Arguments(INPUTS, soft), ["nlc", "affine-residual"])
    assert [record.result.status for record in run.records] == ["ok", "ok"]


def test_integers_next_to_a_mask_are_named():
    scale = torch.ones(16, 1, dtype=torch.int64)
    assert "'scale' is int64" in reasons(INPUTS, TOKENS.float(), scale)["undefined"]


class OfLengths(Mean):
    def forward(self, x, lengths):
        return super().forward(x, torch.arange(6) < lengths[:, None])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_next_to_floats_are_named(dtype):
    inputs = nlbench.Arguments(INPUTS, lengths=TOKENS.sum(1).to(dtype))
    run = nlbench.evaluate(OfLengths(), inputs, [*MEASURES, "pathlength", "norm"])
    *refused, of_sites = (record.result for record in run.records)
    assert of_sites.status == "ok"
    for result in refused:
        assert result.status == "undefined"
        assert f"'lengths' is {str(dtype).removeprefix('torch.')}" in result.reason


class OfMapping(Mean):
    def forward(self, batch):
        return super().forward(batch["x"], batch["attention_mask"])


def test_a_mask_inside_a_mapping_is_named():
    inputs = nlbench.Arguments({"x": INPUTS, "attention_mask": TOKENS.float()})
    (record,) = nlbench.evaluate(OfMapping(), inputs, ["nlc"]).records
    assert record.result.reason.startswith("'attention_mask' is a mask")
