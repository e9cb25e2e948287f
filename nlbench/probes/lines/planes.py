"""A network's boundaries and decisions on a plane through input space, pixel by pixel.

The number of boundaries between two neighbouring pixels is the number of units that are on
different pieces at the two, which requires one forward pass per pixel. A unit that crosses a
boundary and returns between two pixels is missed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError
from nlbench.introspection.memory import halve_on_oom
from nlbench.introspection.model_copy import precise_device
from nlbench.introspection.precision import exact_by_default

from .estimation.evaluator import Evaluator
from .estimation.patterns import Margins, Windows
from .recording.program import ProgramStep
from .segments import check_ends


@dataclass(frozen=True)
class Plane:
    """A network evaluated at the pixels of a plane.

    The point at (u, v) is ``origin + u * across + v * up``.
    """

    # u, v: float64 (w,), (h,): coordinates of the pixels' centres
    u: Tensor
    v: Tensor
    points: Tensor  # float64 (m, 2): coordinates of the points that the plane passes through
    outputs: Tensor  # float32 (h, w, k): the network's output at each pixel
    # int64 (h, w - 1) by site: number of units on a different piece at the pixel to the right.
    right: Mapping[str, Tensor]
    # int64 (h - 1, w) by site: number of units on a different piece at the pixel above.
    up: Mapping[str, Tensor]

    @property
    def decisions(self) -> Tensor:
        """Index of the largest output at each pixel, int64 (h, w)."""
        return self.outputs.argmax(-1)

    def boundaries(self, sites: Sequence[str] | None = None) -> Tensor:
        """Count boundaries right of and above each pixel, for some or all sites: int64 (h, w)."""
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
    margin: float = 0.3,
    dtype: torch.dtype = torch.float32,
    memory: int | None = None,
    step: Callable[[], None] = lambda: None,
) -> Plane:
    """Evaluate a network on the plane through two or three points.

    Distances are preserved: ``across`` is the vector from the first point to the second, ``up`` a
    perpendicular vector of the same length, on the side of the third point. With only two points,
    ``up`` is a random perpendicular vector, drawn with a fixed seed.

    Parameters
    ----------
    model : torch.nn.Module
        Piecewise affine in eval mode. It is copied, not changed.
    points : tensor of shape (2 or 3, *input)
    size : int or (int, int)
        Number of pixels in both directions, or across and up.
    margin : float
        Margin around the points, as a fraction of the distance between the first two.
    dtype : torch.dtype
        Precision of the network.
    memory : int, optional
        Memory limit in bytes, in addition to the model; by default half of the free memory.
    step : callable
        Called after each row of pixels.

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network is not piecewise affine.
    nlbench.RequestError
        If the points don't span a plane.
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
    origin, across, up, coordinates = _axes(points)
    low, high = coordinates.amin(0) - margin, coordinates.amax(0) + margin
    u = torch.linspace(float(low[0]), float(high[0]), width, dtype=torch.float64)
    v = torch.linspace(float(low[1]), float(high[1]), height, dtype=torch.float64)
    evaluator = Evaluator(model, dtype, (points[0], points[1]), memory)
    with torch.inference_mode():
        rows = _Rows(evaluator, width, height)
        batch_size = evaluator.batch_points
        for index, row_v in enumerate(v.tolist()):
            inputs = (
                origin + u.to(device).reshape(-1, *[1] * origin.ndim) * across + row_v * up
            ).to(dtype)
            attempt = functools.partial(rows.run, index, inputs)
            _, batch_size = halve_on_oom(attempt, batch_size, device)
            step()
    output = torch.stack(rows.outputs).clone()
    if not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite on the plane")
    sites = evaluator.piecewise.program.sites
    right = rows.right[..., 1:].clone()
    above = rows.up[:, 1:].clone()
    return Plane(
        u,
        v,
        coordinates.cpu(),
        output,
        dict(zip(sites, right, strict=True)),
        dict(zip(sites, above, strict=True)),
    )


def _axes(points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return origin, two orthogonal axes of equal length, and the points' coordinates (m, 2)."""
    origin = points[0]
    across = points[1] - points[0]
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
        raise RequestError("the points lie on a line, expected three that span a plane")
    coordinates = [[0.0, 0.0], [1.0, 0.0]]
    if len(points) == 3:
        coordinates.append([float(along), float(height / length)])
    up = up * (length / height)
    return origin, across, up, torch.tensor(coordinates, dtype=torch.float64)


class _Rows:
    """Rows of pixels, each compared with the one below.

    `right` and `up` (sites, h, w) count the units that differ from the pixel to the left and from
    the pixel below. `outputs` has the outputs (w, k) of each row.
    """

    def __init__(self, evaluator: Evaluator, width: int, height: int) -> None:
        self._piecewise = evaluator.piecewise
        self._site_index = self._piecewise.site_index
        self._below: dict[tuple[int, int], Tensor] = {}
        self.right = torch.zeros(len(self._site_index), height, width, dtype=torch.int64)
        self.up = torch.zeros_like(self.right)
        self.outputs: list[Tensor] = []

    def run(self, index: int, inputs: Tensor, batch_size: int) -> None:
        """Run the next row (w, *input)."""
        right = torch.zeros_like(self.right[:, 0], device=inputs.device)
        up = torch.zeros_like(right)
        row: dict[tuple[int, int], list[Tensor]] = {}
        start = 0

        def compare(step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            """Compare pixels with those to the left and those below."""
            key = (step.output, kink)
            site = self._site_index[step.output]
            states = row.setdefault(key, [])
            stop = start + len(pattern.state)
            left = torch.cat([states[-1][-1:] if states else pattern.state[:1], pattern.state[:-1]])
            right[site, start:stop] += pattern.changes(left)
            if index:
                up[site, start:stop] += pattern.changes(self._below[key][start:stop])
            states.append(pattern.state)

        outputs = []
        for part in torch.split(inputs, batch_size):
            outputs.append(self._piecewise.run(part, compare).float())
            start += len(part)
        self._below = {key: torch.cat(states) for key, states in row.items()}
        self.right[:, index], self.up[:, index] = right.cpu(), up.cpu()
        self.outputs.append(torch.cat(outputs).cpu())
