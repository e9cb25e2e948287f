import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.probes.lines.paths import (
    closed_paths,
    direction_paths,
    noise_paths,
    open_paths,
    pair_paths,
    translations,
)


def shifted_by_loops(image, right, down):
    """Translate an image pixel by pixel, with its edges replicated."""
    result = torch.empty_like(image)
    height, width = image.shape[-2:]
    for r in range(height):
        for c in range(width):
            row = min(max(r - down, 0), height - 1)
            column = min(max(c - right, 0), width - 1)
            result[:, r, c] = image[:, row, column]
    return result


def test_default_anchors_lie_on_a_circle():
    expected = [(4, 0), (3, 3), (0, 4), (-3, 3), (-4, 0), (-3, -3), (0, -4), (3, -3)]
    assert translations(8, 4.0) == expected


@given(st.integers(1, 8), st.one_of(st.integers(0, 20).map(lambda k: k / 2), st.floats(0, 10)))
def test_the_anchors_are_symmetric(quarter, radius):
    points = translations(4 * quarter, radius)
    assert sorted((-x, y) for x, y in points) == sorted(points)
    assert sorted((x, -y) for x, y in points) == sorted(points)
    assert all(math.hypot(x, y) <= radius + math.sqrt(0.5) + 1e-6 for x, y in points)


def test_halves_are_rounded_away_from_zero():
    assert translations(4, 2.5) == [(3, 0), (0, 3), (-3, 0), (0, -3)]


@given(st.integers(2, 9), st.floats(1, 6), st.integers(7, 9), st.integers(7, 9))
def test_anchors_are_moved_images_with_replicated_edges(anchors, radius, height, width):
    images = torch.rand(2, 3, height, width)
    paths = closed_paths(images, anchors, radius)
    assert paths.shape == (2, anchors + 1, 3, height, width)
    for path, image in zip(paths, images, strict=True):
        for anchor, (right, down) in zip(path[:-1], translations(anchors, radius), strict=True):
            assert torch.equal(anchor, shifted_by_loops(image, right, down))


def test_a_path_ends_at_its_own_first_anchor():
    paths = closed_paths(torch.rand(3, 1, 8, 8))
    assert torch.equal(paths[:, -1], paths[:, 0])
    assert not torch.equal(paths[0, -1], paths[1, 0])


def test_anchors_contain_only_the_images_values():
    # Normalising inside the loop over anchors would change them repeatedly.
    images = torch.rand(1, 3, 8, 8) + 5
    paths = closed_paths(images)
    assert torch.isin(paths, images).all()
    mean, std = 5.5, 0.25
    assert torch.equal(closed_paths((images - mean) / std), (paths - mean) / std)


def test_pairs_join_neighbours():
    inputs = torch.randn(5, 2, 3)
    paths = pair_paths(inputs)
    assert paths.shape == (2, 2, 2, 3)
    assert torch.equal(paths[1, 0], inputs[2])
    assert torch.equal(paths[1, 1], inputs[3])


@given(st.integers(2, 9), st.floats(1, 6), st.integers(2, 6), st.integers(2, 6), st.integers(0, 99))
def test_open_paths_join_translations_of_the_image(anchors, radius, height, width, seed):
    images = torch.rand(2, 3, height, width)
    paths = open_paths(images, anchors, radius, seed)
    assert paths.shape == (2, anchors + 1, 3, height, width)
    offsets = range(-math.floor(radius), math.floor(radius) + 1)
    shifts = [(x, y) for x in offsets for y in offsets if math.hypot(x, y) <= radius]
    for path, image in zip(paths, images, strict=True):
        assert torch.equal(path[0], image)
        moved = [shifted_by_loops(image, *shift) for shift in shifts]
        assert all(any(torch.equal(anchor, image) for image in moved) for anchor in path[1:])
        assert (path.diff(dim=0).flatten(1).norm(dim=1) > 0).all()


def test_translations_within_the_radius_are_equally_likely():
    image = torch.rand(1, 1, 9, 9)
    anchors = open_paths(image, anchors=4000, radius=1.0)[0, 1:, 0, 4, 4]
    places = [(4, 4), (3, 4), (5, 4), (4, 3), (4, 5)]
    frequencies = [float((anchors == image[0, 0, y, x]).double().mean()) for x, y in places]
    assert frequencies == pytest.approx([0.2] * 5, abs=0.03)


