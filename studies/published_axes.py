"""The axes over which the published code averages activations."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from nlbench.reports.agreement import kendall
from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import ordered, within
from .published_roots import SOURCE

# Dataset, weights, and layout of the activations' tensors, by model.
NETWORKS = {
    "vgg8": ("digits", "auto", "channels first"),
    "transformer-tiny": ("number-words", "init", "tokens"),
    "torchvision/vit_b_16": ("synthetic", "init", "tokens"),
    "torchvision/convnext_tiny": ("synthetic", "init", "channels last"),
}
QUICK = ("vgg8", "transformer-tiny")
REDUCTIONS = ("spatial", "published")
ROUNDING = 1e-9
MIN_DIFFERENCE = 0.05
OVER_POSITIONS = "score over positions"
AS_PUBLISHED = "score as published"


class PublishedAxes(Study):
    """Affinity with tensors averaged over positions or over the axes used by the published code."""

    question = "Does it matter that the published code always averages over the last axes?"
    source = SOURCE
    needs = "two small networks; two from torchvision, initialised"
    minutes = 0.3
    quick_minutes = 0.3
    takes = ("weights",)

    def measure(self, context: Context) -> Runs:
        """Measure the same networks under both reductions."""
        runs = {}
        for reduction in REDUCTIONS:
            for model, (data, weights, _) in NETWORKS.items():
                if context.quick and model not in QUICK:
                    continue
                request = Request(
                    ("affinity",),
                    (model,),
                    (data,),
                    (context.weights or weights if "/" in model else weights,),
                    samples=128,
                    settings={"sites.reduction": reduction, "sites.batch": 128},
                )
                # Networks differ only by model in the analysis, so weights need their own parts.
                part = "-".join(filter(None, (reduction, context.weights)))
                runs[reduction] = context.run(request, part)
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Compare the scores site by site."""
        table = _sites(runs["spatial"], OVER_POSITIONS).merge(
            _sites(runs["published"], AS_PUBLISHED), on=["model", "site"]
        )
        rows = []
        verdicts = []
        for model, sites in table.groupby("model", sort=False):
            layout = NETWORKS[str(model)][2]
            right = sites[OVER_POSITIONS].mean()
            wrong = sites[AS_PUBLISHED].mean()
            largest = (sites[OVER_POSITIONS] - sites[AS_PUBLISHED]).abs().max()
            tau = kendall(sites[OVER_POSITIONS], sites[AS_PUBLISHED]).value
            rows.append((model, layout, right, wrong, largest, tau))
            ours = (
                f"{right:.3f} over positions, {wrong:.3f} as published, mean over {len(sites)} "
                f"sites; off by up to {largest:.2g}"
            )
            if layout == "channels first":
                verdict = Verdict(
                    f"{model}: the published axes are those of the positions",
                    "",
                    ours,
                    within(largest, 0, ROUNDING),
                    f"{layout}; agrees if no site differs",
                )
            else:
                verdict = Verdict(
                    f"{model}: the published axes differ, and so does the score",
                    "",
                    ours,
                    ordered(MIN_DIFFERENCE, largest),
                    f"{layout}: the published code averages over channels; agrees if some site "
                    f"differs by more than {MIN_DIFFERENCE}",
                )
            verdicts.append(verdict)
        columns = ["model", "layout", "over positions", "as published", "largest difference", "τ"]
        return Findings(
            verdicts,
            {"Mean scores": pd.DataFrame(rows, columns=columns), "Sites": table},
            {"Score of each site under both reductions": _figure(table)},
            [_weights_remark(runs["spatial"])],
        )


def _weights_remark(run: Run) -> str:
    weights = {record.subject.model: record.subject.weights for record in run.records}
    listed = ", ".join(f"{model} ({name})" for model, name in weights.items())
    return f"Weights: {listed}. Initialised networks show the effect as well as trained ones."


def _sites(run: Run, column: str) -> pd.DataFrame:
    rows = [
        (record.subject.model, value.place, value.statistics["value"])
        for record in run.records
        for value in record.result.values
        if value.status == "ok"
    ]
    return pd.DataFrame(rows, columns=["model", "site", column])


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(3.4)
    axes.plot([0, 1], [0, 1], color="#777777", linewidth=0.8)
    for (model, sites), mark in zip(table.groupby("model", sort=False), "os^D", strict=False):
        axes.plot(sites[OVER_POSITIONS], sites[AS_PUBLISHED], mark, markersize=4, label=str(model))
    axes.set(xlabel="affinity over positions", ylabel="as published")
    axes.legend(fontsize=7.5)
    return figure
