from pathlib import Path

import pytest
import torch
from accuracies import accuracy

from nlbench.measures.absdev import absolute_deviation
from nlbench.models.datasets.digits import digits
from nlbench.models.networks.vgg import vgg8
from nlbench.models.training.tasks import corrupt_labels
from nlbench.probes.lines.lines import trace_segments
from nlbench.probes.lines.paths import closed_paths
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import load_weights

SHIPPED = Path(model_info(vgg8).trained["digits"])
NOISY = SHIPPED.with_name("vgg8-digits-noise40.safetensors")


def network(file):
    model = vgg8()
    load_weights(model, file)
    return model.eval()


def test_the_shipped_noisy_network_fits_every_corrupted_label():
    data, model = digits(), network(NOISY)
    images = torch.stack([image for image, _ in data.train])
    labels = torch.tensor([label for _, label in data.train])
    with torch.no_grad():
        found = model(data.normalize(images)).argmax(dim=1)
    assert torch.equal(found, corrupt_labels(labels, 0.4, 10, seed=0))
    assert accuracy(model, "test", data) < 0.75


@pytest.mark.slow
def test_noisy_labels_raise_the_absolute_deviation_of_every_path():
    # M. Gamba et al., AISTATS 2022, table 2: on 99 to 100 % of the paths.
    data = digits()
    images = data.sample(2, split="train", seed=0).images
    paths = data.normalize(closed_paths(images, 4, 1.0)).double()
    clean, noisy = (
        [
            float(absolute_deviation(trace).norm())
            for trace in trace_segments(network(file), paths[:, 0], paths[:, 1])
        ]
        for file in (SHIPPED, NOISY)
    )
    assert all(higher > lower for lower, higher in zip(clean, noisy, strict=True))
