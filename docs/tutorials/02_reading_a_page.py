"""
Reading a page
==============

A run is a page, too: one HTML file that needs nothing else. This one shows the small network that
ships with nlbench, trained on scikit-learn's handwritten digits.
"""

# sphinx_gallery_thumbnail_path = "report.png"
import nlbench

request = nlbench.Request(
    measures=("affinity", "cka", "absdev"),
    models=("vgg8",),
    data=("digits",),
    samples=128,
    settings={"lines.number": 2, "lines.anchors": 2},
)
run = nlbench.run(request, "runs/vgg8")
run.report("runs/vgg8.html")

# %%
# `Open the page <../pages/vgg8.html>`__. From top to bottom:
#
# - **Findings** name the activations that stand out, and place the network among the reference
#   networks. 0.8 alone means little; "more nonlinear than all of 33 networks" does.
# - **The strip** shows each activation from the input to the output. Darker is more nonlinear.
# - **A card for each measure** has the value ± its standard error, ticks for single activations or
#   paths, and grey dots for the reference networks.
# - What has **no value** is listed with its reason.
#
# ± is how much a value would change with other samples, or paths, of the same distribution. How
# much activations differ is a range. ``absdev`` grows with the logits, so networks are compared by
# ``absdev.relative``.

run

# %%
# The same in a table: ``reference`` is the share of the reference networks that are less nonlinear.

run.leaderboard(reference=True).T

# %%
# Measures without a direction, such as ``absdev.length``, are never ranked. Neither is there an
# average over measures, because they measure different things: how far they agree on the
# activations of a network is a table of its own, which two networks or more fill.

run.signature("vgg8", "affinity").statistics
