"""The channel axis of the input."""

import pytest
import torch
from torch import nn

from nlbench.probes.graph.graph_observation import channel_graph


class After(nn.Module):
    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.layer(self.function(x))


@pytest.mark.parametrize(
    ("model", "channels"),
    [
        (nn.Linear(5, 2), 5),
        (nn.LayerNorm(5), 5),
        (nn.TransformerEncoderLayer(5, 1, 8, batch_first=True), 5),
        (After(lambda x: x * 2 + 1, nn.Linear(5, 2)), 5),
        (After(lambda x: x.transpose(1, 2), nn.Conv1d(5, 2, 1)), 5),
        (After(lambda x: x.transpose(1, 2), nn.Linear(3, 2)), 3),
        (nn.Conv1d(3, 2, 1), 3),
        (nn.ReLU(), 3),
    ],
)
def test_first_layer_determines_the_channel_axis(model, channels):
    assert channel_graph(model, torch.ones(1, 3, 5)).inputs == channels


def test_channels_last_images_match_a_linear_layer():
    assert channel_graph(nn.Linear(3, 2), torch.ones(1, 5, 5, 3)).inputs == 3


def test_each_input_has_its_own_axis():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Conv1d(3, 2, 1), nn.Linear(5, 2)

        def forward(self, image, text):
            return self.image(image).mean(2) + self.text(text).mean(1)

    example = torch.ones(1, 3, 5)
    assert channel_graph(Two(), (example, example)).inputs == 3 + 5


def test_axis_search_changes_no_recorded_input():
    def forward(x):
        return x.add_(1) if x.sum() < 20 else x.sort().values

    graph = channel_graph(After(forward, nn.Linear(5, 2)), torch.ones(1, 3, 5))
    assert graph.inputs == 5
