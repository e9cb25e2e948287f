import re
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torchvision import models

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.datasets.items import read_image
from nlbench.models.networks.libraries import NAMES
from nlbench.plan import make_plan
from nlbench.request import Request
from nlbench.subjects.data import Dataset
from nlbench.subjects.load import build_model
from nlbench.subjects.model import model_info
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights import load_weights, save_weights
from nlbench.subjects.weights_choice import choose_weights

ONE_A_FAMILY = {
    "alexnet": 63,
    "convnext_tiny": 32,
    "densenet121": 29,
    "googlenet": 15,
    "inception_v3": 75,
    "mobilenet_v3_small": 1,
    "regnet_y_400mf": 1,
    "squeezenet1_0": 21,
    "squeezenet1_1": 17,
    "swin_t": 4,
    "swin_v2_t": 4,
    "vgg11": 32,
    "vit_b_32": 32,
}


def data_of(shape, classes=5):
    return Dataset("made-up", [], [], shape, classes, (), (), "none")


def build(name, **arguments):
    return registry.load("models", f"torchvision/{name}")(**arguments)


def test_names_written_down_are_those_that_torchvision_lists():
    assert sorted(NAMES) == sorted(models.list_models(module=models))
    assert len(set(NAMES)) == 80


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5"])
def test_network_is_torchvisions_own_with_the_datasets_classes(name):
    ours = build_model(f"torchvision/{name}", data_of((3, 32, 32)), seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = models.get_model(name, weights=None, num_classes=5)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert ours(x).shape == (2, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_the_stated_minimum_resolution_works(name):
    smallest = ONE_A_FAMILY[name]
    # RegNet computes its widths with tensors.
    device = "cpu" if name.startswith("regnet") else "meta"
    with torch.device(device), torch.no_grad():
        network = build(name, num_classes=5, image_size=smallest).eval()
        assert network(torch.rand(1, 3, smallest, smallest)).shape == (1, 5)
        if smallest > 1 and not name.startswith("vit"):
            with pytest.raises(RuntimeError):
                network(torch.rand(1, 3, smallest - 1, smallest - 1))


@pytest.mark.parametrize("name", [n for n, smallest in ONE_A_FAMILY.items() if smallest > 4])
def test_a_smaller_resolution_is_refused(name):
    smallest = ONE_A_FAMILY[name]
    with pytest.raises(RequestError) as caught:
        build_model(f"torchvision/{name}", data_of((3, smallest - 1, smallest - 1)), seed=0)
    assert str(caught.value).startswith(f"torchvision/{name} for made-up: ")
    assert "\n" not in str(caught.value)


def test_vision_transformer_is_built_for_the_datasets_resolution():
    with torch.device("meta"):
        network = build("vit_b_16", num_classes=5, image_size=48)
    assert network.encoder.pos_embedding.shape[1] == 3 * 3 + 1


@pytest.mark.parametrize(
    ("name", "multiple"), [("vit_b_16", 16), ("vit_h_14", 14), ("maxvit_t", 224)]
)
def test_side_that_patches_do_not_fill_is_refused(name, multiple):
    with pytest.raises(RequestError):
        build(name, image_size=multiple + 1)


def test_inception_returns_only_logits_in_training():
    with torch.device("meta"):
        network = build("inception_v3", num_classes=5, image_size=75).train()
        assert network(torch.rand(2, 3, 75, 75)).shape == (2, 5)


@pytest.mark.parametrize("shape", [(1, 32, 32), (2,)])
def test_data_without_three_channels_raise(shape):
    with pytest.raises(RequestError):
        build_model("torchvision/resnet18", data_of(shape), seed=0)


@pytest.mark.parametrize("name", ["mnasnet0_5", "squeezenet1_1"])
def test_a_checkpoint_of_torchvision_is_loaded(name, tmp_path):
    theirs = models.get_model(name, weights=None, num_classes=5)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = build(name, num_classes=5)
    load_weights(ours, tmp_path / "weights.pth", rename=model_info(build_of(name)).rename)
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def build_of(name):
    return registry.load("models", f"torchvision/{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_classifiers_are_skipped(name, tmp_path):
    theirs = models.get_model(
        name, weights=None, num_classes=5, init_weights=False, aux_logits=True
    )
    save_weights(tmp_path / "weights.safetensors", theirs, {})
    ours = build(name, num_classes=5)
    rename = model_info(build_of(name)).rename
    load_weights(ours, tmp_path / "weights.safetensors", rename=rename)
    x = torch.rand(1, 3, 75, 75)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_names_of_old_densenet_checkpoints_are_understood():
    rename = model_info(build_of("densenet121")).rename
    old = "features.denseblock1.denselayer1.norm.1.running_mean"
    assert rename(old) == "features.denseblock1.denselayer1.norm1.running_mean"
    with torch.device("meta"):
        keys = build("densenet121").state_dict()
    inverse = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): key for key in keys}
    assert {rename(key) for key in inverse} == set(keys)


def test_old_vision_transformer_checkpoints_are_loaded():
    rename = model_info(build_of("vit_b_16")).rename
    with torch.device("meta"):
        keys = set(build("vit_b_16").state_dict())
    prefix = "encoder.layers.encoder_layer_3.mlp"
    assert rename(f"{prefix}.linear_1.weight") == f"{prefix}.0.weight"
    assert rename(f"{prefix}.linear_2.bias") == f"{prefix}.3.bias"
    assert {f"{prefix}.0.weight", f"{prefix}.3.bias"} <= keys
    assert {rename(key) for key in keys} == keys


def test_missing_weights_are_reported_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    spec = SubjectSpec("torchvision/resnet18", "trained", "imagenet")
    with pytest.raises(RequestError) as caught:
        choose_weights(spec)
    message = str(caught.value)
    url = models.ResNet18_Weights.DEFAULT.url
    assert str(tmp_path / "weights" / url.rpartition("/")[2]) in message
    assert url in message
    assert "\n" not in message


def test_trained_weights_are_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    file.write_bytes(b"something")
    for weights in ("trained", "auto"):
        choice = choose_weights(SubjectSpec("torchvision/resnet18", weights, "imagenet"))
        assert (choice.label, choice.file) == ("trained", file)


def preprocessing_of(name):
    return str(models.get_model_weights(name).DEFAULT.transforms())


@pytest.mark.parametrize("name", {preprocessing_of(name): name for name in NAMES}.values())
def test_the_preprocessing_is_that_of_the_default_weights(name, tmp_path):
    weights = models.get_model_weights(name).DEFAULT
    pixels = torch.randint(0, 256, (300, 420, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "image.png")
    used = model_info(build_of(name)).preprocessing(None)
    data = Dataset("one", [], [], (3, 1, 1), 1, used.mean, used.std, "")
    ours = data.normalize(read_image(tmp_path / "image.png", used))
    with Image.open(tmp_path / "image.png") as image:
        expected = weights.transforms()(image)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    # Networks with equal entries in torchvision have equal preprocessing.
    for other in NAMES:
        if preprocessing_of(other) == preprocessing_of(name):
            found = model_info(build_of(other)).preprocessing(None)
            assert replace(found, origin=used.origin) == used, other


def test_the_preprocessing_follows_the_file_of_other_weights():
    first = models.ResNet50_Weights.IMAGENET1K_V1
    info = model_info(build_of("resnet50"))
    file = choose_file(first)
    assert info.preprocessing(file).resize == 256
    assert info.preprocessing(None).resize == 232


def choose_file(weights):
    from pathlib import Path

    return Path(weights.url.rpartition("/")[2])


def test_renormalising_networks_get_equal_images(tmp_path):
    weights = models.GoogLeNet_Weights.IMAGENET1K_V1
    Image.new("RGB", (256, 256), (200, 30, 90)).save(tmp_path / "image.png")
    used = model_info(build_of("googlenet")).preprocessing(choose_file(weights))
    data = Dataset("one", [], [], (3, 1, 1), 1, used.mean, used.std, "")
    ours = data.normalize(read_image(tmp_path / "image.png", used))
    with torch.device("meta"):
        theirs = models.googlenet(weights=None, init_weights=False, transform_input=True)
    with Image.open(tmp_path / "image.png") as image:
        given = weights.transforms()(image)[None]
    torch.testing.assert_close(ours[None], theirs._transform_input(given), rtol=1e-5, atol=1e-5)


def test_missing_weights_are_initialised_with_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    choice = choose_weights(SubjectSpec("torchvision/resnet18", "auto", "imagenet"))
    assert (choice.label, choice.file) == ("init", None)
    assert choice.note.startswith("torchvision/resnet18 is freshly initialised: the weights of")
    assert choose_weights(SubjectSpec("torchvision/resnet18", "auto", "digits")).note == ""


def test_a_plan_warns_once_of_missing_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    (tmp_path / "imagenet" / "val").mkdir(parents=True)
    warnings = []
    request = Request(("r2",), ("torchvision/resnet18",), ("imagenet",), seeds=(0, 1))
    plan = make_plan(request, "cpu", warnings.append)
    assert [cell.subject.label for cell in plan.cells] == ["init", "init"]
    assert len(warnings) == 1
    assert "is freshly initialised" in warnings[0]
