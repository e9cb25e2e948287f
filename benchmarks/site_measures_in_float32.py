"""Compare the site measures of float32 networks with those of the same networks in float64.

Networks of torchvision and timm, with initial weights, on noise; with batch norms as initialised
and with the statistics of the samples. Prints for each network how many values are within 1e-3
of float64's (relative above 1), how many are undefined in float32 alone, and how many are further
off, and writes the counts as JSON next to this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import nlbench

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
TOLERANCE = 1e-3
TORCHVISION = (
    "convnext_tiny densenet121 efficientnet_b0 googlenet mnasnet1_0 mobilenet_v2 "
    "mobilenet_v3_small regnet_y_400mf resnet18 shufflenet_v2_x1_0 squeezenet1_1 vgg11_bn"
)
TIMM = (
    "convnextv2_atto deit_tiny_patch16_224 dla46_c eca_nfnet_l0 edgenext_xx_small efficientvit_b0 "
    "fbnetc_100 gernet_s ghostnet_100 hardcorenas_a lcnet_050 mambaout_femto mixnet_s "
    "mnasnet_small mobilenetv3_small_050 mobilenetv4_conv_small mobilevit_xxs poolformer_s12 "
    "regnety_002 repghostnet_050 repvgg_a0 resnet10t rexnet_100 semnasnet_075 spnasnet_100 "
    "starnet_s1 tf_efficientnetv2_b0 tinynet_e xcit_nano_12_p16_224"
)
NETWORKS = [f"torchvision/{name}" for name in TORCHVISION.split()] + [
    f"timm/{name}" for name in TIMM.split()
]


def initialised(name: str, size: int, seed: int) -> nn.Module:
    """Create a network with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    library, _, model = name.partition("/")
    if library == "torchvision":
        options = {"init_weights": False, "aux_logits": False} if model == "googlenet" else {}
        return torchvision.models.get_model(model, weights=None, **options).eval()
    import timm

    try:
        return timm.create_model(model, img_size=size).eval()
    except TypeError:
        return timm.create_model(model).eval()


def set_statistics(model: nn.Module, inputs: Tensor) -> bool:
    """Set statistics of batch norms to those of the inputs; return False if there are none."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        model(inputs)
    model.eval()
    return bool(norms)


def values(model: nn.Module, inputs: Tensor) -> tuple[dict[tuple[str, str], float | None], bool]:
    """Return the value of each measure at each site, None if undefined, and True if remeasured."""
    run = nlbench.evaluate(model, inputs, MEASURES)
    numbers: dict[tuple[str, str], float | None] = {}
    for record in run.records:
        if record.result.status == "failed":
            raise SystemExit(f"{record.measure.name}: {record.result.reason}")
        for value in record.result.values:
            is_ok = value.status == "ok"
            numbers[record.measure.name, value.place] = value.statistics["value"] if is_ok else None
    return numbers, any("measured in float64" in r.result.reason for r in run.records)


def compare(name: str, samples: int, size: int, seed: int) -> Iterator[dict[str, object]]:
    """Compare both variants of a network."""
    for variant in ("initialised", "statistics"):
        model = initialised(name, size, seed)
        inputs = torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(seed))
        if variant == "statistics" and not set_statistics(model, inputs):
            return
        begin = time.perf_counter()
        native, in_float64 = values(model, inputs)
        middle = time.perf_counter()
        exact, _ = values(copy.deepcopy(model).double(), inputs.double())
        end = time.perf_counter()
        counts: Counter[str] = Counter()
        outside = {}
        for key, value in exact.items():
            found = native[key]
            if found is None:
                counts["undefined in both" if value is None else "undefined"] += 1
            elif value is None or abs(found - value) > TOLERANCE * max(1.0, abs(value)):
                counts["outside"] += 1
                outside[" at ".join(key)] = [found, value]
            else:
                counts["within"] += 1
        yield {
            "network": name,
            "variant": variant,
            "in_float64": in_float64,
            **counts,
            "values outside": outside,
            "seconds": round(middle - begin, 1),
            "seconds_float64": round(end - middle, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.networks:
        for row in compare(name, arguments.samples, arguments.size, arguments.seed):
            print(json.dumps(row), flush=True)
            rows.append(row)
    names = ("within", "undefined in both", "undefined", "outside")
    total = {count: sum(int(row.get(count, 0)) for row in rows) for count in names}  # type: ignore[call-overload]
    total["measured in float64"] = sum(bool(row["in_float64"]) for row in rows)
    print(json.dumps(total))
    result = {**vars(arguments), "total": total, "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
