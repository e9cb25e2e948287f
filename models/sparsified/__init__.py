"""Networks whose ReLUs are PReLUs with one slope per channel, linearised unit by unit.

`sparsification` builds and linearises such a network, and defines its training penalty.
`relu_calls` finds the ReLU calls, and `substitution` replaces them by the PReLUs of `layers`.
"""

from .sparsification import checkpoint_metadata as checkpoint_metadata
from .sparsification import linear_share as linear_share
from .sparsification import nonlinear_units as nonlinear_units
from .sparsification import parameter_groups as parameter_groups
from .sparsification import penalty as penalty
from .sparsification import randomize as randomize
from .sparsification import snap as snap
from .sparsification import sparsify as sparsify
