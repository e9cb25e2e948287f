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
from nlbench.measures.affine_residual import affine_residual
from nlbench.measures.affinity import affinity_score
from nlbench.measures.cka import CKA, linear_cka, rbf_cka
from nlbench.measures.influence import block_influence, relative_change
from nlbench.measures.linearity import linearity_statistics
from nlbench.measures.nlc import nonlinearity_coefficient
from nlbench.measures.norm import change_norm
from nlbench.measures.pathlength import PathLength
from nlbench.measures.r2 import R2, r2_score
from nlbench.measures.sparsity import fraction_near_zero
from nlbench.models.datasets.number_words import number_words
from nlbench.models.datasets.synthetic import random_tensors, synthetic
from nlbench.models.networks.resnet import resnet18_w8, resnet20
from nlbench.models.networks.vgg import vgg8
from nlbench.models.removal.span_removal import parse_span
from nlbench.models.sparsified.sparsification import sparsify
from nlbench.models.training.label_noise import corrupt_labels
from nlbench.models.training.recipes import vanilla
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.paths import closed_paths, noise_paths, pair_paths
from nlbench.probes.sites.sites_probe import RowPolicy, Selection, parse_lengths
from nlbench.request import Request
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
    (lambda: Request(measures=()), "measures: expected at least one"),
    (lambda: Request(measures=3), "measures: expected names, got 3"),
    (lambda: Request(measures=("r2", 3)), "measures: expected names, got 3"),
    (lambda: Request(seeds=(-1,)), "seeds: -1 is out of bounds"),
    (lambda: Request(seeds=(True,)), "seeds: expected non-negative integers, got True"),
    (lambda: Request(seeds=1.5), "seeds: expected non-negative integers, got 1.5"),
    (lambda: Request(samples=-1), "samples: -1 is out of bounds, expected 0 to 1e+09"),
    (lambda: Request(samples=10**5000), "samples: an int is out of bounds"),
    (lambda: Request(split="valid"), "split: unknown 'valid'"),
    (lambda: Request(device=None), "device: expected text, got None"),
    (lambda: Request(precision=3), "precision: unknown '3'"),
    (lambda: Request(settings=[("a.b", 1)]), "settings: expected a table, got a list"),
    # measures
    (lambda: affinity_score(ONES, ONES[:, :1]), "(9, 2) and y has shape (9, 1)"),
    (lambda: affinity_score(ONES, ONES[:8]), "(9, 2) and y has shape (8, 2)"),
    (lambda: affinity_score(ONES[0], ONES[0]), "shape (2,), expected"),
    (lambda: affinity_score(ONES.cfloat(), ONES), "complex64"),
    (lambda: affinity_score(ONES.numpy(), ONES), "x is a ndarray"),
    (lambda: affinity_score(DRAWN, DRAWN, shrinkage="ledoitwolf"), "did you mean 'ledoit-wolf'"),
    (lambda: affinity_score(DRAWN, DRAWN, ridge=-1.0), "ridge = -1.0"),
    (lambda: affinity_score(DRAWN, DRAWN, ridge=math.nan), "ridge = nan"),
    (lambda: affinity_score(DRAWN, DRAWN, ridge_unit="absolut"), "did you mean 'absolute'"),
    (lambda: affine_residual(DRAWN, DRAWN, folds=1), "folds"),
    (lambda: block_influence(ONES, ONES[:, :1]), "equal shapes"),
    (lambda: change_norm(ONES, ONES[:, :1]), "expected equal shapes"),
    (lambda: change_norm(ONES, ONES, kind="relativ"), "did you mean 'relative'"),
    (lambda: linear_cka(ONES, ONES[:8]), "9 samples and y has 8"),
    (lambda: rbf_cka(DRAWN, DRAWN, bandwidth=0), "bandwidth"),
    (lambda: CKA(kernel="gauss"), "unknown 'gauss'"),
    (lambda: PathLength(normalised=False), "no option 'normalised'"),
    (lambda: r2_score(ONES, ONES[:8]), "9 samples and y has 8"),
    (lambda: r2_score(DRAWN, DRAWN, kind="adjustd"), "did you mean 'adjusted'"),
    (lambda: r2_score(DRAWN, DRAWN, kind="crossvalidated", folds=1), "folds"),
    (lambda: R2(folds=1), "out of bounds"),
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
    (lambda: evaluate(ONES.numpy()), "a ndarray, expected a tensor or a loader"),
    (lambda: evaluate(ONES.int().numpy()), "convert an array with torch.as_tensor(inputs)"),
    (lambda: evaluate([ONES.numpy()]), "the loader yields a ndarray"),
    (lambda: evaluate("text"), "a str, expected a tensor or a loader"),
    (lambda: evaluate(b"text"), "a bytes, expected a tensor or a loader"),
    (lambda: evaluate(7), "an int, expected a tensor or a loader"),
    (lambda: evaluate(None), "a NoneType, expected a tensor or a loader"),
    (lambda: evaluate(ONES[0]), "shape (2,), expected (n, ...)"),
    (lambda: evaluate((ONES[0],)), "shape (2,), expected (n, ...)"),
    (lambda: evaluate(torch.zeros(())), "shape (), expected (n, ...)"),
    (lambda: evaluate([ONES[0]]), "shape (2,), expected (n, ...)"),
    (lambda: evaluate([ONES, ONES[:, :1]]), "samples of shapes"),
    (lambda: evaluate([]), "yields nothing"),
    (lambda: evaluate(TensorDataset(ONES[:0])), "yields nothing"),
    (lambda: evaluate([ONES, (ONES, 1, 2)]), "batches with different arguments"),
    (lambda: evaluate(iter([ONES, {"input": ONES}])), "with different arguments"),
    (lambda: evaluate({"a", "b"}), "the loader yields a str"),
    (lambda: evaluate(ONES[:0]), "no samples"),
    (lambda: evaluate(ONES.to_sparse()), "inputs: a sparse or nested tensor, expected a dense one"),
    (lambda: evaluate(QUANTISED), "inputs: a quantised tensor, expected numbers"),
    (lambda: evaluate([ONES.to("meta")]), "on the meta device"),
    (lambda: evaluate(ONES, nn.Linear(2, 2, device="meta")), "on the meta device"),
    (lambda: evaluate(ONES, lambda x: x), "expected a torch.nn.Module"),
    # paths and selections
    (lambda: closed_paths(IMAGE[0]), "expected (n, channels, height, width)"),
    (lambda: closed_paths(IMAGE, anchors=1), "1 anchors, expected at least 2"),
    (lambda: closed_paths(IMAGE, radius=math.nan), "radius"),
    (lambda: closed_paths(IMAGE, radius=-1.0), "radius"),
    (lambda: closed_paths(IMAGE, radius=40.0), "contain only copies of the image's edge"),
    (lambda: closed_paths(IMAGE, radius=0.0), "the paths have no length"),
    (lambda: noise_paths(ONES[:1], 1), "at least two"),
    (lambda: noise_paths(ONES.int(), 1), "floats"),
    (lambda: pair_paths(ONES[:1]), "at least two samples"),
    (lambda: trace_segment(mlp(0), *ENDS, method="adaptiv"), "did you mean 'adaptive'"),
    (lambda: trace_segment(mlp(0), *ENDS, dtype=torch.float16), "expected torch.float64"),
    (lambda: trace_segment(mlp(0), ENDS[0], torch.zeros(4)), "(3,) to (4,)"),
    (lambda: trace_segment(mlp(0), torch.zeros(4), torch.ones(4)), "shape (1, 4)"),
    (lambda: trace_segment(mlp(0), *ENDS.long()), "expected floats"),
    (lambda: Selection.parse("every:0"), "expected every:K with K ≥ 1"),
    (lambda: Selection.parse("every:x"), "expected every:K with K ≥ 1"),
    (lambda: Selection.parse("every:²"), "expected every:K with K ≥ 1"),
    (lambda: Selection.parse(f"every:{NINES}"), "99…', expected every:K with K ≥ 1"),
    (lambda: RowPolicy.parse("tokens:²", 0, "blocks"), "unknown 'tokens:²'"),
    (lambda: RowPolicy.parse(f"tokens:{NINES}", 0, "blocks"), "99…', expected one of"),
    (lambda: parse_lengths(f"spans:{NINES}"), "99…', expected a number of blocks"),
    (lambda: parse_lengths("spans:3..2"), "'spans:3..2', expected a number of blocks"),
    (lambda: parse_span("5-3"), "--span: '5-3', expected the first and last block"),
    (lambda: parse_span(f"1..{NINES}"), "99…', expected the first and last block"),
    (lambda: parse_span("x"), "--span: 'x', expected"),
    (lambda: Selection.parse("kind:"), "invalid condition 'kind:'"),
    (lambda: Selection.parse("role:gates"), "unknown role 'gates'; did you mean 'gate'"),
    (lambda: Selection.parse("knd:relu"), "did you mean 'kind'"),
    (lambda: Selection.parse("kind=relu"), "invalid condition 'kind=relu', expected"),
    (lambda: Selection.parse("every=2"), "invalid condition 'every=2', expected"),
    (lambda: Selection.parse("a++b"), "invalid condition 'a++b'"),
    (lambda: Selection.parse("!"), "invalid condition ''"),
    (lambda: Selection.parse("!every:2"), "expected names, kinds or roles"),
    # names of models and datasets, and their options
    (lambda: load("functions/rely"), "did you mean 'functions/relu'"),
    (lambda: load("functions/power-0"), "expected power-1 to power-999"),
    (lambda: load("functions/power-٣"), "expected power-1 to power-999"),
    (lambda: load("ladders/twin-plan"), "did you mean 'ladders/twin-plain'"),
    (lambda: load("ladders/mlp-relu-gain1-depth0"), "no model 'ladders/mlp-relu-gain1-depth0'"),
    (lambda: load("ladders/mlp-relu-gain1-depth9999"), "no model 'ladders/mlp-relu-gain1-depth"),
    (lambda: load(f"ladders/cnn-slope{NINES}"), "no model 'ladders/cnn-slope99"),
    (lambda: load("small/elu-w8-d2"), "no model 'small/elu-w8-d2'"),
    (lambda: load("small/relu-w999999-d2"), "no model 'small/relu-w999999-d2'"),
    (lambda: load("torchvision/resnet1"), "did you mean 'torchvision/resnet1"),
    (lambda: load("torchvision/q"), "'torchvision/q'; available: torchvision/alexnet, "),
    (lambda: registry.expand("measures", ["@removl"]), "did you mean '@removal'"),
    (lambda: registry.expand("models", ["@all"]), "no model '@all'"),
    (lambda: registry.expand("measures", ["zz*"]), "no measure matches 'zz*'"),
    (lambda: load("torchvision/"), "there is no model 'torchvision/'"),
    (lambda: load("ladders/twin-plain")(input_shape=(3, 8, 8)), "expected vectors"),
    (lambda: registry.find("models", "qqq"), "or give FILE.py:NAME"),
    (lambda: resnet20(in_channels=0), "in_channels is 0, expected at least 1"),
    (lambda: resnet18_w8(num_classes=0), "num_classes is 0, expected at least 1"),
    (lambda: vgg8(in_channels=0), "in_channels is 0, expected at least 1"),
    (lambda: vgg8(num_classes=0), "num_classes is 0, expected at least 1"),
    (lambda: redshift_mlp(input_shape=(3, 32, 32)), "expected vectors"),
    (lambda: load_dataset("random", {"sise": 3}), "no option 'sise'; did you mean 'size'"),
    (lambda: load_dataset("digits", {"folder": "x"}), "no option 'folder'; none available"),
    (lambda: random_tensors("3x100000x100000"), "30,000,000,000 elements, expected at most"),
    (lambda: random_tensors(NINES), "99…'"),
    (lambda: random_tensors("3x²"), "'3x²'"),
    (lambda: synthetic(classes=10_000, image_size=1024), "10,000 classes of 3x1024x1024"),
    (lambda: number_words(source="fr"), "translates from fr to itself"),
    (lambda: number_words(largest=100, train=100, test=10), "there are only 101"),
    (lambda: points("interval/2:1"), "expected interval/LOW:HIGH, numbers with LOW < HIGH"),
    (lambda: points("interval/a"), "expected interval/LOW:HIGH"),
    (lambda: points("normal/0:nan"), "expected normal/MEAN:STD, numbers with STD > 0"),
    (lambda: points("normal/0:1", shape="3"), "set normal.spacing=random"),
    (lambda: points("normal/0:1", shape="3y"), "normal/0:1.shape: expected lengths"),
    (lambda: points("normal/0:1", shape="999999", count=9999), "expected at most 268,435,456"),
    # training
    (lambda: noise([0, 1], 1.5), "label noise is 1.5, expected a fraction from 0 to 1"),
    (lambda: noise([0, 1], math.nan), "label noise is nan"),
    (lambda: noise([0, 1], 0.5, seed=-1), "the seed is -1"),
    (lambda: noise([0, 2], 0.5), "labels must be from 0 to 1"),
    (lambda: noise([-1, 0], 0.5), "labels must be from 0 to 1"),
    (lambda: noise([0, 0], 1.0, 1), "at least two classes"),
    (lambda: recipe(optimizer="adm"), "unknown optimizer 'adm'; did you mean 'adam'"),
    (lambda: recipe(schedule="steps"), "unknown schedule 'steps'; did you mean 'step'"),
    (lambda: recipe(shift=-1), "shift is -1, expected 0 to 10,000,000"),
    (lambda: recipe(label_noise=1.5), "label_noise is 1.5, expected a fraction"),
    (lambda: recipe(until_train_accuracy=2), "until_train_accuracy is 2, expected a fraction"),
    (lambda: recipe(until_loss=math.nan), "until_loss is nan, expected 0 to 1e"),
    (lambda: recipe(learning_rate=1e300), "learning_rate is 1e+300, expected more than 0"),
    (lambda: recipe(learning_rate=0), "learning_rate is 0"),
    (lambda: recipe(learning_rate=math.nan), "learning_rate is nan"),
    (lambda: recipe(decay=1.5), "decay is 1.5, expected more than 0 and at most 1"),
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
    (lambda: fraction_near_zero(ONES[:, :0]), "no entries"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words", "error"),
    [(*case, RequestError) for case in REFUSED] + [(*case, Undefined) for case in UNDEFINED],
)
def test_bad_input_is_named_in_one_line(call, words, error):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
