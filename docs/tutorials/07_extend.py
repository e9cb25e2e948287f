"""
A measure, a model and an operation of your own
===============================================

From Python, pass classes and functions as they are. A package registers them by entry points,
which gives them names on the command line (:doc:`/plugins`).
"""

import torch
from torch import nn

import nlbench


@nlbench.site_measure(bounds=(-1, 1), more_means="less nonlinear", invariant_to=("order", "units"))
def cosine(x, y):
    """Mean cosine between a sample's input and its output."""
    return torch.cosine_similarity(x, y).mean()


inputs = torch.randn(128, 8)
network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU())
run = nlbench.evaluate(network, inputs, [cosine, "affinity"])
run.leaderboard()

# %%
run.plot("cosine")

# %%
# ``nlbench check-measure`` tests bounds, direction, invariances, types and odd samples:

from nlbench.conformance import check_measure  # noqa: E402

for check in check_measure(cosine):
    print(f"{check.name:28} {check.outcome:12} {check.detail}")

# %%
# A model is a function that builds one; in a package, its entry point is its name.


def mynet(in_channels: int = 3, num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.Flatten(), nn.LazyLinear(num_classes))


# %%
# An unknown operation is refused by name. Registered, it is a site, and its kinks are traced:

hat = torch.library.custom_op("tutorial::hat", lambda x: (1 - x.abs()).relu(), mutates_args=(),
                              schema="(Tensor x) -> Tensor")  # fmt: skip
hat.register_fake(torch.empty_like)
nlbench.register_op(torch.ops.tutorial.hat, kind="hat", kinks=(-1.0, 0.0, 1.0))


class Hats(nn.Module):
    def forward(self, x):
        return torch.ops.tutorial.hat(x)


network = nn.Sequential(nn.Linear(8, 16), Hats(), nn.Linear(16, 3))
settings = {"lines.paths": "pairs", "lines.number": 8}
nlbench.evaluate(network, inputs, ["affinity", "density"], settings=settings).leaderboard()
