"""Questions that measures answer, and which measures the benchmark supports for each.

The table on the home page, in ``README.md`` and above ``nlbench list measures`` is made from these.
"""

from __future__ import annotations

from nlbench.question import Question

ACTIVATIONS = Question(
    "How nonlinear are its activations?",
    ("r2", "cka", "affinity"),
    cost="one forward pass",
    caution="`r2` needs more samples than channels; `affinity` compares distributions, not pairs",
    order=1,
)
FUNCTION = Question(
    "How complex is the function it computes?",
    ("nlc", "affine-residual", "pieces"),
    cost="`pieces`: up to 2,000 passes a segment",
    caution="`nlc` inverts the order of some trained networks",
    order=2,
)
REMOVAL = Question(
    "What can be removed?",
    ("substitution",),
    cost="one pass per activation",
    caution="`affinity` and `cka`, which are cheaper, order activations similarly",
    order=3,
)
REGIONS = Question(
    "Where are its linear regions?",
    ("density", "absdev"),
    cost="up to 2,000 passes a segment",
    caution="`density` counts kinks, however weak; `absdev` grows with the outputs",
    order=4,
)
BLOCKS = Question(
    "What do its residual blocks do?",
    ("linearity", "influence"),
    cost="one forward pass",
    caution="needs `--set sites.of=blocks`",
    order=5,
)
