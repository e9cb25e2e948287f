"""Figures of studies."""

import re

import matplotlib.style
import pytest

from nlbench.reports.drawing import STYLE, to_svg
from nlbench.studies.framework.figures import page_figure, use_plain_log_labels


@pytest.mark.parametrize("values", [(1e-4, 20.0, 3e6), (1.5, 4.0, 8.0)])
def test_logarithmic_axes_have_plain_numbers(values):
    with matplotlib.style.context(["default", STYLE]):
        figure, (left, right) = page_figure(2.0, columns=2)
        left.loglog(values, values)
        right.plot(values, values)
        right.set_xscale("log", base=2)
        assert "mathdefault" in to_svg(figure, prefix="a", title="raw")
        use_plain_log_labels(figure)
        svg = to_svg(figure, prefix="a", title="plain")
        assert "mathdefault" not in svg
        assert re.search(">(3|1)<", svg)


def test_narrow_logarithmic_axis_has_labels():
    with matplotlib.style.context(["default", STYLE]):
        figure, panels = page_figure(2.0, columns=5)
        panels[-1].barh([0, 1], [0.012, 11])
        panels[-1].set_xscale("log")
        use_plain_log_labels(figure)
        figure.canvas.draw()
        low, high = panels[-1].get_xlim()
        shown = [
            t.get_text() for t in panels[-1].get_xticklabels() if low < t.get_position()[0] < high
        ]
    assert sum(map(bool, shown)) >= 2
