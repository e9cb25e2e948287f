"""Published linearity scores of language-model blocks vs. the cost of replacing the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy import stats

from nlbench.citation import Source
from nlbench.models.zoo.catalogue import MEMBERS, Member
from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.trends import network_interval
from .framework.verdicts import in_most_networks, mean_above, mean_below, range_text
from .shared.site_scores import site_scores

DATA = "text/python"
PUBLISHED_SCORE = 0.99
RECOVERABLE = 0.99
NOT_RECOVERABLE = 0.3
"""Held-out R² of the most and the least linear MLP in one published network (Whipp 2026)."""
MAX_PERPLEXITY_COST = 0.037
"""Maximum published cost of replacing an MLP of GPT-2 Large by an affine map (Balogh 2026)."""
OVER_NETWORKS = "mean over networks with its 95% t interval, or a sign test if all are equal"
COLUMNS = {
    "published": ("linearity", "in_sample"),
    "held out": ("linearity", "value"),
    "after norm": ("linearity", "after_norm"),
    "branch": ("linearity", "branch_in_sample"),
    "branch, held out": ("linearity", "branch_value"),
    "error per token": ("linearity", "per_token"),
    "top share": ("linearity", "top_share"),
    "influence": ("influence", "value"),
    "relative change": ("influence", "relative_change"),
    "cost": ("substitution", "value"),
}
"""Measure and statistic of each column in the table of blocks."""

PREDICTORS = {
    "published": -1,
    "held out": -1,
    "after norm": -1,
    "branch, held out": -1,
    "error per token": 1,
    "influence": 1,
    "relative change": 1,
}
"""Columns used to predict the cost of a block, with the expected sign of the relation."""


@dataclass(frozen=True)
class _Subject:
    """A network and the text it is measured on.

    Parameters
    ----------
    windows, length : int
        Number and length of the windows; half of them are used to fit the maps.
    judged : int
        Maximum number of windows to evaluate the maps on; 0 for all of the other half.
    cost : {"kl", "squared"}
        ``squared`` for encoders, which have no token probabilities.
    """

    label: str
    windows: int
    length: int
    judged: int = 0
    cost: str = "kl"

    def settings(self, of: str) -> dict[str, Any]:
        return {
            "text.windows": self.windows,
            "text.length": self.length,
            "sites.of": of,
            "replacement.of": of,
            "replacement.judged": self.judged,
            # The loss is the logarithm of the perplexity.
            "substitution.cost": self.cost if of == "blocks" else "loss",
        }


GPT = "gpt-small"
SMOLLM2 = "zoo/smollm2-135m"
MLP = " mlp"
"""Key suffix for runs on MLPs."""
MLP_COLUMNS = ("published", "held out", "error per token", "top share", "cost")

SUBJECTS = {
    GPT: _Subject("small GPT", 320, 64),
    "zoo/minilm-l6": _Subject("MiniLM-L6", 160, 64, cost="squared"),
    SMOLLM2: _Subject("SmolLM2-135M", 128, 128, judged=12),
}
"""Subjects by model. SmolLM2 uses fewer evaluation windows: each takes a second per block."""

Training: TypeAlias = tuple[dict[str, int], dict[str, Any]]
TRAINING: Training = (
    {"windows": 2000, "length": 64},
    {"name": "full", "epochs": 6, "batch_size": 32},
)
QUICK_TRAINING: Training = (
    {"windows": 500, "length": 64},
    {"name": "quick", "epochs": 3, "batch_size": 16, "warmup_steps": 10},
)


class SecretlyLinear(Study):
    """Linearity of the blocks and MLPs of language models, and the cost of replacing them."""

    question = "Are Transformer blocks as linear as their published score suggests?"
    source = Source(
        "A. Razzhigaev, M. Mikhalchuk, E. Goncharova, N. Gerasimenko, I. Oseledets, D. Dimitrov "
        "and A. Kuznetsov. Your Transformer is Secretly Linear. ACL, 2024. MLPs: S. Whipp. How "
        "Linear Is a Transformer Feed-Forward Block? arXiv:2606.19379, 2026; P. Balogh. Half the "
        "Nonlinearity Is Wasted. arXiv:2603.03459, 2026."
    )
    needs = "trains 6 small GPTs; SmolLM2 and MiniLM from the zoo; neither if quick"
    minutes = 12
    quick_minutes = 0.5
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure a small GPT, trained and untrained, and the language models of the zoo."""
        zoo = [] if context.quick else [n for n in list(SUBJECTS)[1:] if not _member(n).problem]
        runs = {name: _run(context, name, ("trained",), (0,)) for name in zoo}
        if SMOLLM2 in runs:
            runs[SMOLLM2 + MLP] = _run(context, SMOLLM2, ("trained",), (0,), "mlp")
        seeds = context.seeds_or(6)
        data, recipe = QUICK_TRAINING if context.quick else TRAINING
        checkpoints = [
            context.request_training(GPT, DATA, "auto", seed, options=data, **recipe)
            for seed in seeds
        ]
        for of in ("blocks", "mlp"):
            _run(context, GPT, tuple(map(str, checkpoints)), (0,), of)
        drawn = {
            GPT + MLP * (of == "mlp"): _run(context, GPT, ("init",), seeds, of)
            for of in ("blocks", "mlp")
        }
        return {**drawn, **runs}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the order of the blocks by each score with their order by cost."""
        tables = {
            key: place_table(run, MLP_COLUMNS if key.endswith(MLP) else tuple(COLUMNS))
            for key, run in runs.items()
        }
        block_tables = [table for key, table in tables.items() if not key.endswith(MLP)]
        mlp_tables = [table for key, table in tables.items() if key.endswith(MLP)]
        blocks = pd.concat(block_tables, ignore_index=True)
        mlps = pd.concat(mlp_tables, ignore_index=True)
        pairs = pair_table(blocks)
        trained = blocks[blocks.state == "trained"]
        verdicts = []
        for label, rows in trained.groupby("network", sort=False):
            verdicts += [
                _is_near_one(str(label), rows, "published", f"{PUBLISHED_SCORE}"),
                _is_near_one(str(label), rows, "after norm", ""),
                _branch_is_less_linear(str(label), rows),
                _orders_blocks(str(label), rows, pairs),
            ]
        verdicts.append(_training_lowers(blocks))
        for label, rows in mlps[mlps.state == "trained"].groupby("network", sort=False):
            verdicts += _mlp_verdicts(str(label), rows)
        verdicts.append(_spread_is_learned(mlps))
        return Findings(
            verdicts,
            {"Pairs of blocks whose order by cost differs": pairs, "Blocks": blocks, "MLPs": mlps},
            {"Linearity and cost of blocks, trained": _figure(trained)},
            _remarks(runs),
            headline=[_headline(str(label), pairs) for label in trained.network.unique()],
        )


def _member(name: str) -> Member:
    return MEMBERS[name.removeprefix("zoo/")]


def _run(
    context: Context,
    model: str,
    weights: tuple[str, ...],
    seeds: tuple[int, ...],
    of: str = "blocks",
) -> Run:
    request = Request(
        ("linearity", "substitution")
        if of == "mlp"
        else ("linearity", "influence", "substitution"),
        (model,),
        (DATA,),
        weights,
        seeds,
        samples=0,
        settings=SUBJECTS[model].settings(of),
    )
    return context.run(request, model.rpartition("/")[2] + ("" if of == "blocks" else f"-{of}"))


def place_table(run: Run, columns: Sequence[str] = tuple(COLUMNS)) -> pd.DataFrame:
    """Return the selected `COLUMNS`, with one row per block or MLP of each network."""
    keys = ["model", "state", "seed", "place"]
    table = None
    for name in columns:
        scores = site_scores(run, *COLUMNS[name])[[*keys, "value"]]
        column = scores.rename(columns={"value": name})
        table = column if table is None else table.merge(column, "left", keys)
    assert table is not None
    labels = table.pop("model").map(lambda model: SUBJECTS[model].label)
    table.insert(0, "network", labels)
    return table


def pair_table(blocks: pd.DataFrame) -> pd.DataFrame:
    """Count the pairs of blocks that each score orders differently from their cost."""
    rows = []
    for (network, state), group in blocks.groupby(["network", "state"], sort=False):
        for name, sign in PREDICTORS.items():
            networks = [rows for _, rows in group.groupby("seed")]
            pairs = [pair for net in networks for pair in _turned_pairs(net, name, sign)]
            taus = _taus(group, name, sign)
            interval = np.clip(network_interval(taus), -1, 1)
            numbers = (len(pairs), sum(pairs), len(taus), np.mean(taus), *interval)
            rows.append((network, state, name, *numbers))
    columns = ["network", "state", "score", "pairs", "changed", "networks", "tau", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def _taus(places: pd.DataFrame, name: str, sign: int) -> list[float]:
    """Compute Kendall's τ between a score and the cost over the places of each network."""
    return [
        float(stats.kendalltau(sign * rows[name], rows.cost, nan_policy="omit").statistic)
        for _, rows in places.groupby("seed")
    ]