@pytest.mark.parametrize("make", [open_paths, lambda x, seed=0: noise_paths(x, len(x), seed=seed)])
def test_the_seed_decides_drawn_paths(make):
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(make(images, seed=5), make(images, seed=5))
    assert not torch.equal(make(images, seed=5), make(images, seed=6))


def test_drawn_paths_leave_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    images = torch.ones(2, 1, 8, 8)
    open_paths(images)
    noise_paths(images, 2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_more_paths_begin_with_the_same_ones():
    images = torch.rand(5, 1, 8, 8)
    assert torch.equal(open_paths(images)[:2], open_paths(images[:2]))
    assert torch.equal(noise_paths(images, 5)[:2], noise_paths(images, 2))


def test_noise_has_each_pixels_mean_and_spread():
    images = torch.rand(40, 1, 2, 2, dtype=torch.float64) * torch.tensor([[1.0, 5.0], [0.0, 2.0]])
    images += 3
    noise = noise_paths(images, number=1, anchors=20000)[0, :-1]
    torch.testing.assert_close(noise.mean(0), images.mean(0), atol=0.05, rtol=0)
    torch.testing.assert_close(noise.std(0), images.std(0, correction=0), atol=0.02, rtol=0)
    assert float(noise[:, 0, 1, 0].max()) == 3


def test_noise_is_uniform():
    images = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    noise = noise_paths(images, number=1, anchors=20000)[0, :-1, 0]
    quantiles = torch.quantile(noise, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).double())
    edge = math.sqrt(3)
    expected = torch.tensor([-edge, -edge / 2, 0, edge / 2, edge], dtype=torch.float64)
    torch.testing.assert_close(quantiles, expected, atol=0.05, rtol=0)


def test_a_noise_path_is_closed():
    paths = noise_paths(torch.rand(4, 5), number=3, anchors=2)
    assert paths.shape == (3, 3, 5)
    assert torch.equal(paths[:, 0], paths[:, -1])


def test_noise_keeps_the_dtype():
    assert noise_paths(torch.rand(4, 5).half(), number=1).dtype == torch.float16


@pytest.mark.parametrize(
    ("images", "radius"), [(torch.rand(1, 1, 8, 8), 0.9), (torch.rand(1, 3, 1, 1), 4.0)]
)
def test_open_paths_that_cannot_move_are_refused(images, radius):
    with pytest.raises(RequestError):
        open_paths(images, radius=radius)


@pytest.mark.parametrize("kind", ["random", "sign"])
def test_directions_depend_on_position_and_radius_alone(kind):
    inputs = torch.randn(3, 2, 5)
    paths = direction_paths(inputs, 4, 2.5, kind=kind, seed=1)
    assert paths.shape == (12, 2, 2, 5)
    assert paths[:, 0].equal(inputs.repeat_interleave(4, 0))
    vectors = (paths[:, 1] - paths[:, 0]).flatten(1)
    torch.testing.assert_close(vectors.norm(dim=1), torch.full((12,), 2.5))
    assert direction_paths(inputs[:1], 4, 2.5, kind=kind, seed=1).equal(paths[:4])
    if kind == "sign":
        torch.testing.assert_close(vectors.abs(), torch.full((12, 10), 2.5 / 10**0.5))


def test_gradient_directions_climb_the_largest_outputs():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    x = torch.randn(2, 4)
    paths = direction_paths(x, 2, 1e-3, kind="gradient", model=model)
    for i in range(2):
        order = model(x[i : i + 1])[0].topk(2).indices
        for k in range(2):
            start, end = model(paths[2 * i + k])[:, order[k]].detach()
            jacobian = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], x[i])
            expected = float(jacobian[order[k]].norm())
            assert float(end - start) / 1e-3 == pytest.approx(expected, rel=1e-2)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_directions_without_length_are_refused():
    with pytest.raises(RequestError):
        direction_paths(torch.zeros(1, 3), 2, 0.0)
    constant = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(constant.weight)
    with pytest.raises(RequestError):
        direction_paths(torch.zeros(1, 3), 2, 1.0, kind="gradient", model=constant)
