"""Networks whose ReLUs are PReLUs with one slope per channel, made linear unit by unit.

`sparsification` makes and linearises such a network, and has the penalty of its training.
`relu_calls` finds the calls of ReLU, `substitution` replaces them by the PReLUs of `layers`.
"""

from .sparsification import (
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
