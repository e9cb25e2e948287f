"""Networks that take a list of images, as detectors of objects do."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import nlbench
from nlbench.errors import RequestError
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec

BACKBONE = """
import torch
from torch import nn
from torch.nn import functional

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Linear(4, 5)

    def forward(self, images, targets=None):
        assert isinstance(images, list)
        sides = [max(image.shape[axis] for image in images) for axis in (1, 2)]
        padded = [
            functional.pad(i, (0, sides[1] - i.shape[2], 0, sides[0] - i.shape[1])) for i in images
        ]
        features = self.act(self.conv(torch.stack(padded)))
        rows = [f.flatten(1).T[f.flatten(1)[0] > 0] for f in features]
        boxes = functional.relu(self.head(torch.cat(rows))).split([len(r) for r in rows])
        return [{"boxes": box[:, :4], "scores": box[:, 4]} for box in boxes]

def collate(items): return tuple(zip(*items))

images = torch.rand(12, 3, 8, 10, generator=torch.Generator().manual_seed(3))
items = [(image, {"boxes": torch.zeros(index % 3, 4)}) for index, image in enumerate(images)]
loader = torch.utils.data.DataLoader(items, 4, collate_fn=collate)
"""


@pytest.fixture
def own():
    names = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(BACKBONE, names)
        return names["Detector"](), list(names["images"]), names["loader"]


def backbone_value(run, place):
    rows = run.scores.query("place == @place and statistic == 'value'")
    return rows["value"].item()


def activation_alone(model, images):
    """The same activation, measured as a network of its own."""
    return nlbench.evaluate(model.act, model.conv(torch.stack(images)).detach(), ["affinity"])


def test_images_of_one_size_are_samples(own):
    model, images, loader = own
    run = nlbench.evaluate(model, nlbench.Arguments(images), ["affinity"])
    assert run.records[0].subject.samples == len(images)
    expected = activation_alone(model, images)["affinity"].summary["value"]
    assert backbone_value(run, "act") == pytest.approx(expected, rel=1e-5)
    batches = nlbench.evaluate(model, loader, ["affinity"])
    assert backbone_value(batches, "act") == pytest.approx(expected, rel=1e-5)
    assert batches.records[0].subject.samples == len(images)


def test_images_of_different_sizes_are_padded(own):
    model, images, _ = own
    images = [image[:, : 5 + index % 4, : 6 + index % 5] for index, image in enumerate(images)]
    run = nlbench.evaluate(model, nlbench.Arguments(images), ["affinity"])
    padded = [functional.pad(i, (0, 10 - i.shape[2], 0, 8 - i.shape[1])) for i in images]
    expected = activation_alone(model, padded)["affinity"].summary["value"]
    assert backbone_value(run, "act") == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RequestError):
        nlbench.evaluate(model, [nlbench.Arguments(images)], ["affinity"])


def test_lists_of_features_are_not_samples():
    class Fused(nn.Module):
        def forward(self, features):
            return tuple(functional.relu(feature) for feature in features)

    features = [torch.randn(20, 4, 3), torch.randn(20, 4, 3)]
    run = nlbench.evaluate(Fused(), nlbench.Arguments(features), ["affinity"])
    assert run.records[0].subject.samples == 20


def test_a_detector_of_torchvision_has_backbone_sites():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2, padding=1), nn.ReLU())
        backbone.out_channels = 4
        model = FasterRCNN(
            backbone,
            num_classes=2,
            min_size=16,
            max_size=32,
            rpn_anchor_generator=AnchorGenerator(((8,),), ((1.0,),)),
            box_roi_pool=MultiScaleRoIAlign(["0"], output_size=2, sampling_ratio=1),
            box_detections_per_img=3,
            rpn_post_nms_top_n_test=4,
        )
        images = [torch.rand(3, 16 + 2 * (i % 3), 16 + i % 5) for i in range(10)]
    run = nlbench.evaluate(
        model, nlbench.Arguments(images), ["affinity"], settings={"sites.select": "backbone*"}
    )
    assert run["affinity"].status == "ok", run["affinity"].reason
    assert 0 < run["affinity"].summary["value"] <= 1


def test_own_detectors_are_measured_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(BACKBONE)
    spec = SubjectSpec("net.py:Detector", "init", "net.py:loader", samples=8)
    subject = load_subject(spec, torch.device("cpu"))
    assert subject.inputs.shape == (8, 3, 8, 10)
    assert subject.labels is None
    assert len(subject.model(subject.inputs)) == 8
