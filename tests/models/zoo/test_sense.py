"""The trained networks know what they were trained for; each test needs its package."""

import importlib.util

import numpy as np
import pytest
import torch
from scipy import signal

from nlbench.models.zoo.catalogue import MEMBERS
from nlbench.subjects.load import load_subject, model_source
from nlbench.subjects.model import default_data
from nlbench.subjects.spec import SubjectSpec


def subject(name):
    """Load a network on its own data, or skip the test if a package is missing."""
    problem = MEMBERS[name].problem
    if problem:
        pytest.skip(problem)
    model = f"zoo/{name}"
    spec = SubjectSpec(model, "trained", default_data(model))
    return load_subject(spec, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    from nlbench.models.zoo.smollm2 import load_tokenizer

    network = subject("smollm2-135m")
    words = load_tokenizer(MEMBERS["smollm2-135m"].file.path)
    tokens = words.encode("The capital of France is").ids
    assert tokens == [504, 3575, 282, 4649, 314]
    logits = network.model(torch.tensor([tokens]))
    assert words.decode([logits[0, -1].argmax().item()]) == " Paris"
    assert "Q4_1" in network.facts.weights_metadata["remark"]
    predicted = network.model(network.inputs[:4]).argmax(2)
    # A quarter of 49,152 tokens: chance would be none.
    assert (predicted == network.labels[:4]).float().mean() > 0.25


def test_q4_blocks_equal_the_gguf_library():
    quants = pytest.importorskip("gguf.quants")
    from nlbench.models.zoo.smollm2 import _dequantize

    raw = (np.arange(40) * 7).astype(np.uint8)
    for kind, size in ((3, 20), (8, 34)):
        block = raw[:size]
        expected = quants.dequantize(block[None], quants.GGMLQuantizationType(kind))[0]
        np.testing.assert_allclose(_dequantize(memoryview(block.tobytes()), kind, [32]), expected)


def test_minilm_finds_paraphrases():
    from nlbench.models.zoo.minilm import load_tokenizer

    network = subject("minilm-l6")
    words = load_tokenizer(MEMBERS["minilm-l6"].file.path)
    sentences = ["A man is eating food.", "Someone is having a meal.", "The tax law changed."]
    a, b, c = (network.model(torch.tensor([words.encode(s).ids]))[0] for s in sentences)
    assert a @ b > 0.5
    assert abs(a @ c) < 0.2


def test_minilm_ignores_padding():
    network = subject("minilm-l6")
    row = network.inputs[:1]
    padded = torch.nn.functional.pad(row, (0, 9))
    torch.testing.assert_close(network.model(row), network.model(padded), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", range(3))
def test_efficientnet_sees_a_palace_and_a_daisy(size):
    network = subject(f"efficientnet-lite{size}")
    source = model_source(SubjectSpec(f"zoo/efficientnet-lite{size}", "trained", "photographs"))
    centres = torch.stack([source.dataset.test[index][0] for index in range(2)])
    logits = network.model(source.dataset.normalize(centres))
    assert logits[0].argmax() == 698
    assert size or logits[1].argmax() == 985


@pytest.mark.parametrize("letter", ["p", "r", "o"])
def test_mtcnn_equals_its_package(letter):
    network = subject(f"mtcnn-{letter}net")
    pytest.importorskip("facenet_pytorch")
    from facenet_pytorch.models import mtcnn

    published = getattr(mtcnn, f"{letter.upper()}Net")().eval()
    *others, probabilities = published(network.inputs[:8])
    ours = network.model(network.inputs[:8])
    torch.testing.assert_close(ours[:, :2].softmax(1), probabilities.flatten(1))
    torch.testing.assert_close(ours[:, 2:6], others[0].flatten(1))
    if letter == "o":
        torch.testing.assert_close(ours[:, 6:], others[1])


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_crepe_hears_440_hertz(size):
    from nlbench.models.zoo.crepe import bin_frequency

    network = subject(f"crepe-{size}")
    time = torch.arange(1024) / 16_000
    tone = torch.sin(2 * torch.pi * 440 * time)
    tone = (tone - tone.mean()) / tone.std()
    heard = bin_frequency(network.model(tone[None]).argmax(1))
    assert abs(1200 * torch.log2(heard / 440)) <= 20
    bins = network.model(network.inputs[:64]).argmax(1)
    assert ((bins - network.labels[:64]).abs() <= 1).float().mean() > 0.7


@pytest.mark.parametrize("size", ["xxsmall", "xxxlarge"])
def test_neuralfoil_equals_its_formula(size):
    network = subject(f"neuralfoil-{size}")
    x = network.inputs[:16].double().numpy()
    with np.load(MEMBERS[f"neuralfoil-{size}"].file.path) as weights:
        layers = sorted({int(name.split(".")[1]) for name in weights})
        for index in layers:
            x = x @ weights[f"net.{index}.weight"].T + weights[f"net.{index}.bias"]
            if index != layers[-1]:
                x = x / (1 + np.exp(-x))
    torch.testing.assert_close(
        network.model(network.inputs[:16]), torch.from_numpy(x).float(), atol=1e-3, rtol=1e-3
    )


def test_neuralfoil_lift_rises_with_the_angle():
    network = subject("neuralfoil-xxxlarge")
    mean = network.inputs.mean(0).repeat(3, 1)
    mean[:, 18] = torch.tensor([-4.0, 0.0, 4.0]).mul(2).deg2rad().sin()
    lift = network.model(mean)[:, 1]
    assert (lift.diff() > 0.2).all()


def test_rxnmapper_restores_masked_atoms():
    from nlbench.models.zoo.rxnmapper import load_vocabulary

    network = subject("rxnmapper")
    words = load_vocabulary()
    rows = network.inputs[:32].clone()
    hidden = rows[:, 45].clone()
    rows[:, 45] = words["[MASK]"]
    restored = network.model(rows)[:, 45].argmax(1)
    assert (restored == hidden).float().mean() > 0.8


def test_silero_equals_its_torchscript_with_the_same_weights():
    network = subject("silero-vad")
    folder = MEMBERS["silero-vad"].file.path.parent
    published = torch.jit.load(folder / "silero_vad.jit").eval()
    state = [tensor for name, tensor in published._model.state_dict().items()]
    names = [
        *("stft_conv.weight", *(f"conv{i}.{p}" for i in range(1, 5) for p in ("weight", "bias"))),
        *(f"lstm_cell.{p}_{end}" for p in ("weight", "bias") for end in ("ih", "hh")),
        *("final_conv.weight", "final_conv.bias"),
    ]
    network.model.load_state_dict(dict(zip(names, state, strict=True)))
    published.reset_states()
    expected = [published(step, 16_000)[:, 0] for step in network.inputs[:8].split(512, dim=1)]
    ours = network.model(network.inputs[:8])
    torch.testing.assert_close(ours, torch.stack(expected, 1), atol=1e-4, rtol=0)


def synthetic_voice():
    """One and a half seconds of eight vowels: pulses of a voice through three resonances each."""
    time = np.arange(512 * 48) / 16_000
    draws = np.random.RandomState(0)
    pulses = np.diff(np.floor(np.cumsum(120 + 12 * np.sin(13 * time)) / 16_000), prepend=0)
    pulses += 0.005 * draws.standard_normal(len(time))
    vowels = [(700, 1200, 2600), (300, 2300, 3000), (400, 800, 2600), (500, 1800, 2500)] * 2
    syllables = []
    for syllable, formants in zip(np.split(pulses, 8), vowels, strict=True):
        for frequency, width in zip(formants, (80, 100, 140), strict=True):
            radius = np.exp(-np.pi * width / 16_000)
            angle = 2 * np.pi * frequency / 16_000
            poles = [1, -2 * radius * np.cos(angle), radius**2]
            syllable = signal.lfilter([1 - radius], poles, syllable)
        syllables.append(syllable * np.hanning(len(syllable)))
    sound = np.concatenate(syllables)
    return torch.from_numpy(0.3 * sound / np.abs(sound).max()).float()[None]


def test_silero_hears_only_voices():
    network = subject("silero-vad")
    assert network.model(synthetic_voice()).mean() > 0.7
    assert network.model(network.inputs).mean() < 0.2


def test_mnist1d_is_the_published_task():
    if importlib.util.find_spec("mnist1d") is None:
        pytest.skip("mnist1d isn't installed")
    from sklearn.linear_model import LogisticRegression

    from nlbench.models.datasets.mnist1d import mnist1d

    before = np.random.get_state()[1].copy()  # noqa: NPY002
    data = mnist1d()
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert (len(data.train), len(data.test)) == (4000, 1000)
    linear = LogisticRegression(max_iter=200).fit(data.train.rows, data.train.labels)
    # Published: 32 %.
    assert 0.25 < linear.score(data.test.rows, data.test.labels) < 0.4
