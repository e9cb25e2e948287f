"""One table of bad inputs: each is refused in one line that names what is wrong.

What the command line is given is in ``nlbench/cli/test_cli.py`` and ``stress/test_malformed.py``.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nlbench
from nlbench import registry
from nlbench.errors import RequestError, Undefined
from nlbench.measures.accuracy import accuracy_score
from nlbench.measures.activation_state import state_entropy
from nlbench.measures.affine_residual import affine_residual
from nlbench.measures.affinity import affinity_score
from nlbench.measures.cka import CKA, linear_cka, rbf_cka
from nlbench.measures.geometric_complexity import squared_jacobian_norms
from nlbench.measures.influence import block_influence, relative_change
from nlbench.measures.linearity import linearity_statistics
from nlbench.measures.nlc import nonlinearity_coefficient
from nlbench.measures.norm import change_norm
from nlbench.measures.pathlength import PathLength
from nlbench.measures.pieces import piece_count
from nlbench.measures.r2 import R2, r2_score
from nlbench.measures.sparsity import fraction_near_zero
from nlbench.measures.statistics.samples import as_samples
from nlbench.models.datasets.number_words import number_words
from nlbench.models.datasets.published import mnist
from nlbench.models.datasets.synthetic import random_tensors, synthetic
from nlbench.models.networks.resnet import resnet18_w8, resnet20
from nlbench.models.networks.transformer import transformer_tiny
from nlbench.models.networks.vgg import vgg8
from nlbench.models.removal.span_removal import parse_span
from nlbench.models.sparsified.sparsification import sparsify
from nlbench.models.training.label_noise import corrupt_labels
from nlbench.models.training.recipes import vanilla
from nlbench.models.training.tasks import bleu
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.lines import observe_paths, trace_segment
from nlbench.probes.lines.paths import closed_paths, noise_paths, pair_paths
from nlbench.probes.lines.quadrature import BatchedNetwork, smooth_estimate
from nlbench.probes.sites.sites_probe import RowPolicy, Selection, parse_lengths
from nlbench.request import Request
from nlbench.studies.networks.blends import blend
from nlbench.studies.networks.perceptrons import redshift_mlp
from nlbench.subjects.load import load_dataset

from segments import mlp

ONES = torch.ones(9, 2)
DRAWN = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
QUANTISED = torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8)
IMAGE = torch.rand(1, 1, 4, 4)
ENDS = torch.zeros(2, 3)
NINES = "9" * 5000


def evaluate(inputs, model=None):
    model = model or nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nlbench.evaluate(model, inputs, ["r2"])


def load(name):
    return registry.load("models", name)


def noise(labels, fraction, classes=2, seed=0):
    return corrupt_labels(torch.tensor(labels), fraction, classes, seed)


def recipe(**change):
    return replace(vanilla, **change)


def points(name, **options):
    return load_dataset(name, options).sample(None)


REFUSED = [
    # requests
    (lambda: Request(measures=()), "measures:"),
    (lambda: Request(measures=3), "measures:"),
    (lambda: Request(measures=("r2", 3)), "measures:"),
    (lambda: Request(seeds=(-1,)), "seeds: -1"),
    (lambda: Request(seeds=(True,)), "seeds:"),
    (lambda: Request(seeds=1.5), "seeds:"),
    (lambda: Request(samples=-1), "samples: -1"),
    (lambda: Request(samples=10**5000), "samples: an int"),
    (lambda: Request(split="valid"), "split: unknown 'valid'"),
    (lambda: Request(device=None), "device:"),
    (lambda: Request(precision=3), "precision: unknown '3'"),
    (lambda: Request(settings=[("a.b", 1)]), "settings:"),
    # measures
    (lambda: affinity_score(ONES, ONES[:, :1]), "(9, 2) and y has shape (9, 1)"),
    (lambda: affinity_score(ONES, ONES[:8]), "(9, 2) and y has shape (8, 2)"),
    (lambda: affinity_score(ONES[0], ONES[0]), "shape (2,)"),
    (lambda: affinity_score(ONES.cfloat(), ONES), "complex64"),
    (lambda: affinity_score(ONES.numpy(), ONES), "x is a ndarray"),
    (lambda: affinity_score(DRAWN, DRAWN, shrinkage="ledoitwolf"), "'ledoit-wolf'"),
    (lambda: affinity_score(DRAWN, DRAWN, ridge=-1.0), "ridge = -1.0"),
    (lambda: affinity_score(DRAWN, DRAWN, ridge=math.nan), "ridge = nan"),
    (lambda: affinity_score(DRAWN, DRAWN, ridge_unit="absolut"), "'absolute'"),
    (lambda: affine_residual(DRAWN, DRAWN, folds=1), "folds"),
    (lambda: block_influence(ONES, ONES[:, :1]), "equal shapes"),
    (lambda: change_norm(ONES, ONES[:, :1]), "equal shapes"),
    (lambda: change_norm(ONES, ONES, kind="relativ"), "'relative'"),
    (lambda: linear_cka(ONES, ONES[:8]), "9 samples and y has 8"),
    (lambda: rbf_cka(DRAWN, DRAWN, bandwidth=0), "bandwidth"),
    (lambda: CKA(kernel="gauss"), "'gauss'"),
    (lambda: PathLength(normalised=False), "'normalised'"),
    (lambda: r2_score(ONES, ONES[:8]), "9 samples and y has 8"),
    (lambda: r2_score(DRAWN, DRAWN, kind="adjustd"), "'adjusted'"),
    (lambda: r2_score(DRAWN, DRAWN, kind="crossvalidated", folds=1), "folds"),
    (lambda: r2_score(DRAWN, DRAWN, weighting="varance"), "'varance'"),
    (lambda: R2(folds=1), "r2.folds"),
    (lambda: R2(folds=101), "r2.folds"),
    (lambda: piece_count(trace_segment(mlp(0), *ENDS), -1), "tolerance"),
    (lambda: fraction_near_zero(torch.tensor(1.0)), "expected real numbers"),
    # inputs of a model
    (lambda: evaluate((ONES, ONES)), "a batch has 2 arguments, but the model takes 1"),
    (lambda: evaluate((ONES, ONES[:8])), "a batch has 2 arguments, but the model takes 1"),
    (lambda: evaluate([(ONES, ONES[:8, 0])]), "9 samples has labels of shape (8,)"),
    (lambda: evaluate(()), "arguments without a tensor"),
    (lambda: nlbench.evaluate(mlp(0), ONES, ["r2"], errors=False), "'False'"),
    (lambda: evaluate({}), "arguments without a tensor"),
    (lambda: evaluate({"x": None}), "arguments without a tensor"),
    (lambda: evaluate({"x": [1, 2]}), "arguments without a tensor"),
    (lambda: evaluate((ONES.numpy(),)), "torch.as_tensor(inputs, dtype="),
    (lambda: evaluate(ONES.numpy()), "a ndarray"),
    (lambda: evaluate(ONES.int().numpy()), "convert an array with torch.as_tensor(inputs)"),
    (lambda: evaluate([ONES.numpy()]), "the loader yields a ndarray"),
    (lambda: evaluate("text"), "a str"),
    (lambda: evaluate(b"text"), "a bytes"),
    (lambda: evaluate(7), "an int"),
    (lambda: evaluate(None), "a NoneType"),
    (lambda: evaluate(ONES[0]), "shape (2,)"),
    (lambda: evaluate((ONES[0],)), "shape (2,)"),
    (lambda: evaluate(torch.zeros(())), "shape ()"),
    (lambda: evaluate([ONES[0]]), "shape (2,)"),
    (lambda: evaluate([ONES, ONES[:, :1]]), "samples of shapes"),
    (lambda: evaluate([]), "yields nothing"),
    (lambda: evaluate(TensorDataset(ONES[:0])), "yields nothing"),
    (lambda: evaluate([ONES, (ONES, 1, 2)]), "batches with different arguments"),
    (lambda: evaluate(iter([ONES, {"input": ONES}])), "with different arguments"),
    (lambda: evaluate({"a", "b"}), "the loader yields a str"),
    (lambda: evaluate(ONES[:0]), "no samples"),
    (lambda: evaluate(ONES.to_sparse()), "inputs: a sparse or nested tensor"),
    (lambda: evaluate(torch.masked.masked_tensor(ONES, ONES > 0)), "MaskedTensor"),
    (lambda: evaluate(ONES.to(torch.uint16)), "uint16"),
    (lambda: nlbench.evaluate(mlp(0), ONES, ["accuracy"], labels=["a", "b"]), "labels"),
    (lambda: nlbench.Monitor(mlp(0), ONES, ["r2"], every=0), "every=0"),
    (lambda: nlbench.Monitor(mlp(0), iter([ONES]), ["r2"]), "iterator"),
    (lambda: nlbench.Monitor(mlp(0), ONES, ["r2"], weight_linearity="last"), "'last'"),
    (lambda: channel_graph(nn.Linear(3, 3), torch.zeros(2, 4)), "(1, 4)"),
    (lambda: evaluate(QUANTISED), "inputs: a quantised tensor"),
    (lambda: evaluate([ONES.to("meta")]), "on the meta device"),
    (lambda: evaluate(ONES, nn.Linear(2, 2, device="meta")), "on the meta device"),
    (lambda: evaluate(ONES, lambda x: x), "expected a torch.nn.Module"),
    # paths and selections
    (lambda: closed_paths(IMAGE[0]), "expected (n, channels, height, width)"),
    (lambda: closed_paths(IMAGE, anchors=1), "1 anchors"),
    (lambda: closed_paths(IMAGE, radius=math.nan), "radius"),
    (lambda: closed_paths(IMAGE, radius=-1.0), "radius"),
    (lambda: closed_paths(IMAGE, radius=40.0), "contain only copies of the image's edge"),
    (lambda: closed_paths(IMAGE, radius=0.0), "the paths have no length"),
    (lambda: noise_paths(ONES[:1], 1), "at least two"),
    (lambda: noise_paths(ONES.int(), 1), "floats"),
    (lambda: pair_paths(ONES[:1]), "at least two samples"),
    (lambda: trace_segment(mlp(0), *ENDS, method="adaptiv"), "'adaptive'"),
    (lambda: trace_segment(mlp(0), *ENDS, dtype=torch.float16), "expected torch.float64"),
    (lambda: trace_segment(mlp(0), ENDS[0], torch.zeros(4)), "(3,) to (4,)"),
    (lambda: trace_segment(mlp(0), torch.zeros(4), torch.ones(4)), "shape (1, 4)"),
    (lambda: trace_segment(mlp(0), *ENDS.long()), "floats"),
    (lambda: trace_segment(mlp(0), *ENDS.to("meta")), "meta"),
    (lambda: trace_segment(mlp(0), *ENDS, memory=0), "memory"),
    (lambda: trace_segment(mlp(0), *ENDS, method="adaptive", sensitivity=0), "sensitivity"),
    (lambda: trace_segment(mlp(0), *ENDS, method="sampling", resolution=0), "resolution"),
    (lambda: smooth_estimate(lambda t: t[:, None] ** 2, tolerance=0), "tolerance"),
    (lambda: list(observe_paths(mlp(0), ENDS[:, None])), "anchors"),
    (lambda: BatchedNetwork.of(nn.Tanh(), DRAWN, memory=10), "memory"),
    (lambda: BatchedNetwork(nn.Linear(3, 2), 4)(torch.ones(2, 4)), "(2, 4)"),
    (lambda: Selection.parse("every:0"), "every:K"),
    (lambda: Selection.parse("every:x"), "every:K"),
    (lambda: Selection.parse("every:²"), "every:K"),
    (lambda: Selection.parse(f"every:{NINES}"), "99…'"),
    (lambda: RowPolicy.parse("tokens:²", 0, "blocks"), "'tokens:²'"),
    (lambda: RowPolicy.parse(f"tokens:{NINES}", 0, "blocks"), "99…'"),
    (lambda: parse_lengths(f"spans:{NINES}"), "99…'"),
    (lambda: parse_lengths("spans:3..2"), "'spans:3..2'"),
    (lambda: parse_span("5-3"), "--span: '5-3'"),
    (lambda: parse_span(f"1..{NINES}"), "99…'"),
    (lambda: parse_span("x"), "--span: 'x'"),
    (lambda: Selection.parse("kind:"), "'kind:'"),
    (lambda: Selection.parse("role:gates"), "'gate'"),
    (lambda: Selection.parse("knd:relu"), "'kind'"),
    (lambda: Selection.parse("kind=relu"), "'kind=relu'"),
    (lambda: Selection.parse("every=2"), "'every=2'"),
    (lambda: Selection.parse("a++b"), "'a++b'"),
    (lambda: Selection.parse("!"), "invalid condition ''"),
    (lambda: Selection.parse("!every:2"), "expected names, kinds or roles"),
    # names of models and datasets, and their options
    (lambda: load("functions/rely"), "'functions/relu'"),
    (lambda: load("functions/power-0"), "expected power-1 to power-999"),
    (lambda: load("functions/power-٣"), "expected power-1 to power-999"),
    (lambda: load("ladders/twin-plan"), "'ladders/twin-plain'"),
    (lambda: load("ladders/mlp-relu-gain1-depth0"), "'ladders/mlp-relu-gain1-depth0'"),
    (lambda: load("ladders/mlp-relu-gain1-depth9999"), "'ladders/mlp-relu-gain1-depth"),
    (lambda: load(f"ladders/cnn-slope{NINES}"), "'ladders/cnn-slope99"),
    (lambda: load("small/elu-w8-d2"), "'small/elu-w8-d2'"),
    (lambda: load("small/relu-w999999-d2"), "'small/relu-w999999-d2'"),
    (lambda: load("torchvision/resnet1"), "mean 'torchvision/resnet1"),
    (lambda: load("torchvision/q"), "'torchvision/q'"),
    (lambda: registry.expand("measures", ["@removl"]), "'@removal'"),
    (lambda: registry.expand("models", ["@all"]), "'@all'"),
    (lambda: registry.expand("measures", ["zz*"]), "no measure matches 'zz*'"),
    (lambda: load("torchvision/"), "'torchvision/'"),
    (lambda: load("ladders/twin-plain")(input_shape=(3, 8, 8)), "vectors"),
    (lambda: registry.find("models", "qqq"), "or give FILE.py:NAME"),
    (lambda: resnet20(in_channels=0), "in_channels is 0"),
    (lambda: resnet18_w8(num_classes=0), "num_classes is 0"),
    (lambda: vgg8(in_channels=0), "in_channels is 0"),
    (lambda: vgg8(num_classes=0), "num_classes is 0"),
    (lambda: transformer_tiny(10, (3, 32, 32)), "(3, 32, 32)"),
    (lambda: blend(nn.Sequential(nn.Tanh()), amount=0.5), "ReLU6"),
    (lambda: redshift_mlp(input_shape=(3, 32, 32)), "vectors"),
    (lambda: load_dataset("random", {"sise": 3}), "'size'"),
    (lambda: load_dataset("digits", {"folder": "x"}), "'folder'"),
    (lambda: mnist("~nobody-of-that-name/mnist"), "~nobody-of-that-name"),
    (lambda: random_tensors("3x100000x100000"), "30,000,000,000 elements"),
    (lambda: random_tensors(NINES), "99…'"),
    (lambda: random_tensors("3x²"), "'3x²'"),
    (lambda: synthetic(classes=10_000, image_size=1024), "10,000 classes of 3x1024x1024"),
    (lambda: number_words(source="fr"), "translates from fr to itself"),
    (lambda: number_words(largest=100, train=100, test=10), "there are only 101"),
    (lambda: points("interval/2:1"), "expected interval/LOW:HIGH, numbers with LOW < HIGH"),
    (lambda: points("interval/a"), "expected interval/LOW:HIGH"),
    (lambda: points("normal/0:nan"), "expected normal/MEAN:STD, numbers with STD > 0"),
    (lambda: points("normal/0:1", shape="3"), "set normal.spacing=random"),
    (lambda: points("normal/0:1", shape="3y"), "normal/0:1.shape:"),
    (lambda: points("normal/0:1", shape="999999", count=9999), "expected at most 268,435,456"),
    # training
    (lambda: noise([0, 1], 1.5), "label noise is 1.5"),
    (lambda: noise([0, 1], math.nan), "label noise is nan"),
    (lambda: noise([0, 1], 0.5, seed=-1), "the seed is -1"),
    (lambda: noise([0, 2], 0.5), "labels must be from 0 to 1"),
    (lambda: noise([-1, 0], 0.5), "labels must be from 0 to 1"),
    (lambda: noise([0, 0], 1.0, 1), "at least two classes"),
    (lambda: bleu(["a"], ["a"], "words"), "'words'"),
    (lambda: recipe(optimizer="adm"), "'adam'"),
    (lambda: recipe(schedule="steps"), "'step'"),
    (lambda: recipe(shift=-1), "shift is -1"),
    (lambda: recipe(label_noise=1.5), "label_noise is 1.5"),
    (lambda: recipe(until_train_accuracy=2), "until_train_accuracy is 2"),
    (lambda: recipe(until_loss=math.nan), "until_loss is nan"),
    (lambda: recipe(learning_rate=1e300), "learning_rate is 1e+300"),
    (lambda: recipe(learning_rate=0), "learning_rate is 0"),
    (lambda: recipe(learning_rate=math.nan), "learning_rate is nan"),
    (lambda: recipe(decay=1.5), "decay is 1.5"),
    (lambda: recipe(decay=0), "decay is 0"),
    (lambda: recipe(decay_every=0), "decay_every is 0"),
    (lambda: recipe(epochs=0), "epochs is 0"),
    (lambda: recipe(batch_size=0), "batch_size is 0"),
    (lambda: recipe(momentum=1), "momentum is 1"),
    (lambda: recipe(weight_decay=-1), "weight_decay is -1"),
    (lambda: recipe(warmup_steps=-1), "warmup_steps is -1"),
    (lambda: sparsify(nn.Sequential(nn.Linear(2, 2), nn.GELU())), "1 call of gelu can't be"),
    (lambda: sparsify(nn.Sequential(nn.Linear(2, 2))), "no ReLU, so there is nothing to linearise"),
    (lambda: sparsify(nn.Sequential(nn.Flatten(), nn.ReLU())), "pass example="),
    (lambda: sparsify(sparsify(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))), "already sparsified"),
    (lambda: sparsify(nn.Sequential(nn.Linear(7, 2), nn.Linear(3, 2), nn.ReLU())), "can't be run"),
]  # fmt: skip

LOGITS = torch.zeros(3, 2)
UNDEFINED = [
    (lambda: accuracy_score(LOGITS, LOGITS.long()), "expected one logit per class"),
    (lambda: accuracy_score(LOGITS[:, 0], torch.zeros(3).long()), "expected one logit per class"),
    (lambda: accuracy_score(LOGITS, torch.tensor([0, 1, 2])), "a label is 2"),
    (lambda: accuracy_score(LOGITS, torch.tensor([0, -1, 1])), "a label is -1"),
    (lambda: accuracy_score(LOGITS, torch.tensor([0.0, 1.0, 1.0])), "labels are float32"),
    (lambda: accuracy_score(LOGITS, torch.tensor([True, False, True])), "labels are bool"),
    (lambda: accuracy_score(LOGITS[:, :1], torch.zeros(3).long()), "has 1 logits"),
    (lambda: accuracy_score(LOGITS, torch.full((3,), -100)), "no labels to predict"),
    (lambda: affine_residual(DRAWN, ONES), "constant output"),
    (lambda: affine_residual(DRAWN[:3], DRAWN[:3]), "at least 4 distinct samples"),
    (lambda: affinity_score(ONES[:1], ONES[:1]), "n = 1: at least 2"),
    (lambda: block_influence(0 * ONES, ONES), "zeros"),
    (lambda: relative_change(0 * ONES, ONES), "zeros"),
    (lambda: change_norm(ONES[:0], ONES[:0]), "at least 1"),
    (lambda: linearity_statistics(ONES, DRAWN), "constant input"),
    (lambda: linearity_statistics(DRAWN, ONES), "constant output"),
    (lambda: linearity_statistics(DRAWN[:1], DRAWN[:1]), "at least 2"),
    (lambda: nonlinearity_coefficient(lambda x: x * 0, DRAWN), "constant output"),
    (lambda: nonlinearity_coefficient(lambda x: x * 0 + 1, DRAWN), "constant output"),
    (lambda: nonlinearity_coefficient(lambda x: x, ONES), "constant output"),
    (lambda: nonlinearity_coefficient(torch.round, 5 * DRAWN), "derivative is zero"),
    (lambda: nonlinearity_coefficient(lambda x: x, DRAWN[:2]), "at least 3 samples"),
    (lambda: nonlinearity_coefficient(lambda x: x, ONES.long()), "no derivative"),
    (lambda: r2_score(ONES[:1], ONES[:1]), "n = 1"),
    (lambda: r2_score(DRAWN, ONES), "constant output"),
    (lambda: rbf_cka(DRAWN[:3], DRAWN[:3], debiased=True), "at least 4"),
    (lambda: state_entropy(ONES[:1]), "n = 1"),
    (lambda: squared_jacobian_norms(lambda x: x.detach(), ONES), "depend"),
    (lambda: as_samples(ONES[:, :0], "x"), "x"),
    (lambda: fraction_near_zero(ONES[:, :0]), "no entries"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "name", "error"),
    [(*case, RequestError) for case in REFUSED] + [(*case, Undefined) for case in UNDEFINED],
)
def test_bad_input_is_named_in_one_line(call, name, error):
    with pytest.raises(error) as caught:
        call()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
