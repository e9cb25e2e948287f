"""The probe `graph`: the channel graph of a network, from input to output.

`tracker` follows channels through a forward pass, using the `rules` for operations. `channel_graph`
defines the graph and computes the lengths of its paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

from .graph_probe import GRAPH as GRAPH

if TYPE_CHECKING:
    # Runs are planned without PyTorch, which these modules import.
    from .channel_graph import ChannelGraph as ChannelGraph
    from .channel_graph import counted_lengths as counted_lengths
    from .channel_graph import walked_length as walked_length

__getattr__, __dir__, __all__ = lazy_imports(__name__)
