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


def random_signs(inputs: Tensor, seeds: Tensor) -> Tensor:
    """Draw random signs of the shape of the inputs (n, ...), for each sample from its seed (n,).

    Examples
    --------
    >>> random_signs(torch.zeros(2, 3), torch.tensor([5, 5])).unique(dim=0).abs()
    tensor([[1., 1., 1.]])
    """
    signs = torch.empty(inputs.shape, dtype=inputs.dtype)
    for sample, seed in enumerate(seeds.tolist()):
        generator = torch.Generator().manual_seed(seed)
        signs[sample] = 2 * torch.randint(2, inputs.shape[1:], generator=generator) - 1
    return signs.to(inputs.device)
