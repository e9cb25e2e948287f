"""Similarity between the places of one network, or of two: CKA on the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlbench.errors import RequestError, Undefined, nearest
from nlbench.lazy import load_reports
from nlbench.measure.replicates import GROUPS, group_index, standard_error
from nlbench.subjects.spec import SubjectSpec

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from nlbench.store.run import Run
    from nlbench.subjects.facts import SubjectFacts
    from nlbench.subjects.subject import Subject

MAX_ROWS = 1024
"""Maximum number of rows that representations are compared on."""


MIN_RELATIVE_HSIC = 1e-12
"""Unbiased HSIC of a representation with itself, relative to its Gram matrix, that is rounding."""

_SITE_OPTIONS = {
    "of": "activations",
    "rows": "auto",
    "skip": 0,
    "reduction": "spatial",
    "select": "*",
    "attention": False,
}


@dataclass(frozen=True)
class Similarity:
    """Debiased linear CKA of the places of two networks, or of one with itself.

    Parameters
    ----------
    names : pair of str
        Labels of the networks.
    places, others : tuple of str
        Places of the first (P) and of the second network (Q), in call order.
    values : array of shape (P, Q)
        At most 1; NaN where a representation is constant or there are fewer than 4 rows.
    errors : array of shape (P, Q)
        Standard errors for the choice of samples; NaN where unknown.
    n : int
        Number of rows.

    References
    ----------
    S. Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
    section 3; unbiased HSIC: L. Song et al., JMLR 13 (2012), the estimator HSIC1.
    """

    names: tuple[str, str]
    places: tuple[str, ...]
    others: tuple[str, ...]
    values: NDArray[np.float64]
    errors: NDArray[np.float64]
    n: int

    def frame(self) -> pd.DataFrame:
        """Return one row per pair: ``place, other, value, error``."""
        import pandas as pd

        rows = [
            (place, other, self.values[i, j], self.errors[i, j])
            for i, place in enumerate(self.places)
            for j, other in enumerate(self.others)
        ]
        return pd.DataFrame(rows, columns=["place", "other", "value", "error"])

    def write(self, output: str | Path) -> Path:
        """Write the matrix as a page with a heat map (``.html``) or as a table (``.csv``).

        Raises
        ------
        nlbench.RequestError
            If the name doesn't end in one of these.
        """
        return load_reports().write_similarity(self, Path(output))


def cka_matrix(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor] | None = None,
    *,
    names: tuple[str, str] = ("", ""),
    groups: NDArray[np.int64] | None = None,
) -> Similarity:
    """Compute the debiased linear CKA of all pairs of representations of the same n samples.

    Parameters
    ----------
    first, second : mapping of str to tensor of shape (n, d)
        Features by place; `second` is `first` by default. d may differ between places. Computed in
        float64.
    names : pair of str
        Labels of the networks.
    groups : integer array of shape (n,), optional
        Groups of samples for the errors; by default sample i is in group i mod 8.

    Raises
    ------
    nlbench.RequestError
        If there are no places, or if the numbers of samples differ.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    >>> similarity = cka_matrix({"x": x, "rotated": 3 * x.flip(1) - 7})
    >>> similarity.values.round(6).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    sides = [dict(side) for side in (first, first if second is None else second)]
    if not all(sides):
        raise RequestError("there are no representations to compare")
    counts = {len(features) for side in sides for features in side.values()}
    if len(counts) != 1:
        raise RequestError(f"representations of {sorted(counts)} samples, expected equal numbers")
    (n,) = counts
    grams = [_stack(side.values()) for side in (sides[:1] if second is None else sides)]
    if groups is None:
        groups = group_index(np.arange(n))
    replicates = []
    for group in np.unique(groups):
        kept = np.flatnonzero(groups != group)
        if len(kept):
            replicates.append(debiased_cka([gram[:, kept][:, :, kept] for gram in grams]))
    values = debiased_cka(grams)
    errors = np.full(values.shape, math.nan)
    if len(replicates) == GROUPS:
        for index in np.ndindex(*values.shape):
            error = standard_error([float(replicate[index]) for replicate in replicates])
            errors[index] = math.nan if error is None else error
    return Similarity(names, tuple(sides[0]), tuple(sides[1]), values, errors, n)


