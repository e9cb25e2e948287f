"""Networks whose ReLUs are replaced by PReLUs, so that units can be linearised one by one.

`sparsification` builds and linearises these networks and defines the training penalty.
`relu_calls` finds the ReLU calls, and replaces them by PReLUs.
"""

from .sparsification import checkpoint_metadata as checkpoint_metadata
from .sparsification import linear_share as linear_share
from .sparsification import nonlinear_units as nonlinear_units
from .sparsification import parameter_groups as parameter_groups
from .sparsification import penalty as penalty
from .sparsification import randomize as randomize
from .sparsification import snap as snap
from .sparsification import sparsify as sparsify
