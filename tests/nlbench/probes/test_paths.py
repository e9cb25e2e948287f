import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.probes.paths import closed_paths, pair_paths, translations


def shifted_by_loops(image, right, down):
    """Pixel by pixel: what was at (r, c) goes to (r + down, c + right), edges repeat."""
    result = torch.empty_like(image)
    height, width = image.shape[-2:]
    for r in range(height):
        for c in range(width):
            row = min(max(r - down, 0), height - 1)
            column = min(max(c - right, 0), width - 1)
            result[:, r, c] = image[:, row, column]
    return result


def test_the_default_anchors_lie_on_the_circle_of_four_pixels():
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


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.floats(0, 6), st.integers(1, 6), st.integers(1, 6))
def test_each_anchor_is_the_image_moved_with_its_edges_replicated(anchors, radius, height, width):
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


def test_anchors_are_the_images_values_and_nothing_else():
    # A normalisation inside the loop over anchors would change them again and again.
    images = torch.rand(1, 3, 8, 8) + 5
    paths = closed_paths(images)
    assert torch.isin(paths, images).all()
    mean, std = 5.5, 0.25
    assert torch.equal(closed_paths((images - mean) / std), (paths - mean) / std)


def test_pairs_join_neighbours_and_leave_out_an_odd_sample():
    inputs = torch.randn(5, 2, 3)
    paths = pair_paths(inputs)
    assert paths.shape == (2, 2, 2, 3)
    assert torch.equal(paths[1, 0], inputs[2])
    assert torch.equal(paths[1, 1], inputs[3])


@pytest.mark.parametrize("images", [torch.rand(3, 8, 8), torch.rand(2, 3)])
def test_images_of_another_shape_are_refused(images):
    with pytest.raises(RequestError, match="expected \\(n, channels, height, width\\)"):
        closed_paths(images)


def test_settings_out_of_range_are_refused():
    images = torch.rand(1, 1, 4, 4)
    with pytest.raises(RequestError, match="1 anchors, expected at least 2"):
        closed_paths(images, anchors=1)
    for radius in (-1.0, math.nan, math.inf):
        with pytest.raises(RequestError, match="radius"):
            closed_paths(images, radius=radius)
    with pytest.raises(RequestError, match="at least two samples"):
        pair_paths(torch.rand(1, 3))