def _over_networks(values: ArrayLike, form: str = ".3f") -> str:
    """Format a mean over networks with its 95% t interval up to 1, if there is one."""
    array = np.asarray(values, dtype=np.float64)
    low, high = np.clip(network_interval(array), -1, 1)
    interval = "" if math.isnan(low) else f" ({low:{form}} to {high:{form}})"
    return f"{array.mean():{form}}{interval}"


def _turned_pairs(blocks: pd.DataFrame, name: str, sign: int) -> Iterator[bool]:
    """Yield, for each pair of blocks with a score, whether the score orders it differently."""
    scored = blocks.dropna(subset=name)
    values = zip(sign * scored[name], scored.cost, strict=True)
    for (score, cost), (other, other_cost) in combinations(list(values), 2):
        yield bool((score - other) * (cost - other_cost) < 0)


def _is_near_one(label: str, blocks: pd.DataFrame, column: str, published: str) -> Verdict:
    quantity = "stream" if column == "published" else "stream at unit length"
    means = blocks.groupby("seed")[column].mean()
    return Verdict(
        f"The {quantity} of {label} has a linearity of {PUBLISHED_SCORE} on average over blocks",
        published,
        f"{_over_networks(means)}, median {blocks[column].median():.3f}, lowest "
        f"{blocks[column].min():.3f}",
        mean_above(means, PUBLISHED_SCORE),
        f"agrees if the mean over blocks is above {PUBLISHED_SCORE}; {OVER_NETWORKS}; "
        + ("in sample" if column == "published" else "held out, after the next block's norm"),
    )


