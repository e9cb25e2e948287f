import numpy as np
import torch

from nlbench.models.datasets.items import ByteImages


def test_bytes_are_converted_alike_together_and_alone():
    random = np.random.default_rng(0)
    arrays = random.integers(0, 256, (7, 1, 5, 5), np.uint8), np.arange(7)
    items = ByteImages(lambda: arrays, padding=1, channels=3)
    together = items.__getitems__([6, 2])
    for (image, label), index in zip(together, (6, 2), strict=True):
        expected = torch.zeros(3, 7, 7)
        expected[:, 1:6, 1:6] = torch.tensor(arrays[0][index].astype("float32") / 255)
        assert torch.equal(image, expected)
        assert torch.equal(items[index][0], expected)
        assert label == items[index][1] == index
    assert items.read_labels() == list(range(7))
