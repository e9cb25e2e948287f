"""Non-linearity signatures: a measure's values at all sites, in call order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlbench.errors import RequestError, Undefined, nearest
from nlbench.measure import Result, summarize
from nlbench.serialization.files import spreadsheet_safe, write_atomically

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch import nn


@dataclass(frozen=True)
class Signature:
    """A measure's values at the sites of one network, in call order.

    Parameters
    ----------
    sites : tuple of str
        Names in call order.
    kinds : tuple of str
        Kind of each activation, such as ``relu``; empty if unknown.
    values : tuple of float
        NaN where a site has no value.
    status : tuple of str
        ``ok``, ``undefined``, ``skipped`` or ``failed``.
    name : str
        Legend label.

    References
    ----------
    Q. Bouniot et al., "From Alexnet to Transformers: Measuring the Non-linearity of Deep
    Neural Networks with Affine Optimal Transport", CVPR 2025, section 4.

    Examples
    --------
    >>> import nlbench
    >>> result = nlbench.Result.of({"conv1/relu": 0.5, "conv2/relu": 0.75, "head": 1.0})
    >>> signature = Signature.of(result)
    >>> signature.sites, signature.values
    (('conv1/relu', 'conv2/relu', 'head'), (0.5, 0.75, 1.0))
    >>> signature.statistics["mean"], signature.statistics["spread"]
    (0.75, 0.5)
    """

    sites: tuple[str, ...]
    kinds: tuple[str, ...]
    values: tuple[float, ...]
    status: tuple[str, ...]
    name: str = ""

    def __post_init__(self) -> None:
        lengths = {len(self.sites), len(self.kinds), len(self.values), len(self.status)}
        if len(lengths) > 1:
            raise RequestError(
                f"a signature with {len(self.sites)} sites, {len(self.kinds)} kinds, "
                f"{len(self.values)} values and {len(self.status)} statuses; expected equal lengths"
            )

    @classmethod
    def of(
        cls, result: Result, *, kinds: Mapping[str, str] | None = None, name: str = ""
    ) -> Signature:
        """Create the signature from a site measure's result, such as ``run["affinity"]``.

        Parameters
        ----------
        kinds : mapping of str to str, optional
            Maps sites to kinds; see `nlbench.probes.sites.list_sites`.
        name : str
            Legend label.

        Raises
        ------
        nlbench.Undefined
            If the result lists no sites.
        """
        if not result.values:
            reason = f": {result.reason}" if result.reason else ""
            raise Undefined(f"the result lists no sites{reason}")
        return cls(
            tuple(value.place for value in result.values),
            tuple((kinds or {}).get(value.place, "") for value in result.values),
            tuple(value.statistics.get("value", math.nan) for value in result.values),
            tuple(value.status for value in result.values),
            name,
        )

    def __len__(self) -> int:
        """Return the number of sites, including those without a value."""
        return len(self.sites)

    @property
    def defined(self) -> tuple[float, ...]:
        """Finite values in call order."""
        return tuple(value for value in self.values if math.isfinite(value))

    @property
    def statistics(self) -> dict[str, float]:
        """Mean, std (population), min, max, median and spread (max - min) of the values.

        Raises
        ------
        nlbench.Undefined
            If no site has a value.
        """
        if not self.defined:
            raise Undefined("no site of the signature has a value")
        summary = summarize(self.defined)
        return {"mean": summary.pop("value"), **summary}

    def dtw(self, other: Signature) -> float:
        """Compute the dynamic time warping distance to another signature.

        It is the square root of the minimum sum of squared differences over all monotonic
        alignments, in which a site may match several others. Sites without a value are skipped.
        The sum is not normalized by the alignment's length. Equal signatures have distance zero.

        Raises
        ------
        nlbench.Undefined
            If no site of either signature has a value.

        Examples
        --------
        >>> short = Signature(("a", "b"), ("", ""), (0.0, 1.0), ("ok", "ok"))
        >>> long = Signature(("a", "b", "c"), ("", "", ""), (0.0, 1.0, 1.0), ("ok",) * 3)
        >>> short.dtw(long)
        0.0
        """
        if not (self.defined and other.defined):
            raise Undefined("no site of the signature has a value")
        return float(dtw_distances([self.defined, other.defined])[0, 1])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the values of the sites in call order, by default in a new figure."""
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(max(4.0, min(12.0, 0.3 * len(self))), 3.0))
        ax.plot(range(len(self)), self.values, marker="o", markersize=3, label=self.name or None)
        ax.set_xlabel("site, in call order")
        ax.set_xlim(-0.5, len(self) - 0.5)
        if self.name:
            ax.legend()
        return ax

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the columns ``site``, ``kind``, ``value`` (None if missing) and ``status``."""
        values = [value if math.isfinite(value) else None for value in self.values]
        return {
            "site": list(self.sites),
            "kind": list(self.kinds),
            "value": values,
            "status": list(self.status),
        }

    def to_frame(self) -> pd.DataFrame:
        """Return the columns as a table, one row per site."""
        import pandas as pd

        return pd.DataFrame({**self.to_dict(), "value": list(self.values)})

    def to_csv(self, path: str | Path) -> Path:
        """Write the table as CSV and return its path.

        Missing values are written as empty fields. Names that start like a formula are escaped;
        see `nlbench.serialization.files.spreadsheet_safe`.
        """
        table = self.to_frame()
        table["site"] = [spreadsheet_safe(site) for site in self.sites]
        write_atomically(Path(path), table.to_csv(index=False))
        return Path(path)

    def __repr__(self) -> str:
        """Return one line with the name, the number of sites and the range of values."""
        values = self.defined
        spread = f"{min(values):.4g} to {max(values):.4g}" if values else "no value"
        name = f"{self.name}, " if self.name else ""
        return f"<Signature: {name}{len(self)} sites, {spread}>"


def dtw_distances(signatures: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Compute the dynamic-time-warping distance (n, n) between all pairs of signatures (d_i,).

    See `Signature.dtw`.

    References
    ----------
    H. Sakoe, S. Chiba, "Dynamic programming algorithm optimization for spoken word
    recognition", IEEE Transactions on Acoustics, Speech, and Signal Processing 26, 1978.

    Examples
    --------
    >>> dtw_distances([[0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 3.0]]).tolist()
    [[0.0, 0.0, 2.0], [0.0, 0.0, 2.23606797749979], [2.0, 2.23606797749979, 0.0]]
    """
    values = [np.asarray(signature, dtype=np.float64) for signature in signatures]
    lengths = np.array([len(signature) for signature in values])
    n = len(values)
    longest = int(lengths.max(initial=1))
    # Entries of the recursion depend only on earlier ones, so padding changes nothing: each pair's
    # distance is read at the ends of its two signatures.
    padded = np.zeros((n, longest))
    for position, signature in enumerate(values):
        padded[position, : len(signature)] = signature
    first, second = np.triu_indices(n, 1)
    squares = np.zeros(len(first))
    previous = np.full((longest + 1, len(first)), np.inf)
    previous[0] = 0.0
    for i in range(longest):
        row = np.full_like(previous, np.inf)
        for j in range(longest):
            step = (padded[first, i] - padded[second, j]) ** 2
            row[j + 1] = step + np.minimum(np.minimum(previous[j], previous[j + 1]), row[j])
        ends = np.nonzero(lengths[first] == i + 1)[0]
        squares[ends] = row[lengths[second[ends]], ends]
        previous = row
    distances = np.zeros((n, n))
    distances[first, second] = distances[second, first] = np.sqrt(squares)
    return distances


def module_of(model: nn.Module, site: str) -> nn.Module:
    """Return the module for a site: the activation module, or the module that calls a function.

    Parameters
    ----------
    model : torch.nn.Module
    site : str
        For example ``layer1.0.relu``, its second call ``layer1.0.relu:1``, or the functional call
        ``Mixed_5b.branch1x1/relu`` in the module ``Mixed_5b.branch1x1``.

    Raises
    ------
    nlbench.RequestError
        If the model has no such module.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> module_of(model, "1:3")
    ReLU()
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    path, slash, _ = site.partition("/")
    name = path.partition(":")[0]
    if name in modules:
        return modules[name]
    if not slash and "." not in name:
        return model  # a functional call in the model itself
    raise RequestError(f"the model has no module '{name}'{nearest(name, modules)}")
