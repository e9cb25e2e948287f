"""Float64 copies of float32 networks, for sites where float32 is not precise enough.

The rounding error of a column depends on everything that it was computed from: the sum of a large
offset and a small difference is rounded at the scale of the offset, even if the offset is
subtracted later. Only a forward pass in float64 reveals it, so a few samples are run in both types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nlbench.introspection.float_types import own_float_type
from nlbench.introspection.memory import available_memory
from nlbench.introspection.model_copy import double_copy, tensors_of
from nlbench.introspection.precision import float32_precision
from nlbench.introspection.random_state import preserve_rng_state, rng_state

from .site import SiteBatch
from .sites_observation import observe_sites

# Square root of noise variance divided by variance, each summed over the columns of a side. This
# bounds the change in affinity, the most sensitive measure.
MAX_POOLED_NOISE = 3e-4

# Mean over columns of noise variance divided by variance, capped at 1. R² changes by about as much.
MAX_MEAN_NOISE = 1e-4

# Noise relative to the bin width of `entropy`; about this fraction of features may change bins.
MAX_BIN_NOISE = 1e-2

# A column counts as constant if its range is at most this many eps of its maximum magnitude.
MAX_CONSTANT_ROUNDINGS = 8

# The rows (k, d) of input and output at each site.
_Rows = dict[str, tuple[Tensor, Tensor]]


class Float64Comparison(NamedTuple):
    """Where a float32 model differs from its float64 copy.

    Parameters
    ----------
    copy : torch.nn.Module or None
        Float64 copy, to measure in place of the model; None if float32 is sufficient. Networks of
        other types, and float32 networks in TF32 or under autocast, are measured as they are.
    sites : list of str
        Names of the sites where float32 is not sufficient.
    problem : str
        Reason why a float32 model can't be compared.
    output : object
        The model's output for the first samples in float32; None if it was not run on all of them
        at once.
    """

    copy: nn.Module | None = None
    sites: Sequence[str] = ()
    problem: str = ""
    output: object = None


def compare_with_float64(
    model: nn.Module, first_samples: Tensor, options: Mapping[str, Any]
) -> Float64Comparison:
    """Test whether float32 is precise enough at every site of a model.

    Parameters
    ----------
    first_samples : tensor of shape (k, ...)
        At most `COMPARED_SAMPLES`. The first two also run in float64; no copy is made for fewer.
    options : mapping
        Keyword arguments for `observe_sites`.
    """
    device = first_samples.device
    if len(first_samples) < 2 or not _computes_in_float32(model, first_samples):
        return Float64Comparison()
    try:
        with preserve_rng_state(device):
            before = rng_state(device)
            pair = first_samples[:2]
            rows, other_rows, output = _float32_rows(model, first_samples, options)
            if rng_state(device) != before:
                return Float64Comparison(problem="the network draws random numbers", output=output)
    except Exception as error:
        # The pass over all samples raises it again, unless only the small batch causes it.
        return Float64Comparison(problem=str(error).partition("\n")[0])
    # A copy that fills the device would leave no memory to run the model.
    if sum(8 * tensor.numel() for tensor in tensors_of(model)) > available_memory(device) / 2:
        return Float64Comparison(problem="too little memory for a copy of the model", output=output)
    try:
        with preserve_rng_state(device):
            copy = double_copy(model)
            pair = pair.double() if pair.is_floating_point() else pair
            exact = _rows_at_sites(copy, pair, options)
    except Exception as error:
        # An operation may not support float64, or the copy may not fit into memory.
        return Float64Comparison(problem=str(error).partition("\n")[0], output=output)
    sites = unresolved_sites(rows, exact, other_rows)
    return Float64Comparison(copy if sites else None, sites, output=output)


def _computes_in_float32(model: nn.Module, samples: Tensor) -> bool:
    device = samples.device
    if own_float_type(model) != torch.float32 or device.type == "mps":
        return False
    if samples.is_floating_point() and samples.dtype != torch.float32:
        return False
    is_tf32 = device.type == "cuda" and "tf32" in float32_precision(device).values()
    return not is_tf32 and not torch.is_autocast_enabled(device.type)


def _float32_rows(
    model: nn.Module, samples: Tensor, options: Mapping[str, Any]
) -> tuple[_Rows, _Rows, object]:
    """Return the rows of the first two samples, those of the others, and the output for all.

    The output is None if the samples are not run at once, since memory is limited or the sample of
    a row is unknown.
    """
    pair, others = samples[:2], samples[2:]
    if options["memory"] is None:
        outputs: list[object] = []
        hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            rows = _SplitRows(len(samples))
            observe_sites(model, [samples], rows.add, **options)
        finally:
            hook.remove()
        if len(outputs) == 1 and rows.is_complete:
            return rows.first, rows.others if len(others) else {}, outputs[0]
    other_rows = _rows_at_sites(model, others, options) if len(others) else {}
    return _rows_at_sites(model, pair, options), other_rows, None


class _SplitRows:
    """The rows of a batch's first two samples, and those of its other samples.

    Attributes
    ----------
    is_complete : bool
        False if there are rows whose sample is unknown.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.first: _Rows = {}
        self.others: _Rows = {}
        self.is_complete = True

    def add(self, observation: SiteBatch) -> None:
        """Add the rows of one place."""
        x, y, owners = observation.x, observation.y, observation.owners
        if owners is None and len(x) == self._samples:
            owners = torch.arange(self._samples, device=x.device)
        if owners is not None:
            is_first = owners < 2
            self.first[observation.place] = x[is_first], y[is_first]
            self.others[observation.place] = x[~is_first], y[~is_first]
        elif len(x) > 1:  # A single row is the same for all samples.
            self.is_complete = False


