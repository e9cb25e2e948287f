"""A network's boundaries and decisions on a plane through input space, pixel by pixel.

Between two neighbouring pixels as many boundaries are drawn as units are on another piece at
the one than at the other: one pass a pixel, whatever the network. Where a unit crosses and
comes back between two pixels nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError
from nlbench.introspection.memory import halving
from nlbench.introspection.model_state import precise_device
from nlbench.introspection.precision import exact_by_default

from .estimation.estimator import Estimator, check_ends
from .estimation.patterns import Margins, Windows
from .recording.program import Step

__all__ = ["Plane", "plane"]

MARGIN = 0.3
"""How far a picture reaches beyond the points it is drawn through, as a share of their distance."""


@dataclass(frozen=True)
class Plane:
    """What a network does on a plane, at pixels.

    The point at (u, v) is ``origin + u across + v up``.

    Parameters
    ----------
    u, v : float64 tensor of shape (w,), (h,)
        Where the pixels' centres are.
    points : float64 tensor of shape (m, 2)
        Where on it the points lie that it was drawn through.
    outputs : float32 tensor of shape (h, w, k)
        The network's output at each pixel.
    right : mapping of str to int64 tensor of shape (h, w - 1)
        By site: units on another piece at the pixel to the right.
    up : mapping of str to int64 tensor of shape (h - 1, w)
        By site: units on another piece at the pixel above.
    """

    u: Tensor
    v: Tensor
    points: Tensor
    outputs: Tensor
    right: Mapping[str, Tensor]
    up: Mapping[str, Tensor]

    @property
    def decisions(self) -> Tensor:
        """The largest output's index at each pixel, int64 (h, w)."""
        return self.outputs.argmax(-1)

    def boundaries(self, sites: Sequence[str] | None = None) -> Tensor:
        """Add up what lies to the right of each pixel and above it, int64 (h, w)."""
        names = list(self.right) if sites is None else list(sites)
        total = torch.zeros(len(self.v), len(self.u), dtype=torch.int64)
        for name in names:
            total[:, :-1] += self.right[name]
            total[:-1] += self.up[name]
        return total


@exact_by_default()
def plane(
    model: nn.Module,
    points: Tensor,
    *,
    size: int | tuple[int, int] = 256,
    margin: float = MARGIN,
    dtype: torch.dtype = torch.float32,
    memory: int | None = None,
    step: Callable[[], None] = lambda: None,
) -> Plane:
    """Draw a network's boundaries on the plane through two or three points.

    Distances are true: ``across`` leads from the first point to the second, ``up`` is at right
    angles to it and of the same length, on the third point's side. Of two points it is a
    direction drawn at random, the same each time.

    Parameters
    ----------
    model : torch.nn.Module
        Piecewise affine in eval mode. It is copied, not changed.
    points : tensor of shape (2 or 3, *input)
    size : int or (int, int)
        Pixels across, or across and up.
    margin : float
        How far the picture reaches beyond the points, as a share of the first two's distance.
    dtype : torch.dtype
        What the network is computed in.
    memory : int, optional
        Bytes that may be used beside the model; by default half of what is free.
    step : callable
        Called after each row of pixels.

    Returns
    -------
    Plane

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network is not piecewise affine.
    nlbench.RequestError
        If the points don't make a plane.
    nlbench.NotFinite

    Examples
    --------
    >>> drawn = plane(torch.nn.ReLU(), torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 1.0]]), size=8)
    >>> drawn.right["relu"].sum(0).tolist()
    [0, 0, 0, 8, 0, 0, 0]
    """
    width, height = (size, size) if isinstance(size, int) else size
    if width < 2 or height < 2:
        raise RequestError(f"a plane of {width} × {height} pixels, expected at least 2 × 2")
    if len(points) not in (2, 3):
        raise RequestError(f"a plane through {len(points)} points, expected 2 or 3")
    check_ends(points[:-1], points[1:])
    device = precise_device(model, points)
    points = points.detach().to(device).double()
    origin, across, up, places = _axes(points)
    low, high = places.amin(0) - margin, places.amax(0) + margin
    u = torch.linspace(float(low[0]), float(high[0]), width, dtype=torch.float64)
    v = torch.linspace(float(low[1]), float(high[1]), height, dtype=torch.float64)
    estimator = Estimator(model, dtype, (points[0], points[1]), memory)
    with torch.inference_mode():
        rows = _Rows(estimator, width)
        points_at_once, outputs = estimator.chunk, []
        for share in v.tolist():
            inputs = (
                origin + u.to(device).reshape(-1, *[1] * origin.ndim) * across + share * up
            ).to(dtype)

            def attempt(points: int, inputs: Tensor = inputs) -> Tensor:
                return rows.add(inputs, points)

            row, points_at_once = halving(attempt, points_at_once, device)
            outputs.append(row)
            step()
    found = torch.stack(outputs).clone()
    if not torch.isfinite(found).all():
        raise NotFinite("the network's output is not finite on the plane")
    sites = estimator.piecewise.program.sites
    right = torch.stack(rows.right).permute(1, 0, 2).clone()
    above = torch.stack(rows.up).permute(1, 0, 2).clone()
    return Plane(
        u,
        v,
        places.cpu(),
        found,
        dict(zip(sites, right, strict=True)),
        dict(zip(sites, above, strict=True)),
    )


