"""Seeds for random directions that belong to a sample, not to its batch or position."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor


def sample_seeds(inputs: Tensor, occurrences: Counter[bytes]) -> Tensor:
    """Return a seed (n,) for each sample, from its values and its earlier occurrences.

    Parameters
    ----------
    inputs : tensor of shape (n, ...)
    occurrences : Counter
        How often each sample occurred in earlier batches, updated by this function.

    Examples
    --------
    >>> seeds = sample_seeds(torch.tensor([[1.0], [2.0], [1.0]]), Counter())
    >>> seeds.unique().numel()
    3
    """
    seeds = []
    for sample in inputs.detach().cpu():
        # The same for every dtype that represents the sample.
        digest = hashlib.sha256(sample.double().numpy().tobytes()).digest()
        content = digest + occurrences[digest].to_bytes(8, "big")
        occurrences[digest] += 1
        seeds.append(int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1)
    return torch.tensor(seeds, dtype=torch.int64)
