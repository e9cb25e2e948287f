"""Matrix roots of the affinity score in float32, as published code takes them, and in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from nlbench.citation import Source
from nlbench.errors import NotFinite
from nlbench.measure import Measure, Result, Value
from nlbench.options import Option

from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.store.run_folder import Run

__all__ = ["PublishedRoots", "RootsInSinglePrecision", "score_by_roots"]


SOURCE = Source(
    citation="Q. Bouniot, I. Redko, A. Mallasto, C. Laclau, O. Struckmeier, K. Arndt, "
    "M. Heinonen, V. Kyrki, S. Kaski. From Alexnet to Transformers: Measuring the Non-linearity "
    "of Deep Neural Networks with Affine Optimal Transport. CVPR, 2025, and its published code.",
)


def score_by_roots(
    x: Tensor, y: Tensor, *, routine: str = "eigh", precision: str = "float32"
) -> float:
    """Affinity score by the paper's formula with two matrix roots and an inverse, as it stands.

    Covariances (Ledoit and Wolf's, in float64) and the transport (exact, in float64) are those
    of the measure; the map is Σx^{-½} (Σx^{½} Σy Σx^{½})^{½} Σx^{-½}, computed in the precision
    asked for.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
    routine : {"eigh", "svd"}
        What a root is taken by.
    precision : {"float32", "float64"}

    Returns
    -------
    float
        It may be anything in float32.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> round(score_by_roots(x, 2 * x), 3)
    1.0
    """
    import torch

    from nlbench.measures._assignment import optimal_matching
    from nlbench.measures._covariance import regularized_covariance

    dtype = getattr(torch, precision)
    x, y = (values.double() - values.double().mean(0) for values in (x, y))
    source, target = (
        regularized_covariance(
            values, dim=values.shape[1], shrinkage="ledoit-wolf", ridge=0.0, added=1e-6
        )
        for values in (x, y)
    )
    root = _root(source.matrix.to(dtype), routine)
    back = torch.linalg.inv(root)
    middle = _root(root @ target.matrix.to(dtype) @ root, routine)
    mapped = (x.to(dtype) @ (back @ middle @ back)).double()
    if not bool(torch.isfinite(mapped).all()):
        raise NotFinite("the map is not finite")
    worst = float((2 * target.trace).sqrt())
    matching = optimal_matching(mapped, y, precision=1e-6 * worst)
    return 1 - float(torch.linalg.vector_norm(mapped - y[matching])) / math.sqrt(len(x)) / worst


def _root(matrix: Tensor, routine: str) -> Tensor:
    import torch

    if routine == "svd":
        left, values, right = torch.linalg.svd(matrix)
        found: Tensor = (left * values.sqrt()) @ right
        return found
    values, vectors = torch.linalg.eigh(matrix)
    found = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return found


class RootsInSinglePrecision(Measure):
    """The affinity score by matrix roots in float32; it is another number.

    Of each site: ``value``, by a symmetric eigendecomposition; ``svd``, by a singular value
    decomposition; ``double``, by the same formula in float64.
    """

    name = "affinity-float32-roots"
    probe = "sites"
    bounds = (-math.inf, math.inf)
    more_means = "neither"
    options: ClassVar[Mapping[str, Option]] = {}
    source = SOURCE

    def reset(self) -> None:
        """Forget all sites."""
        self._values: list[Value] = []

    def update(self, observation: Any) -> None:
        """Take one batch of one site, which has to be its only one."""
        x, y = observation.x, observation.y
        numbers = {
            "value": score_by_roots(x, y),
            "svd": score_by_roots(x, y, routine="svd"),
            "double": score_by_roots(x, y, precision="float64"),
        }
        self._values.append(Value(observation.place, numbers, len(x)))

    def compute(self) -> Result:
        """Give the scores of all sites."""
        first = self._values[0]
        return Result(dict(first.statistics), tuple(self._values), first.n)


class PublishedRoots(Study):
    """Affinity score of heavy-tailed features, with matrix roots in float32 and in float64."""

    question = "Are matrix roots in float32 enough for the affinity score?"
    source = SOURCE
    needs = "nothing"
    minutes, quick_minutes = 0.4, 0.3
    takes = ()

    def measure(self, context: Context) -> Mapping[str, Run]:
        """ReLU on correlated heavy-tailed features: many of them, and few."""
        import torch

        sizes = {"many": (2048, 512), "few": (2048, 8)}
        if context.quick:
            sizes = {"many": (1024, 512), "few": (256, 8)}
        runs = {}
        for name, (n, d) in sizes.items():
            inputs = torch.from_numpy(features(n, d))
            runs[name] = context.evaluated(
                torch.nn.Sequential(torch.nn.ReLU()),
                inputs,
                ["affinity", RootsInSinglePrecision],
                name,
                settings={"sites.batch": n, "sites.reduction": "flatten"},
                name=f"ReLU on {d} features",
            )
        return runs

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Set the scores side by side."""
        rows, verdicts = [], []
        for name, run in runs.items():
            right = run["affinity"].values[0].statistics["value"]
            wrong = run[RootsInSinglePrecision.name].values[0]
            eigh, svd, double = (wrong.statistics[k] for k in ("value", "svd", "double"))
            size = f"{wrong.n:,} samples of {run.records[0].subject.model.split()[2]} features"
            rows.append((size, right, double, eigh, svd))
            off = max(abs(eigh - right), abs(svd - right))
            claim = (
                "In float32 the score of many heavy-tailed features is another one"
                if name == "many"
                else "Of few features it is the same"
            )
            verdicts.append(
                Verdict(
                    claim,
                    "0.18 or 0.30, by the routine, against 0.51 in float64"
                    if name == "many"
                    else "",
                    f"{eigh:.4f} (eigh) and {svd:.4f} (svd) against {right:.4f}",
                    bool(off > 0.01) if name == "many" else bool(off < 0.001),
                    f"{size}; the features of the published observation are not given, these are "
                    "of the same size, drawn here; agrees beyond 0.01"
                    if name == "many"
                    else f"{size}; agrees within 0.001",
                )
            )
        agreed = max(abs(row[1] - row[2]) for row in rows)
        verdicts.append(
            Verdict(
                "In float64 the paper's formula gives what the measure gives by another one",
                "",
                f"off by at most {agreed:.0e}",
                bool(agreed < 1e-4),
                "two roots and an inverse against a Cholesky factor; the ridge is absolute in the "
                "one and relative in the other; agrees within 1e-4",
            )
        )
        columns = ["ReLU on", "measure", "roots, float64", "eigh, float32", "svd, float32"]
        return Findings(verdicts, {"Scores": pd.DataFrame(rows, columns=columns)})


def features(n: int, d: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draw heavy-tailed features whose spectrum falls as that of deep layers does.

    Student's t with 5 degrees of freedom, the k-th of them weighed by 1 / k, mixed at random.

    Returns
    -------
    float32 array of shape (n, d)
    """
    random = np.random.default_rng(11)
    tails = random.standard_t(5.0, (n, d))
    mix = random.standard_normal((d, d)) / np.arange(1.0, d + 1)[:, None]
    return np.float32(tails @ mix)  # type: ignore[return-value]
