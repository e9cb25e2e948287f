"""Matrix roots in the affinity score, in float32 as in the published code, and in float64."""

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

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.verdicts import ordered, within

if TYPE_CHECKING:
    from torch import Tensor


SOURCE = Source(
    citation="Q. Bouniot, I. Redko, A. Mallasto, C. Laclau, O. Struckmeier, K. Arndt, "
    "M. Heinonen, V. Kyrki, S. Kaski. From Alexnet to Transformers: Measuring the Non-linearity "
    "of Deep Neural Networks with Affine Optimal Transport. CVPR, 2025, and its published code."
)


def score_by_roots(
    x: Tensor, y: Tensor, *, routine: str = "eigh", precision: str = "float32"
) -> float:
    """Compute the affinity score by the paper's formula, with two matrix roots and an inverse.

    As in the measure, the Ledoit-Wolf covariances and the exact transport are computed in float64.
    The map Σx^{-½} (Σx^{½} Σy Σx^{½})^{½} Σx^{-½} is computed in the given precision.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
    routine : {"eigh", "svd"}
        Decomposition used for the matrix roots.
    precision : {"float32", "float64"}

    Returns
    -------
    float
        The score, which may be meaningless in float32.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> round(score_by_roots(x, 2 * x), 3)
    1.0
    """
    import torch

    from nlbench.measures.transport.assignment import optimal_matching
    from nlbench.measures.transport.covariance import regularized_covariance

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
        return (left * values.sqrt()) @ right
    values, vectors = torch.linalg.eigh(matrix)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


class RootsInSinglePrecision(Measure):
    """The affinity score with matrix roots in float32.

    The statistics of a site are ``value``, from a symmetric eigendecomposition; ``svd``, from a
    singular value decomposition; and ``double``, from the same formula in float64.
    """

    name = "affinity-float32-roots"
    probe = "sites"
    bounds = (-math.inf, math.inf)
    more_means = "neither"
    options: ClassVar[Mapping[str, Option]] = {}
    source = SOURCE

    def reset(self) -> None:
        """Discard all sites."""
        self._values: list[Value] = []

    def update(self, observation: Any) -> None:
        """Compute the scores for a site, which has a single batch."""
        x, y = observation.x, observation.y
        statistics = {
            "value": score_by_roots(x, y),
            "svd": score_by_roots(x, y, routine="svd"),
            "double": score_by_roots(x, y, precision="float64"),
        }
        self._values.append(Value(observation.place, statistics, len(x)))

    def compute(self) -> Result:
        """Return the scores of all sites."""
        first = self._values[0]
        return Result(dict(first.statistics), tuple(self._values), first.n)


class PublishedRoots(Study):
    """Affinity score of heavy-tailed features, with matrix roots in float32 and in float64."""

    question = "Are matrix roots in float32 enough for the affinity score?"
    source = SOURCE
    needs = "nothing"
    minutes = 0.4
    quick_minutes = 0.3

    def measure(self, context: Context) -> Runs:
        """Measure ReLU on many and on few correlated, heavy-tailed features."""
        import torch

        sizes = {"many": (2048, 512), "few": (2048, 8)}
        if context.quick:
            sizes = {"many": (1024, 512), "few": (256, 8)}
        runs = {}
        for name, (n, d) in sizes.items():
            inputs = torch.from_numpy(features(n, d))
            runs[name] = context.evaluate(
                torch.nn.Sequential(torch.nn.ReLU()),
                inputs,
                ["affinity", RootsInSinglePrecision],
                name,
                settings={"sites.batch": n, "sites.reduction": "flatten"},
                name=f"ReLU on {d} features",
            )
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Compare the measure's scores with those of the published formula."""
        rows = []
        for run in runs.values():
            published = run[RootsInSinglePrecision.name].values[0]
            eigh, svd, double = (published.statistics[k] for k in ("value", "svd", "double"))
            size = f"{published.n:,} samples of {run.records[0].subject.model.split()[2]} features"
            rows.append((size, run["affinity"].values[0].statistics["value"], double, eigh, svd))
        columns = ["ReLU on", "measure", "roots, float64", "eigh, float32", "svd, float32"]
        table = pd.DataFrame(rows, columns=columns, index=list(runs))
        single = table[["eigh, float32", "svd, float32"]]
        error = single.sub(table.measure, axis=0).abs().max(axis=1)
        double_error = (table.measure - table["roots, float64"]).abs().max()
        ours = {
            name: f"{row.iloc[3]:.4f} (eigh) and {row.iloc[4]:.4f} (svd) vs. {row.measure:.4f}"
            for name, row in table.iterrows()
        }
        verdicts = [
            Verdict(
                "In float32 the score of many heavy-tailed features differs",
                "",
                ours["many"],
                ordered(0.01, error["many"]),
                f"{table['ReLU on']['many']}; features drawn here; agrees if off by over 0.01",
            ),
            Verdict(
                "With few features it is the same",
                "",
                ours["few"],
                within(error["few"], 0, 0.001),
                f"{table['ReLU on']['few']}; agrees if within 0.001",
            ),
            Verdict(
                "In float64 the paper's formula and that of the measure give the same score",
                "",
                f"off by at most {double_error:.0e}",
                within(double_error, 0, 1e-4),
                "two roots and an inverse, with an absolute ridge, vs. a Cholesky factor, with a "
                "relative ridge; agrees if within 1e-4",
            ),
        ]
        return Findings(verdicts, {"Scores": table})


def features(n: int, d: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draw heavy-tailed features, of shape (n, d), with a spectrum like that of deep layers.

    They are random mixtures of variables that follow Student's t with 5 degrees of freedom; the
    k-th has the weight 1 / k.
    """
    random = np.random.default_rng(11)
    tails = random.standard_t(5.0, (n, d))
    mix = random.standard_normal((d, d)) / np.arange(1.0, d + 1)[:, None]
    return np.float32(tails @ mix)  # type: ignore[return-value]
