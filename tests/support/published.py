"""Values computed by the affinity paper's published code, and their samples."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

CASES = json.loads(Path(__file__).with_name("affinity_reference.json").read_text())["cases"]
IDS = [f"{case['activation']}-{case['n']}x{case['d']}" for case in CASES]
ACTIVATIONS = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def samples(case):
    """Return the input and output of a case's activation, as the reference file defines them."""
    r = np.random.RandomState(case["seed"])
    n, d = case["n"], case["d"]
    mix = r.standard_normal((d, d)) / np.sqrt(d)
    x = torch.tensor(np.float32(r.standard_normal((n, d)) @ mix * case["scale"] + case["shift"]))
    return x, ACTIVATIONS[case["activation"]](x)
