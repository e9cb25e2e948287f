"""Parsing of checkpoint names into training run, step and seed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from nlbench.parsers import parse_index

_SUFFIX = re.compile(r"\.(safetensors|pth?|bin|ckpt|training)(?=/|$)")
_SEED = re.compile(r"(?:^|(?<=/)|[-_. ])seed[-_= ]?(\d+)(?!\d)", re.IGNORECASE)
_STEP = re.compile(
    r"(?<![a-z])(epoch|step|iteration|iter|update|checkpoint|ckpt)[-_= ]?(\d+)(?!\d|\.\d)",
    re.IGNORECASE,
)
_UNITS = {"iter": "iteration", "checkpoint": "step", "ckpt": "step"}


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A step of a training run, parsed from a name.

    Parameters
    ----------
    training : str
        The name without its step and seed; often empty.
    unit : str
        ``epoch``, ``step``, ``iteration`` or ``update``.
    """

    training: str
    unit: str
    step: int

    def __str__(self) -> str:
        """Return the step with its unit."""
        return f"{self.unit} {self.step:,}"


def split_seed(weights: str) -> tuple[str, int | None]:
    """Split the name of weights into the name without its seed, and the training seed.

    Examples
    --------
    >>> split_seed("random-0.5-seed0"), split_seed("vgg8-seed12/epoch3.pt"), split_seed("init")
    (('random-0.5', 0), ('vgg8/epoch3.pt', 12), ('init', None))
    """
    match = _SEED.search(weights)
    seed = parse_index(match[1]) if match else None
    return (weights, None) if seed is None else (_SEED.sub("", weights).lstrip("-_. /"), seed)


@cache
def parse_checkpoint(weights: str) -> Checkpoint | None:
    """Parse a training step from the name of weights. Return None if it contains none.

    Examples
    --------
    >>> parse_checkpoint("noisy-seed3/epoch0010.safetensors")
    Checkpoint(training='noisy', unit='epoch', step=10)
    >>> str(parse_checkpoint("epoch=3-step=1200.ckpt")), str(parse_checkpoint("step 2000"))
    ('epoch 3', 'step 2,000')
    >>> parse_checkpoint("omega0.003-seed0.safetensors"), parse_checkpoint("trained")
    (None, None)
    """
    name = _SUFFIX.sub("", split_seed(weights)[0])
    step = parse_index(name)
    if step is not None:
        return Checkpoint("", "step", step)
    match = _STEP.search(name)
    step = parse_index(match[2]) if match else None
    if match is None or step is None:
        return None
    unit = match[1].lower()
    training = re.sub(r"[-_. ]*/[-_. ]*", "/", _STEP.sub("", name)).strip("-_. /")
    return Checkpoint(training, _UNITS.get(unit, unit), step)
