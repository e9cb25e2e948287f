import pytest
import torch
from torch import nn

from nlbench.probes.lines.recording.program import run_program
from nlbench.probes.lines.recording.recorder import record_program


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 4, 3, stride=2, padding=1),
        nn.Conv1d(4, 4, 2, dilation=3, groups=2),
        nn.Conv2d(3, 5, (2, 3), stride=(2, 1), padding=(1, 2), bias=False),
        nn.Conv2d(3, 5, 3, padding="same", dilation=2),
        nn.Conv2d(3, 5, 1, stride=2),
        nn.Conv3d(3, 2, 2, padding=1),
    ],
)
def test_convolution_across_samples_equals_that_of_each(layer):
    torch.manual_seed(0)
    size = {3: (9,), 4: (5, 6), 5: (3, 4, 2)}[layer.weight.ndim]
    layer, x = layer.double(), torch.randn(7, layer.in_channels, *size).double()
    outputs = run_program(record_program(layer, x[:1].clone()), x)
    expected = torch.cat([layer(sample[None]) for sample in x])
    assert outputs.is_contiguous()
    torch.testing.assert_close(outputs, expected.detach(), rtol=1e-13, atol=1e-13)
