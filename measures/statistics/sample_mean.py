"""Means of one number per sample, with the replicates without each group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.measure import Result
from nlbench.measure.replicates import without_each_group
from nlbench.measure.sample_groups import SampleGroups


def sample_mean(batches: Sequence[Tensor], groups: SampleGroups | None) -> Result:
    """Return the mean over all samples.

    Parameters
    ----------
    batches : sequence of tensor of shape (n,)
        One number per sample.
    groups : SampleGroups or None
        Groups of the same samples; None for a result without replicates.

    Raises
    ------
    nlbench.Undefined
        If there are no samples.

    Examples
    --------
    >>> sample_mean([torch.tensor([1.0, 2.0]), torch.tensor([6.0])], None).summary
    {'value': 3.0}
    """
    if not batches:
        raise Undefined("no samples")
    values = torch.cat(list(batches)).numpy()
    replicates: tuple[float, ...] = ()
    if groups is not None:
        replicates = without_each_group(groups.array, lambda kept: values[kept].mean())
    return Result({"value": values.mean().item()}, n=len(values), replicates=replicates)