def _rows_at_sites(model: nn.Module, samples: Tensor, options: Mapping[str, Any]) -> _Rows:
    rows: _Rows = {}

    def record(observation: SiteBatch) -> None:
        rows[observation.place] = observation.x, observation.y

    if len(samples) <= 2:
        # As many samples as the memory for a forward pass is estimated from.
        options = {**options, "memory": None, "feasible_sizes": None}
    observe_sites(model, [samples], record, **options)
    return rows


def unresolved_sites(rows: _Rows, exact: _Rows, others: _Rows) -> list[str]:
    """Return the names of sites where rows in float32 differ too much from those in float64.

    Parameters
    ----------
    rows, exact : mapping of str to pair of tensors of shape (k, d)
        Input and output in float32 and in float64.
    others : mapping of str to pair of tensors of shape (m, d)
        Input and output for other samples in float32, since two samples may be close by chance.

    Examples
    --------
    >>> offset = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    >>> exact = {"relu": (offset, offset), "sigmoid": (offset, 0.5 + 1e-8 * offset)}
    >>> rows = {name: (x.float(), y.float()) for name, (x, y) in exact.items()}
    >>> unresolved_sites(rows, exact, {})
    ['sigmoid']
    """
    names = [name for name in rows if name in exact]
    return [
        name
        for name in names
        if not all(map(_is_resolved, rows[name], exact[name], others.get(name, rows[name])))
    ]


def _is_resolved(values: Tensor, exact: Tensor, others: Tensor) -> bool:
    """Return True if the rounding errors of values (k, d) are small compared with their spread."""
    if values.shape != exact.shape or len(values) < 2:
        return True
    pooled, rounding = torch.cat([values, others]).double(), torch.finfo(values.dtype).eps
    varies = _varies(pooled, rounding) | _varies(exact, torch.finfo(exact.dtype).eps)
    if not varies.any():
        return True
    errors = values.double() - exact
    # An error common to all samples changes no score.
    noise, variance = errors.var(0), pooled.var(0)
    if noise.sum() > MAX_POOLED_NOISE**2 * variance.sum():
        return False
    ratios = torch.where(noise < variance, noise / variance, 1.0)[varies]
    if ratios.mean() > MAX_MEAN_NOISE:
        return False
    low, high = exact.aminmax(dim=1)
    bins = (high - low) / exact.shape[1]
    differs = _varies(exact.T, torch.finfo(exact.dtype).eps)
    # The bins start at the minimum feature.
    deviations = (errors - errors.mean(1, keepdim=True)).square().mean(1).sqrt()
    return bool((deviations <= MAX_BIN_NOISE * bins)[differs].all())


def _varies(columns: Tensor, rounding: float) -> Tensor:
    low, high = columns.aminmax(dim=0)
    peak = torch.maximum(low.abs(), high.abs())
    return high - low > MAX_CONSTANT_ROUNDINGS * rounding * peak
