"""How much more memory than the forward pass all six site measures take.

torchvision's ResNet18 with random weights on noise of 224 x 224, one batch of 128 after the
other. Each way runs in a process of its own; what is compared is the largest resident memory
of a whole process, and the part of it above what the process held before the pass (Python,
PyTorch, the model and the inputs). Prints a table and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
WAYS = ("forward", "signature")
STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"no {field} in {STATUS}: this needs Linux")


def run_one(way: str, batch: int, batches: int, image: int) -> None:
    import torch
    import torchvision

    import nlbench

    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    inputs = torch.randn(batch * batches, 3, image, image)
    # Imports and first calls, which take memory once, are no part of a pass.
    nlbench.evaluate(model, inputs[:4], MEASURES)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = memory("VmRSS")
    if way == "forward":
        with torch.no_grad():
            for part in torch.split(inputs, batch):
                model(part)
    else:
        run = nlbench.evaluate(model, inputs, MEASURES, settings={"sites.batch": batch})
        wrong = [r.result.reason for r in run.records if not r.is_done]
        if wrong:
            raise SystemExit("; ".join(wrong))
    print(json.dumps({"before": before, "peak": memory("VmHWM")}))


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--batch", type=int, default=128)
    given.add_argument("--batches", type=int, default=2)
    given.add_argument("--image", type=int, default=224)
    given.add_argument("--way", choices=WAYS)
    asked = given.parse_args()
    sizes = asked.batch, asked.batches, asked.image
    if asked.way:
        run_one(asked.way, *sizes)
        return
    command = [sys.executable, __file__, "--batch", str(asked.batch)]
    command += ["--batches", str(asked.batches), "--image", str(asked.image)]
    found = {}
    for way in WAYS:
        output = subprocess.run(
            [*command, "--way", way], check=True, capture_output=True, text=True
        )
        found[way] = json.loads(output.stdout.splitlines()[-1])
        found[way]["pass"] = found[way]["peak"] - found[way]["before"]
    ratios = {
        of: round(found["signature"][of] / found["forward"][of], 3) for of in ("peak", "pass")
    }
    print(f"{'':>10} {'peak MiB':>9} {'of it the pass':>15}")
    for way, sizes_found in found.items():
        print(f"{way:>10} {sizes_found['peak'] / 2**20:>9.0f} {sizes_found['pass'] / 2**20:>15.0f}")
    print(f"{'ratio':>10} {ratios['peak']:>9.2f} {ratios['pass']:>15.2f}")
    content = {
        "batch": asked.batch,
        "batches": asked.batches,
        "image": asked.image,
        "bytes": found,
        "ratio": ratios,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
