import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from nlbench.probes.sites.sites_observation import list_sites, observe_sites


class Given(nn.Module):
    """A network written as one function of a layer's output."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return F.relu(self.function(self, x, self.layer(x)))


class Transposing(nn.Module):
    """A transformer layer that wants tokens first, in a network that has samples first."""

    def __init__(self, back=lambda x: x):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.back = back

    def forward(self, x):
        return self.layer(self.back(x.transpose(0, 1)))


@pytest.mark.parametrize("samples", [6, 7], ids=["fewer than tokens", "as many as tokens"])
def test_samples_are_rows_also_where_tokens_come_first(samples):
    model, x = Transposing(), torch.randn(samples, 7, 8)
    (site,) = list_sites(model, x)
    assert (site.shape, site.channel_axis, site.assumed) == ((7, 16), 2, False)
    found, given = [], []
    hook = model.layer.linear1.register_forward_hook(lambda m, a, output: given.append(output))
    observe_sites(model, [x], lambda observation: found.append(observation.x))
    hook.remove()
    torch.testing.assert_close(found[0], given[0].mean(0))


LOST = {
    "turned": (nn.Linear(4, 6), lambda m, x, h: torch.rot90(h, 1, (0, 1)), (4, 7, 4)),
    "mean over the batch": (nn.Linear(4, 6), lambda m, x, h: h.mean(0, keepdim=True), (4, 4)),
    "part of the batch": (nn.Linear(4, 6), lambda m, x, h: h[1:], (4, 4)),
    "one sample of fitting size": (nn.Conv1d(5, 8, 1), lambda m, x, h: h[0], (4, 5, 12)),
}


@pytest.mark.parametrize("name", LOST)
def test_a_site_whose_samples_are_lost_is_undefined(name):
    layer, change, shape = LOST[name]
    (site,) = list_sites(Given(layer, change), torch.randn(shape))
    assert site.name == "relu"
    assert "samples" in site.problem
    assert "4 entries" not in site.problem


def test_regrouped_samples_are_rows():
    model = Given(nn.Conv1d(5, 8, 1), lambda m, x, h: torch.stack([2 * one for one in h]))
    (site,) = list_sites(model, torch.randn(4, 5, 12))
    assert site.shape == (8, 12)


@pytest.mark.parametrize("pick", [0, 1], ids=["outputs", "last states"])
def test_recurrent_layer_is_followed_where_steps_come_first(pick):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(6, 5)

        def forward(self, x):
            return F.relu(self.gru(x.transpose(0, 1))[pick])

    (site,) = list_sites(Recurrent(), torch.randn(4, 7, 6))
    assert (site.shape, site.channel_axis, site.assumed) == (((7, 5), (1, 5))[pick], 2, False)


def test_tokens_folded_into_first_axis_are_not_samples():
    model = Given(nn.Linear(4, 6), lambda m, x, h: h.flatten(0, 1))
    found = []
    observe_sites(
        model, [torch.randn(4, 7, 4)], lambda observation: found.append(observation.x.shape)
    )
    assert found == [(4, 6)]


def test_table_independent_of_input_has_no_sites():
    swin = torchvision.models.get_model("swin_v2_t", weights=None)
    rows = {}
    observe_sites(
        swin,
        [torch.randn(2, 3, 32, 32)],
        lambda observation: rows.setdefault(observation.place, len(observation.x)),
    )
    assert set(rows.values()) == {2}
    assert not [place for place in rows if "attn" in place]


@pytest.mark.parametrize(
    ("equation", "axis"), [("bnc->nbc", 1), ("bnc->bcn", 0), ("b n c -> n c b", 2)]
)
def test_samples_are_followed_through_einsum(equation, axis):
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(torch.einsum(equation, x))

    x, observations = torch.randn(4, 8, 12), []
    observe_sites(Model(), [x], observations.append, reduction="flatten")
    expected = torch.einsum(equation, x).movedim(axis, 0).flatten(1)
    torch.testing.assert_close(observations[0].x, expected, rtol=0, atol=0)


def test_samples_that_an_einsum_sums_over_are_lost():
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(torch.einsum("bnc,bmc->nm", x, x))

    (site,) = list_sites(Model(), torch.randn(4, 8, 12))
    assert "the samples are on no axis" in site.problem
