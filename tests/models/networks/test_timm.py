import sys

import pytest
import torch
from PIL import Image

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.datasets.items import read_image
from nlbench.subjects.data import Dataset
from nlbench.subjects.load import build_model
from nlbench.subjects.model import model_info

timm = pytest.importorskip("timm")


def data_of(shape, classes=5):
    return Dataset("made-up", [], [], shape, classes, (), (), "none")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet10t", (3, 32, 32)),
        ("resnet10t", (1, 32, 32)),
        ("vit_tiny_patch16_224", (3, 32, 32)),
        ("mobilenetv3_small_050", (3, 64, 64)),
    ],
)
def test_a_network_is_built_for_the_dataset(name, shape):
    network = build_model(f"timm/{name}", data_of(shape), seed=0).eval()
    assert network(torch.rand(2, *shape)).shape == (2, 5)


def test_weights_are_those_that_timm_draws_for_seed():
    ours = build_model("timm/resnet10t", data_of((3, 32, 32)), seed=4)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        theirs = timm.create_model("resnet10t", pretrained=False, num_classes=5)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_unsupported_resolution_is_refused():
    with pytest.raises(RequestError, match="224x224") as caught:
        build_model("timm/mixer_s32_224", data_of((3, 16, 16)), seed=0).eval()
    assert "\n" not in str(caught.value)


def test_a_glob_lists_timms_names():
    found = registry.expand("models", ["timm/vit_tiny_patch16*"])
    assert found == [f"timm/{name}" for name in sorted(timm.list_models("vit_tiny_patch16*"))]


@pytest.mark.parametrize(
    ("name", "nearest"), [("resnet10x", "'timm/resnet10t'"), ("resnet18.a1_in1", "'a1_in1'")]
)
def test_unknown_name_or_tag_suggests_the_nearest(name, nearest):
    with pytest.raises(RequestError, match=nearest):
        registry.load("models", f"timm/{name}")


def test_missing_timm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    for use in (
        lambda: registry.load("models", "timm/resnet10t"),
        lambda: registry.expand("models", ["timm/*"]),
    ):
        with pytest.raises(RequestError, match=r"nlbench\[timm\]") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto", "beit_base_patch16_224"]
)
def test_the_preprocessing_is_timms_for_its_weights(name, tmp_path):
    pixels = torch.randint(0, 256, (300, 420, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "image.png")
    used = model_info(registry.load("models", f"timm/{name}")).preprocessing(None)
    data = Dataset("one", [], [], (3, 1, 1), 1, used.mean, used.std, "")
    ours = data.normalize(read_image(tmp_path / "image.png", used))
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    with Image.open(tmp_path / "image.png") as image:
        expected = timm.data.create_transform(**config)(image)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
