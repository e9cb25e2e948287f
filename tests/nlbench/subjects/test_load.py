from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import PluginError, RequestError
from nlbench.options import Option
from nlbench.serialization.hashing import state_hash, tensor_hash
from nlbench.subjects.data import Dataset, Preprocessing, Sample, dataset
from nlbench.subjects.load import build_model, load_dataset, load_subject
from nlbench.subjects.model import model
from nlbench.subjects.samples import HEAD_SAMPLES, Batches, draw, rebatched, sample_facts
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights import save_weights
from nlbench.subjects.weights_choice import choose_weights

CPU = torch.device("cpu")


@pytest.fixture
def plugins(monkeypatch):
    """Models and datasets of the test's own, beside the registered ones."""
    found = {}
    load = registry.load
    monkeypatch.setattr(
        registry,
        "load",
        lambda group, name: found[group, name] if (group, name) in found else load(group, name),
    )
    return found


def data_of(shape, classes=3, count=6):
    images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))
    items = TensorDataset(images, torch.arange(count) % classes)
    return Dataset("made-up", items, items, shape, classes, (), (), "none")


def test_options_reach_the_dataset_converted():
    data = load_dataset("random", {"shape": "1x8x8", "size": "5"})
    assert data.shape == (1, 8, 8)
    assert len(data.test) == 5


def test_non_dataset_raises(plugins):
    plugins["datasets", "odd"] = lambda: 3
    with pytest.raises(PluginError):
        load_dataset("odd")


def test_objects_with_a_datasets_attributes_are_accepted(plugins):
    class Words:
        name, shape, classes, preprocessing, source = "words", (4,), 7, "none", Source("")

        def normalize(self, inputs):
            return inputs

        def sample(self, count, *, split="test", seed=0):
            words = torch.arange(4 * 5).reshape(5, 4) % 7
            return Sample(words, words, None)

    plugins["datasets", "words"] = Words
    plugins["models", "embedding"] = lambda num_classes=2: nn.Embedding(num_classes, 3)
    subject = load_subject(SubjectSpec("embedding", "init", "words", samples=None), CPU)
    assert subject.inputs.shape == (5, 4)
    assert subject.images is subject.labels is None


@pytest.mark.parametrize(
    ("builder", "shape", "given"),
    [
        (lambda in_channels, num_classes, image_size: None, (1, 8, 8), (1, 3, 8)),
        (lambda input_shape: None, (5,), ((5,),)),
        (lambda input_shape, in_channels=4: None, (5,), ((5,),)),
        (lambda num_classes: None, (5, 6), (3,)),
        (lambda: None, (5, 6), ()),
    ],
)
def test_builder_gets_the_arguments_that_it_accepts(plugins, builder, shape, given):
    def build(*args, **kwargs):
        raise AssertionError

    import inspect

    seen = []

    def recording(**arguments):
        seen.append(
            tuple(
                arguments[name]
                for name in inspect.signature(builder).parameters
                if name in arguments
            )
        )
        return nn.Identity()

    recording.__signature__ = inspect.signature(builder)
    plugins["models", "mine"] = recording
    build_model("mine", data_of(shape), seed=0)
    assert seen == [given]


@pytest.mark.parametrize("builder", [lambda in_channels=3: None, lambda image_size=8: None])
def test_image_networks_refuse_vectors_in_one_line(plugins, builder):
    plugins["models", "mine"] = builder
    with pytest.raises(RequestError) as caught:
        build_model("mine", data_of((5,)), seed=0)
    assert str(caught.value) == "mine takes images, but inputs in made-up have shape (5,)"


def test_a_network_for_square_images_refuses_others(plugins):
    plugins["models", "mine"] = lambda image_size=8: None
    with pytest.raises(RequestError):
        build_model("mine", data_of((3, 4, 6)), seed=0)


def test_refusals_of_builders_name_model_and_data():
    with pytest.raises(RequestError, match=r"^vgg8 for made-up"):
        build_model("vgg8", data_of((3, 8, 8)), seed=0)