def _branch_is_less_linear(label: str, blocks: pd.DataFrame) -> Verdict:
    differences = (blocks.published - blocks.branch).groupby(blocks.seed).mean()
    fraction = float((blocks.published > blocks.branch).mean())
    return Verdict(
        f"Blocks of {label} are less linear without the residual stream",
        "less linear",
        f"by {_over_networks(differences)}, {fraction:.0%} of blocks; branches "
        f"{range_text(blocks.branch.dropna(), '.3f')}",
        mean_above(differences),
        f"in-sample linearity of the output minus the input; mean over blocks, {OVER_NETWORKS}",
    )


def _orders_blocks(label: str, blocks: pd.DataFrame, pairs: pd.DataFrame) -> Verdict:
    row = _find_row(label, "published", pairs)
    taus = _taus(blocks, "published", PREDICTORS["published"])
    return Verdict(
        f"Blocks of {label} with a higher published score cost less to replace",
        "the most linear blocks can be replaced",
        f"τ = {_over_networks(taus, '+.2f')}; {row.changed} of {row.pairs} pairs ordered "
        "differently",
        mean_above(taus),
        f"τ between the score and the cost of the best affine map, {OVER_NETWORKS}",
    )


def _find_row(label: str, score: str, pairs: pd.DataFrame) -> Any:
    mask = (pairs.network == label) & (pairs.score == score) & (pairs.state == "trained")
    return pairs[mask].iloc[0]


def _training_lowers(blocks: pd.DataFrame) -> Verdict:
    small_gpt = blocks[blocks.network == SUBJECTS[GPT].label]
    means = small_gpt.pivot_table("published", "seed", "state")
    differences = (means.trained - means.drawn).to_numpy()
    return Verdict(
        "Pretraining lowers the linearity of the stream",
        "lower",
        f"{means.drawn.mean():.4f} initialised, {means.trained.mean():.4f} trained",
        mean_below(differences),
        f"the small GPT, mean over blocks, {OVER_NETWORKS}",
    )