def _axes(points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give origin, axes of one length at right angles, and where the points are: (m, 2)."""
    origin, across = points[0], points[1] - points[0]
    length = torch.linalg.vector_norm(across)
    if len(points) == 3:
        aside = points[2] - origin
    else:
        generator = torch.Generator().manual_seed(0)
        aside = torch.randn(across.shape, generator=generator, dtype=torch.float64)
        aside = aside.to(points.device)
    along = (aside * across).sum() / length**2
    up = aside - along * across
    height = torch.linalg.vector_norm(up)
    if not float(length) > 0 or not float(height) > 1e-9 * float(length):
        raise RequestError("the points lie on a line, expected three that make a plane")
    places = [[0.0, 0.0], [1.0, 0.0]]
    if len(points) == 3:
        places.append([float(along), float(height / length)])
    up = up * (length / height)
    return origin, across, up, torch.tensor(places, dtype=torch.float64)


class _Rows:
    """Rows of pixels, one after another; each is compared with the one before."""

    def __init__(self, estimator: Estimator, width: int) -> None:
        self._estimator, self._width = estimator, width
        self._places = estimator.piecewise.places
        self._below: dict[tuple[int, int], Tensor] = {}
        self.right: list[Tensor] = []  # (sites, w - 1) a row
        self.up: list[Tensor] = []

    def add(self, inputs: Tensor, points: int) -> Tensor:
        """Take in a row (w, *input), so many points at once; give the outputs (w, k)."""
        count = len(self._places)
        right = torch.zeros(count, self._width, dtype=torch.int64, device=inputs.device)
        up = torch.zeros_like(right)
        is_first = not self._below
        row: dict[tuple[int, int], list[Tensor]] = {}
        start = 0

        def watch(step: Step, number: int, found: Margins | Windows) -> None:
            """Compare pixels with those to the left and those below."""
            key, place = (step.output, number), self._places[step.output]
            known = row.setdefault(key, [])
            stop = start + len(found.state)
            left = torch.cat([known[-1][-1:] if known else found.state[:1], found.state[:-1]])
            right[place, start:stop] += found.changes(left)
            if not is_first:
                up[place, start:stop] += found.changes(self._below[key][start:stop])
            known.append(found.state)

        outputs = []
        for part in torch.split(inputs, points):
            outputs.append(self._estimator.piecewise.run(part, watch).float())
            start += len(part)
        self._below = {key: torch.cat(states) for key, states in row.items()}
        if not is_first:
            self.up.append(up.cpu())
        self.right.append(right[:, 1:].cpu())
        return torch.cat(outputs).cpu()
