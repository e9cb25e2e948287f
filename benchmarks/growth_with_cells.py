"""Measure the growth of time and memory with the number of cells, from 10^3 to 10^5.

A grid of a small network and four quick measures is measured with 250 seeds. For larger sizes its
records are repeated for further seeds, under the keys of their plan. Plan, resumption, table, page
and comparison with itself are timed, each in its own process: once with the seeds of one network,
once with a network per seed. Prints the results and writes them as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from grids import quick_request, write_grid_plugin

SECONDS, GIGABYTES, MEGABYTES = 60.0, 2.0, 5.0  # limits at 100,000 cells; of the page
CELLS_PER_SEED, MEASURED_SEEDS = 4, 250
TIMED = """
import json, os, resource, sys, time
from dataclasses import asdict, replace
from pathlib import Path
import nlbench
from grids import quick_request
folder, seeds, step = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
request = quick_request(seeds)
if step in ("measure", "repeat", "plan", "resume"):  # the others need no PyTorch
    from nlbench.runner import preview, run
begin, cpu = time.perf_counter(), time.process_time()
if step == "measure":
    run(request, folder)
elif step == "repeat":
    os.fsync = lambda handle: None
    measured = nlbench.load_run(folder.parent / "measured")
    templates = {r.measure.name: r for r in measured.records}
    records = []
    for cell in preview(request, folder).new:
        record = templates[cell.measure.name]
        subject = replace(
            record.subject,
            key=cell.subject.key,
            seed=cell.subject.spec.seed,
            weights_hash=cell.subject.key * 2,
        )
        shift = subject.seed / seeds / 100
        summary = {**record.result.summary, "value": record.result.summary["value"] + shift}
        result = replace(record.result, summary=summary)
        records.append(replace(record, key=cell.key, subject=subject, result=result))
    manifest = replace(measured.manifest, request=asdict(request))
    nlbench.Run(manifest.describe_records(records), records).save(folder)
    named = [
        replace(r, subject=replace(r.subject, model=f"network{r.subject.seed}", seed=0))
        for r in records
    ]
    nlbench.Run(manifest.describe_records(named), named).save(folder.parent / "networks")
elif step == "plan":
    assert len(preview(request, folder.parent / "new").new) == 4 * seeds
elif step == "resume":
    assert len(run(request, folder).records) == 4 * seeds
elif step == "table":
    assert len(nlbench.load_run(folder).scores) > 4 * seeds
elif step == "page":
    nlbench.load_run(folder).report(folder.parent / f"{folder.name}.html")
elif step == "compare":
    frame = nlbench.compare(nlbench.load_run(folder), nlbench.load_run(folder)).frame()
    assert len(frame) == 4 * seeds
print(json.dumps({
    "seconds": round(time.perf_counter() - begin, 2),
    "processor_seconds": round(time.process_time() - cpu, 2),
    "gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
}))
"""
SHARED_STEPS = ("table", "page", "compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    arguments = parser.parse_args()
    results: dict[str, object] = {
        "limits": {"seconds": SECONDS, "gigabytes": GIGABYTES, "page_megabytes": MEGABYTES}
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_grid_plugin(place)
        results["measure"] = timed(place / "measured", MEASURED_SEEDS, "measure")
        for cells in arguments.cells:
            seeds = cells // CELLS_PER_SEED
            run = place / str(cells)
            run.mkdir()
            (run / "measured").symlink_to(place / "measured")
            timed(run / "seeds", seeds, "repeat")
            results[str(cells)] = {
                "seeds of one network": steps(run / "seeds", seeds, ("plan", "resume")),
                "networks": steps(run / "networks", seeds, ()),
            }
            print(json.dumps({cells: results[str(cells)]}, indent=1), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def steps(folder: Path, seeds: int, further: tuple[str, ...]) -> dict[str, object]:
    """Run the steps that need no plan, and further ones, and measure the page."""
    rows: dict[str, object] = {
        step: timed(folder, seeds, step) for step in (*further, *SHARED_STEPS)
    }
    return {**rows, "page_megabytes": round(Path(f"{folder}.html").stat().st_size / 1e6, 2)}


def timed(folder: Path, seeds: int, step: str) -> dict[str, float]:
    """Run one step in a separate process."""
    assert len(quick_request(1).measures) == CELLS_PER_SEED
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TIMED, str(folder), str(seeds), step]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
