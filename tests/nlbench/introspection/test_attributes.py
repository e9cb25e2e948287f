"""What a pass sets on modules is undone."""

import torch
from torch import nn

from nlbench.introspection.model_state import preserve_attributes
from nlbench.probes.graph.observation import channel_graph


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.seen, self.layer = None, [], nn.Linear(3, 3)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(3, device=x.device)
        self.seen.append(x.shape)
        return self.layer(x) * self.mask


def test_a_mask_made_while_the_graph_is_recorded_is_not_kept():
    model = Masked()
    channel_graph(model, torch.ones(1, 3))
    assert model.mask is None
    assert model.seen == []
    assert model(torch.ones(1, 3)).device.type == "cpu"


def test_hooks_set_before_can_still_be_removed():
    model = Masked()
    handle = model.register_forward_hook(lambda *given: None)
    with preserve_attributes(model):
        model.register_forward_hook(lambda *given: None)
        model.register_buffer("made", torch.ones(1))
    assert len(model._forward_hooks) == 1
    assert not hasattr(model, "made")
    handle.remove()
    assert not model._forward_hooks
