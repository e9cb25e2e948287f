"""
An ImageNet network on lines
============================

On a line from an image of 224 × 224 pixels to the same image moved by one pixel, ResNet18 crosses
about 170,000 linear regions. An exact trace would take hours. The number of boundaries is
estimated on nested grids instead, and the estimate states its error.
"""

import matplotlib.pyplot as plt
import torch
import torchvision

from nlbench.measures.absdev import absolute_deviation
from nlbench.probes.lines import estimate_segment, trace_segment

torch.manual_seed(0)
network = torchvision.models.resnet18().eval()
image = torch.nn.functional.interpolate(torch.randn(1, 3, 7, 7), size=64, mode="bicubic")[0]
moved = image.roll(1, dims=2)

estimate = estimate_segment(network, image, moved, tolerance=0.1)
print(f"at least {estimate.at_least:,.0f} boundaries, about {estimate.crossings:,.0f}")
print(f"error {estimate.error:,.0f}; largest deviation {absolute_deviation(estimate).max():.3g}")

# %%
# (These images have 64 × 64 pixels, so that this page is made in seconds.) On a short piece of the
# line the exact trace finds each boundary, in double precision:

trace = trace_segment(network, image, image + (moved - image) / 500)
print(f"{trace.regions:,} regions")

# %%
# The network is affine on each of them. A logit minus its chord, and the boundaries below:

chord = trace.values[0] + trace.t[:, None] * (trace.values[-1] - trace.values[0])
figure, (above, below) = plt.subplots(2, sharex=True, height_ratios=(4, 1), layout="constrained")
above.plot(trace.t, (trace.values - chord)[:, :3])
above.set_ylabel("logit minus chord")
below.eventplot(trace.t.numpy(), linewidths=0.3)
below.set(yticks=[], xlabel="position on the segment")
figure

# %%
# With the command line, on your own images:
#
# .. code-block:: text
#
#    nlbench run --measures absdev,density --model torchvision/resnet18 --weights trained \
#        --data images --set images.folder=photographs --samples 4
