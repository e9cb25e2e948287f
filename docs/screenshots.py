"""Take the pictures of the page that README and docs show, in both themes.

The build of the site takes them anew where the page has changed, if playwright and Chromium are
there. The pages show networks of the leaderboard.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leaderboard import leaderboard_run
from PIL import Image, PngImagePlugin

from nlbench.reports.page import render_page
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run

HERE = Path(__file__).parent
WIDTH = 1280
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DRAWN = "document.querySelectorAll('#multi figure').forEach(figure => figure.draw && figure.draw())"
PICTURES = {
    "report": ("networks", "body", "#multi"),
    "report-agreement": ("networks", "#maps-title", ".two.agree"),
    "report-single": ("single", "body", ".cite"),
}
"""Page, first and last element of each picture."""
NETWORKS = (
    *(f"torchvision/{name}" for name in ("resnet18", "mobilenet_v2", "vgg16", "convnext_tiny")),
    *("vgg8", "zoo/mtcnn-rnet", "zoo/crepe-tiny"),
)
READY = "!document.querySelector('#multi') || document.querySelector('#multi figure')"


def renew() -> None:
    """Take the pictures of pages that have changed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        return
    run = leaderboard_run()
    single = part(run, ("vgg8",), ("affinity", "absdev"), ("trained",))
    networks = part(run, NETWORKS, ("affinity", "cka", "nlc", "pathlength"))
    pages = {
        "networks": render_page(networks, title="Eight networks"),
        "single": render_page(single),
    }
    hashes = {name: hashlib.sha256(html.encode()).hexdigest() for name, html in pages.items()}
    outdated = {
        name: picture
        for name, picture in PICTURES.items()
        if any(recorded_hash(file) != hashes[picture[0]] for file in files_of(name).values())
    }
    if not outdated:
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, (page, first, last) in outdated.items():
            file = Path(folder, f"{page}.html")
            file.write_text(pages[page], encoding="utf-8")
            for theme, picture in files_of(name).items():
                take(opened(browser, file, theme), picture, first, last, hashes[page])
        browser.close()


def part(
    run: Run,
    models: Sequence[str],
    measures: Sequence[str],
    weights: Sequence[str] = ("init", "trained"),
) -> Run:
    """Return the cells of some networks and measures."""
    records = [
        r
        for r in run.records
        if r.subject.model in models and r.subject.weights in weights and r.measure.name in measures
    ]
    facts = dict(Manifest.from_dict(run.manifest).describe_records(records))
    about = {name: facts["measures"][name] for name in measures}
    return replace(run, records=records, manifest={**facts, "measures": about})


def files_of(name: str) -> dict[str, Path]:
    """Return the file of a picture for each theme."""
    return {"light": HERE / f"{name}.png", "dark": HERE / f"{name}-dark.png"}


def recorded_hash(file: Path) -> str:
    """Return the hash of the page that a picture was taken of."""
    if not file.is_file():
        return ""
    with Image.open(file) as image:
        return str(image.info.get("page", ""))


def opened(browser: Any, page: Path, theme: str) -> Any:
    """Open a page and draw all of its figures."""
    view = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme=theme)
    view.goto(page.as_uri())
    view.wait_for_function(READY)
    view.evaluate(DRAWN)
    return view


def take(view: Any, file: Path, first: str, last: str, page_hash: str) -> None:
    """Take what lies between two elements, in few colours: it is a drawing, not a photograph."""
    edges = "([first, last]) => [document.querySelector(first).getBoundingClientRect().top"
    edges += " + scrollY, document.querySelector(last).getBoundingClientRect().bottom + scrollY]"
    top, bottom = view.evaluate(edges, [first, last])
    clip = {"x": 0, "y": max(0, top - 12), "width": WIDTH, "height": bottom - top + 36}
    picture = Image.open(io.BytesIO(view.screenshot(full_page=True, clip=clip)))
    info = PngImagePlugin.PngInfo()
    info.add_text("page", page_hash)
    few = picture.convert("RGB").quantize(255, dither=Image.Dither.NONE)
    few.save(file, optimize=True, pnginfo=info)
    print(file)


if __name__ == "__main__":
    renew()
