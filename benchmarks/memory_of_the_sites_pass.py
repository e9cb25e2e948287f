"""Compare the memory of all six site measures with that of the forward pass.

torchvision's ResNet18 with random weights runs on noise of 224×224 in batches of 128. Each variant
runs in its own process. The peak resident memory is compared, in total and above that before the
pass (Python, PyTorch, the model and the inputs). Prints a table and writes it as JSON next to this
file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
VARIANTS = ("forward", "signature")
STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"no {field} in {STATUS}: this needs Linux")


def run_variant(variant: str, batch: int, batches: int, image: int) -> None:
    import torch
    import torchvision

    import nlbench

    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    inputs = torch.randn(batch * batches, 3, image, image)
    # Warm up: imports and first calls take memory once.
    nlbench.evaluate(model, inputs[:4], MEASURES)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = memory("VmRSS")
    if variant == "forward":
        with torch.no_grad():
            for part in torch.split(inputs, batch):
                model(part)
    else:
        run = nlbench.evaluate(model, inputs, MEASURES, settings={"sites.batch": batch})
        failures = [r.result.reason for r in run.records if not r.is_done]
        if failures:
            raise SystemExit("; ".join(failures))
    print(json.dumps({"before": before, "peak": memory("VmHWM")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--variant", choices=VARIANTS)
    arguments = parser.parse_args()
    if arguments.variant:
        run_variant(arguments.variant, arguments.batch, arguments.batches, arguments.image)
        return
    command = [sys.executable, __file__, "--batch", str(arguments.batch)]
    command += ["--batches", str(arguments.batches), "--image", str(arguments.image)]
    memories = {}
    for variant in VARIANTS:
        output = subprocess.run(
            [*command, "--variant", variant], check=True, capture_output=True, text=True
        )
        memories[variant] = json.loads(output.stdout.splitlines()[-1])
        memories[variant]["pass"] = memories[variant]["peak"] - memories[variant]["before"]
    ratios = {
        name: round(memories["signature"][name] / memories["forward"][name], 3)
        for name in ("peak", "pass")
    }
    print(f"{'':>10} {'peak MiB':>9} {'pass MiB':>15}")
    for variant, sizes in memories.items():
        print(f"{variant:>10} {sizes['peak'] / 2**20:>9.0f} {sizes['pass'] / 2**20:>15.0f}")
    print(f"{'ratio':>10} {ratios['peak']:>9.2f} {ratios['pass']:>15.2f}")
    content = {
        "batch": arguments.batch,
        "batches": arguments.batches,
        "image": arguments.image,
        "bytes": memories,
        "ratio": ratios,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