def test_building_keeps_the_global_random_state():
    before = torch.get_rng_state()
    build_model("redshift-mlp", data_of((2,)), seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_preprocessing_of_the_weights_is_used_if_possible(plugins, tmp_path):
    def preprocessing(path):
        side = 8 if path is None else 16
        return Preprocessing(side, side, (0.5,) * 3, (0.25,) * 3)

    @model(preprocessing=preprocessing)
    def mine(num_classes=2):
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))

    @dataset(options={"side": Option(4)})
    def adaptable(side):
        def adapt(wanted):
            shape = (3, wanted.crop, wanted.crop)
            items = TensorDataset(torch.rand(6, *shape), torch.arange(6) % 2)
            return Dataset("a", items, items, shape, 2, wanted.mean, wanted.std, "p", adapt=adapt)

        return adapt(Preprocessing(side, side, (), ()))

    plugins["models", "mine"] = mine
    plugins["datasets", "adaptable"] = adaptable
    save_weights(tmp_path / "w.safetensors", mine(), {})
    fresh = load_subject(SubjectSpec("mine", "init", "adaptable"), CPU)
    given = load_subject(SubjectSpec("mine", str(tmp_path / "w.safetensors"), "adaptable"), CPU)
    assert fresh.inputs.shape[-1] == 8
    assert given.inputs.shape[-1] == 16
    torch.testing.assert_close(given.inputs, (given.images - 0.5) / 0.25)


def test_models_translate_names_in_checkpoints(plugins, tmp_path):
    @model(rename=lambda name: None if name.startswith("extra") else name.replace("old", "0"))
    def mine():
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    network = nn.Module()
    network.add_module("1", nn.Linear(16, 3))
    network.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    save_weights(tmp_path / "w.safetensors", network, {})
    plugins["models", "mine"] = mine
    plugins["datasets", "flat"] = lambda: data_of((4, 4))
    subject = load_subject(SubjectSpec("mine", str(tmp_path / "w.safetensors"), "flat"), CPU)
    assert torch.equal(subject.model[1].weight, getattr(network, "1").weight)


def test_missing_trained_checkpoint_raises(plugins, tmp_path):
    @model(trained={"digits": tmp_path / "gone.pth"}, obtain="fetch it")
    def mine():
        return nn.Identity()

    plugins["models", "mine"] = mine
    with pytest.raises(RequestError) as caught:
        choose_weights(SubjectSpec("mine", "trained", "digits"))
    assert str(caught.value) == (
        f"the weights of mine on digits are missing: no {tmp_path / 'gone.pth'}; fetch it"
    )
    assert choose_weights(SubjectSpec("mine", "auto", "digits")).label == "init"


def test_options_are_among_the_facts():
    options = (("difficulty", 0.25), ("image_size", 8))
    spec = SubjectSpec("resnet20", "init", "synthetic", samples=4, options=options)
    facts = load_subject(spec, CPU).facts
    assert facts.data_options == {"difficulty": 0.25, "image_size": 8}
    assert "difficulty 0.25" in facts.preprocessing


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        return x.flatten(1) @ self.weight


@pytest.mark.parametrize("count", [None, 1100, 1])
def test_large_sample_becomes_a_stream(count):
    data, network = data_of((1, 4, 4), count=1300), Linear()
    given = {"split": "test", "seed": 2, "model": network}
    (whole, nothing), (head, stream) = (
        draw(data, count, **given),
        draw(data, count, max_bytes=0, **given),
    )
    assert nothing is None
    assert isinstance(stream, Batches)
    n = count or 1300
    assert len(whole.inputs) == stream.samples == stream.known_length == n
    for _ in range(2):  # it can be gone through again
        assert torch.equal(torch.cat(list(stream)), whole.inputs)
    assert sample_facts(head.inputs, stream) == sample_facts(whole.inputs)
    assert sample_facts(whole.inputs)["sample_hash"] == tensor_hash(whole.inputs)
    held = len(head.inputs)
    assert held == min(n, HEAD_SAMPLES)
    assert torch.equal(head.inputs, whole.inputs[:held])
    assert torch.equal(head.labels, whole.labels[:held])


