"""Random ReLU networks, ``drawn/depthD-varianceV``, for tests of theory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest, shorten
from nlbench.registry import Family
from nlbench.subjects.model import model

from .perceptrons import vector_length

if TYPE_CHECKING:
    from torch import nn

WIDTH = 32
_NAME = re.compile(r"depth([1-9][0-9]?)-variance([0-9]{1,12}(?:\.[0-9]{1,12})?)")


class Drawn(Family):
    """ReLU networks without biases, with weights from N(0, variance / fan-in)."""

    description = "ReLU networks without biases, Gaussian weights; variance 2: He initialization"

    def names(self) -> Sequence[str]:
        """Return examples of names. Other numbers are also valid."""
        return ("depth8-variance2", "depth8-variance4")

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network."""
        match = _NAME.fullmatch(name)
        if not match or float(match[2]) == 0:
            hint = nearest(name, self.names(), "drawn/")
            raise RequestError(f"there is no model 'drawn/{shorten(name)}'{hint}")
        depth = int(match[1])
        variance = float(match[2])

        def build(num_classes: int = 10, input_shape: tuple[int, ...] = (16,)) -> nn.Module:
            from torch import nn

            widths = [vector_length(input_shape), *[WIDTH] * depth]
            layers: list[nn.Module] = []
            for fan_in, width in itertools.pairwise([*widths, num_classes]):
                layer = nn.Linear(fan_in, width, bias=False)
                nn.init.normal_(layer.weight, std=math.sqrt(variance / fan_in))
                layers += [layer, nn.ReLU()]
            return nn.Sequential(*layers[:-1])

        build.__doc__ = self.describe(name)
        return model(source=Source("", "ours, for the theory of random networks"))(build)

    def describe(self, name: str) -> str:
        """Return a one-line description of a network."""
        depth, _, variance = name.removeprefix("depth").partition("-variance")
        return f"{depth} layers of {WIDTH} ReLUs without biases, weights N(0, {variance} / fan-in)"
