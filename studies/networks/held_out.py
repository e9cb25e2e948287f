"""The rule that draws the held-out ladders from two seeds.

Each seed was written down after recommendations of docs/benchmark.md, and no ladder was drawn
before. The second one draws as many ladders of each form as decide about most. Each ladder leads
from an affine network, at 0, to the drawn one, at 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SEEDS = (20261126, 20261129)
FIRST = tuple(f"heldout{index}" for index in range(1, 6))
SECOND = tuple(f"heldout{index}" for index in range(6, 24))
NAMES = (*FIRST, *SECOND)
FORMS = ("units", "function", "branches")
ACTIVATIONS = ("relu", "relu6", "gelu", "silu", "tanh")
DEGREES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Draw:
    """Draw of the rule for one ladder.

    Parameters
    ----------
    form : {"units", "function", "branches"}
        Units: a perceptron whose activations are (1 - t) x + t φ(x). Function: √(1 - t) x + √t g(x)
        of each input, where g is a sum of Hermite polynomials of unit variance, so that t is the
        affine residual for normal inputs. Branches: blocks x + t F(x).
    activation : str
        φ, also that of the branches.
    depth : int
        Number of hidden layers or blocks.
    width : int
    coefficients : tuple of float
        Those of the polynomials of `DEGREES`; their squares add up to 1.
    """

    form: str
    activation: str
    depth: int
    width: int
    coefficients: tuple[float, ...]

    @property
    def text(self) -> str:
        """One-line description."""
        if self.form == "function":
            terms = zip(self.coefficients, DEGREES, strict=True)
            listed = " ".join(f"{c:+.2f} h{degree}" for c, degree in terms)
            return f"√(1 - t) x + √t ({listed}) of each input"
        shape = f"{self.depth} × {self.width} units"
        what = "activations (1 - t) x + t φ(x)" if self.form == "units" else "blocks x + t F(x)"
        return f"{what}, {self.activation}, {shape}"


def draw(name: str) -> Draw:
    """Draw the ladder with one of `NAMES`.

    The forms of the second draw take turns.

    Examples
    --------
    >>> draw("heldout1") == draw("heldout1"), draw("heldout1") == draw("heldout2")
    (True, False)
    """
    is_second = name in SECOND
    generator = random.Random(f"{SEEDS[is_second]}-{name}")
    form = generator.choice(FORMS)
    if is_second:
        form = FORMS[SECOND.index(name) % len(FORMS)]
    activation = generator.choice(ACTIVATIONS)
    depth = generator.randint(1, 4)
    width = generator.choice((16, 24, 32, 48, 64))
    normal = [generator.gauss(0, 1) for _ in DEGREES]
    norm = math.hypot(*normal)
    return Draw(form, activation, depth, width, tuple(value / norm for value in normal))