def test_a_stream_has_the_precision_of_its_model():
    data, network = data_of((1, 4, 4), count=300), Linear()
    _, stream = draw(data, None, split="test", seed=0, model=network, max_bytes=0)
    network.double()
    assert {batch.dtype for batch in stream} == {torch.float64}


def test_samples_that_change_between_passes_are_refused():
    class Drifting(TensorDataset):
        drift = 0.0

        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image + self.drift, label

    data = data_of((1, 4, 4), count=300)
    items = Drifting(*data.test.tensors)
    data = replace(data, test=items)
    _, stream = draw(data, None, split="test", seed=0, model=Linear(), max_bytes=0)
    for _ in rebatched(stream, 64, 300):
        pass
    items.drift = 1e-6
    with pytest.raises(RequestError):
        for _ in rebatched(stream, 64, 300):
            pass


def test_streamed_subjects_have_the_scores_in_memory(plugins, monkeypatch):
    from nlbench.execution.probe_pass import Pass
    from nlbench.measures.r2 import R2
    from nlbench.probes import Resources
    from nlbench.probes.sites import SITES
    from nlbench.subjects import samples

    plugins["models", "mine"] = lambda: nn.Sequential(Linear(), nn.ReLU())
    plugins["datasets", "flat"] = lambda: data_of((1, 4, 4), count=1300)
    defaults = {name: option.default for name, option in SITES.options.items()}
    options = {name: option.default for name, option in R2.options.items()}
    values = []
    for max_bytes in (2**30, 0):
        monkeypatch.setattr(samples.draw, "__kwdefaults__", {"max_bytes": max_bytes})
        subject = load_subject(SubjectSpec("mine", "init", "flat", samples=None), CPU)
        assert (subject.stream is None) == bool(max_bytes)
        one_pass = Pass(subject, "sites", defaults, Resources(CPU))
        (outcome,) = one_pass.observe([(R2, options, "")])
        values.append((outcome.result.summary, outcome.result.n))
    assert values[0] == values[1]
    assert values[0][1] == 1300


class Lazy(nn.Sequential):
    """Knows its inputs' shape only once it has seen some."""

    def __init__(self, num_classes=3):
        super().__init__(
            nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(),
            nn.LazyLinear(num_classes),
        )  # fmt: skip


def test_lazy_networks_get_weights_from_the_seed(plugins):
    plugins["models", "lazy"] = Lazy
    data = data_of((1, 6, 6))
    state = torch.random.get_rng_state()
    first, again, other = (build_model("lazy", data, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first[4].weight.shape == (3, 4 * 16)
    assert state_hash(first) == state_hash(again) != state_hash(other)
    assert first.training
    assert first[1].training
    assert int(first[1].num_batches_tracked) == 0


def test_lazy_networks_are_loaded_and_trained(plugins, tmp_path):
    plugins["models", "lazy"] = Lazy
    plugins["datasets", "tiny"] = lambda: data_of((1, 6, 6), count=12)
    saved = build_model("lazy", data_of((1, 6, 6)), 3)
    save_weights(tmp_path / "lazy.safetensors", saved, {})
    spec = SubjectSpec("lazy", str(tmp_path / "lazy.safetensors"), "tiny", samples=None)
    assert load_subject(spec, CPU).facts.weights_hash == state_hash(saved)
    from nlbench.models.training.train import run_training
    from nlbench.models.training.training_request import TrainingRequest

    request = TrainingRequest("lazy", "tiny", "vanilla", changes={"epochs": 1}, device="cpu")
    assert run_training(request, tmp_path / "trained.safetensors").epochs == 1


class Counting(nn.Module):
    """Counts the samples that it was run on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return x.flatten(1)[:, :3] * self.weight


def test_loading_a_subject_runs_nothing(plugins):
    plugins["models", "counting"] = Counting
    plugins["datasets", "flat"] = lambda: data_of((1, 4, 4), count=300)
    subject = load_subject(SubjectSpec("counting", "init", "flat", samples=None), CPU)
    assert subject.model.seen == 0
    assert subject.facts.samples == 300
