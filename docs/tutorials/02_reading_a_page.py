"""
Reading a page
==============

Every run has a page: one HTML file that needs nothing else. This one shows the small network that
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
#   networks: 0.8 alone means little, "more nonlinear than 80 % of 45 reference networks" more.
# - **The strip** shows each activation from the input to the output. Darker is more nonlinear.
# - **A card for each measure** has the value ± its standard error, ticks for single activations or
#   paths, and grey dots for the reference networks.
# - What has **no value** is listed with its reason.
#
# ± is how much a value would change with other samples, or paths, of the same distribution; a
# range is how much activations differ. ``absdev`` grows with the logits, so compare networks by
# ``absdev.relative``.

run

# %%
# In the same table ``reference`` is the fraction of the reference networks that are less
# nonlinear.

run.leaderboard(reference=True).T

# %%
# Measures without a direction are never ranked, and measures are never averaged, because they
# measure different things. The page of two networks or more has a table of how far measures
# agree.

run.signature("vgg8", "affinity").statistics
