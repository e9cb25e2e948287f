import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.models.training.batches import augment


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moved(image, down, right):
    """One image (c, h, w) moved by whole pixels, black moving in, pixel by pixel."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[:, y, x] = image[:, y - down, x - right]
    return result


@given(seed=st.integers(0, 10**6), shift=st.integers(0, 4), flip=st.booleans())
def test_every_image_is_a_shifted_or_flipped_copy(seed, shift, flip):
    images = torch.rand(3, 2, 5, 4, generator=generator(seed))
    found = augment(images, shift, flip, generator(seed))
    assert found.shape == images.shape
    for before, after in zip(images, found, strict=True):
        copies = [
            moved(before, down, right)
            for down in range(-shift, shift + 1)
            for right in range(-shift, shift + 1)
        ]
        if flip:
            copies += [copy.flip(2) for copy in copies]
        assert any(torch.equal(after, copy) for copy in copies)


def test_shifts_are_uniform():
    images = torch.zeros(9000, 1, 9, 9)
    images[:, 0, 4, 4] = 1
    found = augment(images, 1, False, generator()).flatten(1).argmax(dim=1)
    counts = found.bincount(minlength=81).double()
    counts = counts[counts > 0]
    assert len(counts) == 9
    # χ² of 8 degrees of freedom stays below 26.1 in 999 of 1,000 cases.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 26.1


def test_half_of_the_images_are_flipped():
    images = torch.zeros(4000, 1, 1, 2)
    images[:, 0, 0, 0] = 1
    mirrored = float(augment(images, 0, True, generator())[:, 0, 0, 1].mean())
    assert abs(mirrored - 0.5) < 0.03


def test_images_of_a_batch_shift_independently():
    images = torch.rand(1, 1, 8, 8, generator=generator(1)).expand(16, 1, 8, 8)
    found = augment(images, 4, True, generator())
    assert len({tuple(image.flatten().tolist()) for image in found}) > 8


def test_zero_augmentation_changes_nothing():
    images = torch.rand(3, 1, 4, 4)
    assert torch.equal(augment(images, 0, False, generator()), images)


def test_unsupported_shapes_raise():
    with pytest.raises(RequestError):
        augment(torch.zeros(3, 4), 1, False, generator())