def _stack(features: Any) -> Tensor:
    """Return the Gram matrices (P, n, n) of centred features, with trace 1.

    The matrix of constant features is 0.
    """
    import torch

    grams = []
    for rows in features:
        rows = rows.detach().cpu().flatten(1)
        eps = torch.finfo(rows.dtype).eps if rows.is_floating_point() else 0.0
        values = rows.double()
        peak = values.abs().max() if values.numel() else values.new_zeros(())
        # Relative to the peak, so that no square underflows or overflows.
        values = values / peak if peak > 0 else values
        centred = values - values.mean(0)
        # Variation within the spacing of floats is rounding.
        centred[:, centred.abs().amax(0) <= 4 * eps * values.abs().amax(0)] = 0.0
        gram = centred @ centred.T
        trace = gram.trace()
        grams.append(gram / trace if trace > 0 else torch.zeros_like(gram))
    return torch.stack(grams)


def debiased_cka(grams: Sequence[Tensor]) -> NDArray[np.float64]:
    """Compute the debiased CKA of all pairs of Gram matrices (P, n, n) and (Q, n, n).

    The unbiased HSIC is an inner product of U-centred matrices, so that CKA is at most 1.
    """
    n = grams[0].shape[1]
    # The unbiased HSIC divides by n - 3.
    if n < 4:
        shape = len(grams[0]), len(grams[-1])
        return np.full(shape, math.nan)
    flat = [_u_centred(gram).flatten(1) for gram in grams]
    norms = []
    for vectors, gram in zip(flat, grams, strict=True):
        squares = vectors.square().sum(1)
        is_rounding = squares <= MIN_RELATIVE_HSIC * gram.square().sum((1, 2))
        norms.append(squares.masked_fill(is_rounding, math.nan).sqrt())
    products = flat[0] @ flat[-1].T
    aligned: NDArray[np.float64] = (products / norms[0][:, None] / norms[-1]).numpy()
    return np.clip(aligned, -1.0, 1.0)


def _u_centred(grams: Tensor) -> Tensor:
    """U-centre matrices (P, n, n), whose diagonals become 0."""
    import torch

    n = grams.shape[1]
    off = grams - torch.diag_embed(grams.diagonal(dim1=1, dim2=2))
    rows = off.sum(2)
    total = rows.sum(1)[:, None, None]
    centred = off - (rows[:, :, None] + rows[:, None, :]) / (n - 2) + total / ((n - 1) * (n - 2))
    return centred - torch.diag_embed(centred.diagonal(dim1=1, dim2=2))


def similarity(
    run: Run,
    other: Run | None = None,
    *,
    subject: str | None = None,
    against: str | None = None,
    device: str = "auto",
) -> Similarity:
    """Compute the CKA of all places of a run's network with those of another one, or its own.

    The networks are loaded again, which runs their code, and must have the weights and the samples
    that the run recorded. Places, rows and reduction are those of the run's site measures.

    Parameters
    ----------
    run, other : Run
        Runs with a folder.
    subject : str, optional
        Label of the network in `run`; not needed if there is only one.
    against : str, optional
        Label of the network to compare with, in `other` or else in `run`.
    device : str
        ``auto``, ``cpu``, ``cuda``, …

    Raises
    ------
    nlbench.RequestError
        If a network isn't in the run, has changed, or was measured on other samples.
    nlbench.Undefined
        If it has no places.
    """
    first = second = _facts(run, subject)
    second_run = other or run
    if other is not None or against is not None:
        second = _facts(second_run, against)
    if first.sample_hash != second.sample_hash:
        raise RequestError(
            f"{label_subject(first)} and {label_subject(second)} were measured on different samples"
        )
    recorded = (run.manifest.get("probes") or {}).get("sites") or {}
    options = {name: recorded.get(name, default) for name, default in _SITE_OPTIONS.items()}
    sides = [_features(load_recorded(run, first, device), options)]
    if second is not first:
        sides.append(_features(load_recorded(second_run, second, device), options))
    rows = min(len(next(iter(features.values()))) for features, _ in sides)
    cut = []
    for features, _ in sides:
        cut.append({place: values[:rows] for place, values in features.items()})
    return cka_matrix(
        cut[0],
        cut[1] if len(cut) > 1 else None,
        names=(label_subject(first), label_subject(second)),
        groups=sides[0][1][:rows],
    )


