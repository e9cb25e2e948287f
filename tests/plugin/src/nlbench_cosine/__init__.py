"""Two measures by a third party: one decorated function, one class with state."""

import torch

import nlbench


@nlbench.site_measure(
    bounds=(-1, 1),
    more_means="less nonlinear",
    options={"center": nlbench.Option(False, "subtract the mean first")},
    source="A third party, 2026",
)
def cosine(x, y, center):
    """Mean cosine between a sample's input and its output."""
    if center:
        x, y = x - x.mean(0), y - y.mean(0)
    return torch.cosine_similarity(x, y).mean()


class Peak(nlbench.Measure):
    """Largest change that an activation makes to any unit of any sample."""

    probe, bounds, more_means = "sites", (0, float("inf")), "more nonlinear"

    def reset(self):
        self.peaks = {}

    def update(self, observation):
        peak = (observation.y - observation.x).abs().max().item()
        self.peaks[observation.place] = max(peak, self.peaks.get(observation.place, 0.0))

    def compute(self):
        return nlbench.Result.of(self.peaks)
