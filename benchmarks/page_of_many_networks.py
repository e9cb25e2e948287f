"""Measure the writing time, the size and the response times of the page of many networks.

The page shows synthetic networks with twelve measures and signatures of up to 60 sites. If
playwright and Chromium are installed, the controls are timed with layout, best of five. Prints a
table and writes it as JSON next to this file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from made_runs import make_run

from nlbench.reports.page import write_page

GOALS = {40: (10.0, 3.0), 400: (60.0, 15.0)}  # seconds, megabytes
REPEATS = 5
# Code that changes a control, and code that resets it.
CONTROLS = {
    "sort": ("state.sort = 'absdev'", "state.sort = 'cka'"),
    "turn the order": ("state.back = '1'", "state.back = ''"),
    "filter": ("state.q = 'vgg'", "state.q = ''"),
    "show ranks": ("state.show = 'ranks'", "state.show = 'values'"),
    "hide columns": ("setList('hide', ['cka', 'r2'])", "setList('hide', [])"),
    "strips by another measure": ("state.strip = 'r2'", "state.strip = 'cka'"),
}
TIMING_SCRIPT = """async () => {
  const times = [[], []];
  const actions = [() => { %s; }, () => { %s; }];
  for (let i = 0; i < %d; i++) for (const [index, action] of actions.entries()) {
    const start = performance.now();
    action();
    update();
    document.body.offsetHeight;
    times[index].push(performance.now() - start);
    await new Promise(resolve => setTimeout(resolve, 150));
  }
  return Math.max(...times.map(repeats => Math.min(...repeats)));
}"""


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for networks, (seconds, megabytes) in GOALS.items():
            run = make_run(networks)
            begin = time.perf_counter()
            page = write_page(run, Path(folder, f"{networks}.html"))
            results[str(networks)] = {
                "seconds": round(time.perf_counter() - begin, 2),
                "goal_seconds": seconds,
                "megabytes": round(page.stat().st_size / 1e6, 2),
                "goal_megabytes": megabytes,
                "load_average": round(os.getloadavg()[0], 1),
                "controls_milliseconds": controls(page),
                "goal_milliseconds": 100,
            }
            print(json.dumps({networks: results[str(networks)]}, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def controls(page: Path) -> dict[str, float]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("Chromium or playwright is missing: controls are not timed")
        return {}
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        view = browser.new_page(viewport={"width": 1440, "height": 900})
        view.goto(page.as_uri())
        view.wait_for_timeout(1500)
        milliseconds = {
            name: round(view.evaluate(TIMING_SCRIPT % (*code, REPEATS)), 1)
            for name, code in CONTROLS.items()
        }
        browser.close()
    return milliseconds


if __name__ == "__main__":
    main()
