"""Paths through input space for the probe `lines`, built from data."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, nearest
from nlbench.introspection.autodiff import direct_checkpoints, input_gradient
from nlbench.introspection.model_copy import precise_device

DIRECTIONS = ("random", "sign", "gradient")
"""Ways to choose the directions from a sample."""


def translations(anchors: int = 8, radius: float = 4.0) -> list[tuple[int, int]]:
    """Return whole-pixel translations (right, down) on a circle.

    Anchor k is (radius cos θ, radius sin θ) with θ = 2πk / anchors, each coordinate
    rounded to the nearest whole pixel, with ties rounded away from zero. The set is therefore
    symmetric under a sign change of either coordinate whenever the points on the circle are.

    Examples
    --------
    >>> translations()
    [(4, 0), (3, 3), (0, 4), (-3, 3), (-4, 0), (-3, -3), (0, -4), (3, -3)]
    """
    angles = [2 * math.pi * k / anchors for k in range(anchors)]
    return [(_nearest(radius * math.cos(a)), _nearest(radius * math.sin(a))) for a in angles]


def _nearest(x: float) -> int:
    # Rounding errors in the cosine may turn 2.5 into 2.4999999999999996.
    return int(math.copysign(math.floor(abs(x) + 0.5 + 1e-9), x))


def closed_paths(images: Tensor, anchors: int = 8, radius: float = 4.0) -> Tensor:
    """Build a closed path from each image by translating it around a small circle.

    The anchors, at least two, are copies of the image shifted by `translations`, with edges
    replicated and without interpolation between pixels. The first anchor is repeated at the end, so
    that segments between consecutive anchors close the loop. Normalisation commutes with
    translation. The radius is in pixels, large enough that two anchors differ, and smaller than the
    sides of the images.

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022: 8 anchors at
    4 pixels.

    Examples
    --------
    >>> closed_paths(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 9, 3, 32, 32])
    """
    _check_images(images)
    _check_anchors(anchors, radius)
    shifts = translations(anchors, radius)
    (height, width) = images.shape[-2:]
    if any(abs(right) >= width or abs(down) >= height for right, down in shifts):
        raise RequestError(
            f"a radius of {radius:g} for images of {height} × {width}: an anchor would contain "
            "only copies of the image's edge"
        )
    if len(set(shifts)) < 2:
        raise RequestError(
            f"a radius of {radius:g}: all {anchors} anchors are the same whole-pixel translation, "
            "so the paths have no length"
        )
    moved = [_translate(images, right, down) for right, down in shifts]
    return torch.stack([*moved, moved[0]], dim=1)


def open_paths(images: Tensor, anchors: int = 8, radius: float = 4.0, seed: int = 0) -> Tensor:
    """Build an open path (anchors + 1, *image) from each image through weak augmentations of it.

    The path starts at the image and visits `anchors` translated copies of it, with edges
    replicated. Each translation is drawn uniformly from the whole-pixel translations within the
    radius, excluding the previous one. The path is not closed. The translations of an image depend
    on its index, but not on the number of images after it.

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022, appendix F.

    Examples
    --------
    >>> paths = open_paths(torch.rand(2, 3, 32, 32))
    >>> paths.shape, bool((paths[:, 0] == paths[:, -1]).all())
    (torch.Size([2, 9, 3, 32, 32]), False)
    """
    _check_images(images)
    _check_anchors(anchors, radius)
    height, width = images.shape[-2:]
    limits = (min(math.floor(radius), size - 1) for size in (width, height))
    rights, downs = (range(-limit, limit + 1) for limit in limits)
    within = [(x, y) for x in rights for y in downs if math.hypot(x, y) <= radius]
    if len(within) < 2:
        raise RequestError(
            f"a radius of {radius:g} for images of {height} × {width}: there is no whole-pixel "
            "translation, expected a radius of at least 1"
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([_random_walk(image, anchors, within, generator) for image in images])


def _random_walk(
    image: Tensor, anchors: int, within: list[tuple[int, int]], generator: torch.Generator
) -> Tensor:
    index = within.index((0, 0))
    points = [image]
    # A cyclic step of 1 to n - 1 through n translations reaches each other one equally often.
    for step in torch.randint(1, len(within), (anchors,), generator=generator).tolist():
        index = (index + step) % len(within)
        points.append(_translate(image, *within[index]))
    return torch.stack(points)


def noise_paths(inputs: Tensor, number: int, anchors: int = 8, seed: int = 0) -> Tensor:
    r"""Build closed paths through uniform noise with the data's mean and standard deviation.

    Each element of an anchor is uniformly distributed on :math:`\mu \pm \sqrt{3} \sigma`, where μ
    and σ are the element's mean and standard deviation over at least two samples. The first anchor
    is repeated at the end. A path does not depend on the number of paths after it.

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022, appendix F.

    Examples
    --------
    >>> noise_paths(torch.rand(16, 3, 8, 8), number=2, anchors=4).shape
    torch.Size([2, 5, 3, 8, 8])
    """
    _check_anchors(anchors)
    _check_samples(inputs)
    if not inputs.is_floating_point():
        raise RequestError(f"inputs of dtype {inputs.dtype}, expected floats")
    data = inputs.detach().cpu().double()
    centre = data.mean(0)
    half_width = math.sqrt(3) * data.std(0, correction=0)
    generator = torch.Generator().manual_seed(seed)
    paths = []
    for _ in range(number):
        uniform = torch.rand(anchors, *centre.shape, dtype=torch.float64, generator=generator)
        points = centre + (2 * uniform - 1) * half_width
        paths.append(torch.cat([points, points[:1]]))
    return torch.stack(paths).to(inputs.dtype).to(inputs.device)


def _check_samples(inputs: Tensor) -> None:
    if inputs.ndim < 2 or len(inputs) < 2:
        raise RequestError(
            f"inputs of shape {tuple(inputs.shape)}, expected at least two samples (n, *input)"
        )


def _check_images(images: Tensor) -> None:
    if images.ndim != 4:
        raise RequestError(
            f"images of shape {tuple(images.shape)}, expected (n, channels, height, width)"
        )


def _check_anchors(anchors: int, radius: float = 0.0) -> None:
    if anchors < 2:
        raise RequestError(f"{anchors} anchors, expected at least 2")
    if not (radius >= 0 and math.isfinite(radius)):
        raise RequestError(f"a radius of {radius}, expected a finite number of at least 0")


def _translate(images: Tensor, right: int, down: int) -> Tensor:
    height, width = images.shape[-2:]
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    return images[..., rows[:, None], columns]


def pair_paths(inputs: Tensor) -> Tensor:
    """Connect samples in pairs by straight lines: 0 to 1, 2 to 3, and so on.

    If the number of samples is odd, the last one is ignored.

    Examples
    --------
    >>> pair_paths(torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])).tolist()
    [[[1.0], [2.0]], [[3.0], [4.0]]]
    """
    _check_samples(inputs)
    pairs = len(inputs) // 2
    return inputs[: 2 * pairs].reshape(pairs, 2, *inputs.shape[1:])


def direction_paths(
    inputs: Tensor,
    directions: int,
    radius: float,
    *,
    kind: str = "random",
    seed: int = 0,
    model: nn.Module | None = None,
) -> Tensor:
    """Build straight paths of equal length in several directions from each sample.

    Random directions are uniform on the sphere, ``sign`` changes all elements by the same amount,
    with random signs, and ``gradient`` goes along the gradients of the largest outputs of the
    model, in descending order. The directions from a sample depend only on its index. The radius is
    a Euclidean length in the units of the network's inputs.

    Examples
    --------
    >>> paths = direction_paths(torch.zeros(1, 4), 2, radius=3.0, kind="sign")
    >>> paths.shape, paths[:, 1].abs().unique().tolist()
    (torch.Size([2, 2, 4]), [1.5])
    """
    if not (radius > 0 and math.isfinite(radius)):
        raise RequestError(f"a radius of {radius:g} for directions, expected more than 0")
    if kind not in DIRECTIONS:
        raise RequestError(f"unknown directions '{kind}'{nearest(kind, DIRECTIONS)}")
    x = inputs.detach()
    if kind == "gradient":
        if model is None:
            raise RequestError("gradient directions need a model")
        vectors = torch.stack([_gradients(model, sample, directions) for sample in x])
    else:
        generator = torch.Generator().manual_seed(seed)
        shape = directions, *x.shape[1:]
        vectors = torch.stack(
            [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in x]
        )
        if kind == "sign":
            vectors = torch.where(vectors < 0, -1.0, 1.0)
    # (n, directions, *input)
    length = torch.linalg.vector_norm(vectors.flatten(2).double(), dim=2)
    if not bool((length > 0).all()):
        raise RequestError("a direction has length 0: the output does not depend on the input")
    scale = (radius / length).reshape(*length.shape, *[1] * (x.ndim - 1))
    start = x.to(vectors.device)[:, None].expand(-1, directions, *x.shape[1:])
    end = (start.double() + scale * vectors.double()).to(x.dtype)
    return torch.stack([start, end], 2).flatten(0, 1).to(x.device)


def _gradients(model: nn.Module, sample: Tensor, directions: int) -> Tensor:
    """Compute the gradients (directions, *input) of the largest outputs at a sample."""
    parameter = next(model.parameters(), sample)
    with torch.inference_mode(False), torch.enable_grad(), direct_checkpoints():
        x = sample.clone().to(parameter.device, parameter.dtype)[None].requires_grad_(True)
        outputs = model(x).flatten()
        if len(outputs) < directions:
            raise RequestError(
                f"{directions} gradient directions, but the network has {len(outputs)} outputs"
            )
        gradients = torch.stack(
            [
                input_gradient(output, x, retain_graph=True)[0]
                for output in outputs.topk(directions).values
            ]
        )
    return gradients.to(precise_device(model, gradients))