def _mlp_verdicts(label: str, mlps: pd.DataFrame) -> list[Verdict]:
    """Compare the MLPs of a network with published results for other networks."""
    networks = [rows for _, rows in mlps.groupby("seed")]
    scores = [rows["held out"].to_numpy() for rows in networks]
    margins = [min(r2.max() - RECOVERABLE, NOT_RECOVERABLE - r2.min()) for r2 in scores]
    rises = np.concatenate([np.diff(r2) > 0 for r2 in scores])
    taus = _taus(mlps, "held out", -1)
    perplexity = np.expm1(mlps.cost)
    return [
        Verdict(
            f"MLPs of {label} range from linear to strongly nonlinear, not by depth",
            f"held-out R² above {RECOVERABLE} and below {NOT_RECOVERABLE} in one network",
            f"{range_text(mlps['held out'], '.3f')}; {rises.mean():.0%} of steps in depth rise",
            mean_above(margins),
            "mean, minimum and maximum; published for GPT-2, Pythia-160m and llama-160m (Whipp); "
            f"smaller distance of the extremes to both bounds, {OVER_NETWORKS}",
        ),
        Verdict(
            f"MLPs of {label} with a higher held-out R² cost less to replace",
            "a targeted compression signal",
            f"τ = {_over_networks(taus, '+.2f')}",
            mean_above(taus),
            f"τ with minus the change in loss caused by the best affine map (Whipp), "
            f"{OVER_NETWORKS}",
        ),
        Verdict(
            f"No MLP of {label} costs more than 3.7 % of the perplexity as an affine map",
            f"at most {MAX_PERPLEXITY_COST:.1%}",
            f"median {perplexity.median():.1%}, maximum {perplexity.max():.0%}",
            in_most_networks(perplexity.groupby(mlps.seed).max() <= MAX_PERPLEXITY_COST),
            "of GPT-2 Large; Pythia's cost more (Balogh); agrees if so in most networks, by a sign "
            "test",
        ),
    ]


def _spread_is_learned(mlps: pd.DataFrame) -> Verdict:
    small_gpt = mlps[mlps.network == SUBJECTS[GPT].label]
    spread = small_gpt.pivot_table("held out", "seed", "state", aggfunc=np.ptp)
    return Verdict(
        "Training makes the MLPs of a network differ in linearity",
        "learned, not architectural",
        f"maximum minus minimum {spread.drawn.mean():.3f} initialised, "
        f"{spread.trained.mean():.3f} trained",
        mean_above(spread.trained - spread.drawn),
        f"the small GPT, held-out R² (Whipp), {OVER_NETWORKS}",
    )


def _headline(label: str, pairs: pd.DataFrame) -> str:
    row = _find_row(label, "published", pairs)
    of_label = pairs[(pairs.network == label) & (pairs.state == "trained")]
    best = of_label.iloc[int(of_label.tau.to_numpy().argmax())]
    closest = f"; the closest order is by {best.score} ({best.changed}, τ {best.tau:+.2f})"
    return (
        f"{label}: the published score orders {row.changed} of {row.pairs} pairs of blocks "
        f"differently from the cost of replacing them (τ {row.tau:+.2f})"
        f"{closest if best.tau > row.tau else ''}."
    )


def _remarks(runs: Runs) -> list[str]:
    remarks = [
        "The cost is KL(f ‖ f_s) in nats per token with a block replaced by its best affine map, "
        "fitted and evaluated on different text; for MiniLM it is the relative squared change.",
        "The text is the source of Python's standard library, in windows without a start token.",
        "The claims are those of the papers' abstracts. Their claims about fine-tuning, gates that "
        "choose between an MLP and its map, and retrained networks are not tested. The cost of "
        "an MLP is the change in loss in nats per token.",
        "Blocks and MLPs of one network share its text and its residual stream, and are no "
        "networks: a single network decides no claim.",
    ]
    for name in list(SUBJECTS)[1:]:
        member = _member(name)
        if name in runs:
            remarks += [f"{SUBJECTS[name].label}: {member.remark}."] if member.remark else []
        else:
            reason = member.problem or "not part of the quick version"
            remarks.append(f"{SUBJECTS[name].label} was not measured: {reason}.")
    return remarks


def _figure(blocks: pd.DataFrame) -> Figure:
    first = blocks[blocks.seed == blocks.groupby("network").seed.transform("min")]
    networks = list(first.groupby("network", sort=False))
    figure, panels = page_figure(4.4, rows=2, columns=len(networks), squeeze=False, sharex="col")
    for (label, rows), (upper, lower) in zip(networks, panels.T, strict=True):
        x = np.arange(len(rows))
        for colour, name in zip(COLOURS, ("published", "held out", "after norm"), strict=False):
            upper.plot(x, rows[name], ".-", color=colour, label=name)
        lower.plot(x, rows.cost, ".", color=COLOURS[4])
        upper.set_title(label)
        lower.set(xlabel="block", yscale="log")
    panels[0, 0].set_ylabel("linearity")
    panels[1, 0].set_ylabel("cost of the best affine map")
    panels[0, 0].legend(loc="lower left")
    return figure
