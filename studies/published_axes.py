"""Which axes of an activation's tensors published code averages over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.reports.agreement import kendall
from nlbench.request import Request

from .drawing import page_figure
from .published_roots import SOURCE
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["PublishedAxes"]


# Model and data, and how its activations' tensors are laid out.
NETWORKS = {
    "vgg8": ("digits", "auto", "channels first"),
    "transformer-tiny": ("number-words", "init", "tokens"),
    "torchvision/vit_b_16": ("synthetic", "init", "tokens"),
    "torchvision/convnext_tiny": ("synthetic", "init", "channels last"),
}
QUICK = ("vgg8", "transformer-tiny")
REDUCTIONS = ("spatial", "published")
SAME, OTHER = 1e-9, 0.05


class PublishedAxes(Study):
    """Affinity of networks over positions, and over the axes that published code takes."""

    question = "Does it matter that published code averages over the last axes, whatever they are?"
    source = SOURCE
    needs = "two small networks; two of torchvision, initialised"
    minutes, quick_minutes = 0.3, 0.3
    takes = ("weights",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """The same networks under both reductions."""
        runs = {}
        for reduction in REDUCTIONS:
            for model, (data, weights, _) in NETWORKS.items():
                if context.quick and model not in QUICK:
                    continue
                runs[reduction] = context.run(
                    Request(
                        ("affinity",),
                        (model,),
                        (data,),
                        (context.weights or weights if "/" in model else weights,),
                        samples=128,
                        settings={"sites.reduction": reduction, "sites.batch": 128},
                    ),
                    # Networks of other weights bear the same names in the analysis.
                    "-".join(filter(None, (reduction, context.weights))),
                )
        return runs

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare the scores site by site."""
        table = _sites(runs["spatial"]).merge(
            _sites(runs["published"]), on=["model", "site"], suffixes=(" over positions", " as "
            "published"),
        )  # fmt: skip
        right, wrong = "score over positions", "score as published"
        rows, verdicts = [], []
        for model, one in table.groupby("model", sort=False):
            layout = NETWORKS[str(model)][2]
            off = (one[right] - one[wrong]).abs()
            order = kendall(one[right], one[wrong])
            rows.append((model, layout, one[right].mean(), one[wrong].mean(), off.max(),
                         order.value))  # fmt: skip
            alike = layout == "channels first"
            verdicts.append(
                Verdict(
                    f"{model}: the published axes are those of the positions"
                    if alike
                    else f"{model}: the published axes are others, and so is the score",
                    "",
                    f"{one[right].mean():.3f} over positions, {one[wrong].mean():.3f} as "
                    f"published, mean of {len(one)} sites; off by up to {off.max():.2g}",
                    bool(off.max() <= SAME) if alike else bool(off.max() > OTHER),
                    f"{layout}; agrees where no site differs"
                    if alike
                    else f"{layout}: published code takes the mean over channels; agrees where a "
                    f"site differs by more than {OTHER}",
                )
            )
        columns = ["model", "layout", "over positions", "as published", "largest difference", "τ"]
        return Findings(
            verdicts,
            {"Mean scores": pd.DataFrame(rows, columns=columns), "Sites": table},
            {"Score of each site under both reductions": _figure(table, right, wrong)},
            [_weights(runs["spatial"])],
        )


def _weights(run: Run) -> str:
    found = {r.subject.model: r.subject.weights for r in run.records}
    said = ", ".join(f"{model} ({weights})" for model, weights in found.items())
    return f"Weights: {said}. Initialised networks show the axes as well as trained ones do."


def _sites(run: Run) -> pd.DataFrame:
    rows = [
        (record.subject.model, value.place, value.statistics["value"])
        for record in run.records
        for value in record.result.values
        if value.status == "ok"
    ]
    return pd.DataFrame(rows, columns=["model", "site", "score"])


def _figure(table: pd.DataFrame, right: str, wrong: str) -> Figure:
    import matplotlib.style

    from nlbench.reports.svg import STYLE

    with matplotlib.style.context(["default", STYLE]):
        figure, axes = page_figure(3.4)
        axes.plot([0, 1], [0, 1], color="#777777", linewidth=0.8)
        for (model, one), mark in zip(table.groupby("model", sort=False), "os^D", strict=False):
            axes.plot(one[right], one[wrong], mark, markersize=4, label=str(model))
        axes.set_xlabel("affinity over positions")
        axes.set_ylabel("as published")
        axes.legend(fontsize=7.5)
        figure.draw_without_rendering()  # lays out, once, while the style is in force
        figure.set_layout_engine("none")
    return figure
