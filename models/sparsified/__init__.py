"""Networks whose ReLUs are PReLUs with one slope per channel, made linear unit by unit."""

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