def _facts(run: Run, label: str | None) -> SubjectFacts:
    """Return the facts about a run's subject with the given label, or about its only one."""
    subjects = {label_subject(record.subject): record.subject for record in run.records}
    if label is None and len(subjects) == 1:
        return next(iter(subjects.values()))
    labels = ", ".join(list(subjects)[:8])
    if label is None:
        raise RequestError(f"{run.name} has {len(subjects)} networks, name one of: {labels}")
    matches = [facts for name, facts in subjects.items() if label in (name, facts.weights)]
    if len(matches) != 1:
        raise RequestError(f"{run.name} has no network '{label}'{nearest(label, list(subjects))}")
    return matches[0]


def label_subject(facts: SubjectFacts) -> str:
    """Return the label of a recorded subject."""
    return f"{facts.model} {facts.weights} {facts.data} {facts.seed}"


def load_recorded(run: Run, facts: SubjectFacts, device: str) -> Subject:
    """Load a recorded subject, and verify its weights and samples."""
    from nlbench.introspection.precision import resolve_device
    from nlbench.subjects.load import load_subject

    if facts.data == "given":
        raise RequestError(
            f"{facts.model} was passed to nlbench.evaluate, which keeps no networks to load again; "
            "measure it with nlbench run"
        )
    spec = SubjectSpec(
        facts.model,
        facts.weights,
        facts.data,
        facts.seed,
        samples=facts.samples,
        split=facts.split or "test",
        options=tuple(sorted((facts.data_options or {}).items())),
        arguments=tuple(sorted((facts.arguments or {}).items())),
    )
    subject = load_subject(_restore_path(spec, run), resolve_device(device))
    for what, noun in (("weights_hash", "weights"), ("sample_hash", "samples")):
        recorded = getattr(facts, what)
        if recorded and recorded != getattr(subject.facts, what):
            raise RequestError(
                f"{label_subject(facts)}: its {noun} have changed since they were recorded"
            )
    return subject


def _restore_path(spec: SubjectSpec, run: Run) -> SubjectSpec:
    """Replace a checkpoint's label, which is recorded, by its path, which was requested."""
    from nlbench.subjects.weights_choice import FRESH_WEIGHTS, choose_weights

    if spec.weights in (*FRESH_WEIGHTS, "trained"):
        return spec
    for path in (run.manifest.get("request") or {}).get("weights") or ():
        requested = replace(spec, weights=str(path))
        with suppress(RequestError):
            if choose_weights(requested).label == spec.weights:
                return requested
    return spec


def _features(
    subject: Subject, options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    """Observe the outputs of all places on the same rows. Return them and the rows' groups."""
    from nlbench.introspection.distinct_rows import DistinctRows
    from nlbench.probes.sites.site import SiteBatch
    from nlbench.probes.sites.sites_observation import observe_sites

    inputs = subject.inputs[:MAX_ROWS]
    chosen = {name: options[name] for name in ("of", "skip", "reduction", "select", "attention")}
    places: list[str] = []
    observe_sites(subject.model, [inputs[:2]], lambda batch: places.append(batch.place), **chosen)
    if not places:
        raise Undefined("the network calls no known activation function")
    # Maximum size of the Gram matrices of a network; rows are left out where it has many places.
    rows = min(MAX_ROWS, math.isqrt(2**28 // (8 * len(places))))
    inputs = inputs[:rows]
    has_tokens = options["rows"] != "samples" and (
        options["rows"] != "auto" or not str(options["of"]).startswith(("activations", "modules:"))
    )
    policy = f"tokens:{max(1, rows // len(inputs))}" if has_tokens else "samples"
    numbers = DistinctRows().add(inputs.cpu().flatten(1)).index
    observed: dict[str, tuple[Tensor, Tensor]] = {}

    def add(batch: SiteBatch) -> None:
        sample_index = batch.sample_index
        input_index = numbers if sample_index is None else numbers[sample_index.cpu()]
        observed[batch.place] = batch.y[:rows].detach().cpu().clone(), input_index[:rows]

    observe_sites(
        subject.model, [inputs], add, rows=policy, memory=None, feasible_sizes={}, **chosen
    )
    # Places with other rows than most, such as one call for some of the samples, can't be compared.
    lengths = [len(values) for values, _ in observed.values()]
    usual = max(set(lengths), key=lengths.count)
    kept = {place: pair for place, pair in observed.items() if len(pair[0]) == usual}
    input_index = next(iter(kept.values()))[1]
    features = {place: values for place, (values, _) in kept.items()}
    return features, group_index(input_index.numpy())
