"""Networks whose ReLUs are PReLUs with a slope a channel, to be made linear unit by unit."""

from .prelu import (
    checkpoint_metadata,
    linear_share,
    nonlinear_units,
    parameter_groups,
    penalty,
    randomize,
    snap,
    sparsify,
)

__all__ = [
    "checkpoint_metadata",
    "linear_share",
    "nonlinear_units",
    "parameter_groups",
    "penalty",
    "randomize",
    "snap",
    "sparsify",
]
