r"""Take the pictures of the page that README and docs show.

``python docs/screenshots.py RUN`` takes them of a run's folder, into this folder. Needs playwright
and Chromium. The run behind those that are there:

    nlbench run --measures affinity,cka,sparsity,pathlength --data digits --samples 64 \
        --model vgg8,resnet18-w8,resnet20,torchvision/resnet18,torchvision/mobilenet_v3_small,\
    torchvision/googlenet,torchvision/convnext_tiny --out runs/networks
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

import nlbench
from nlbench.reports.page import write_page

HERE = Path(__file__).parent
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DRAWN = "document.querySelectorAll('#multi figure').forEach(figure => figure.draw && figure.draw())"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/screenshots.py RUN")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    run = nlbench.load_run(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        address = write_page(run, Path(folder, "report.html")).as_uri()
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, scheme, width in (("report", "light", 1280), ("report-dark", "dark", 1280)):
            view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            view.goto(address)
            view.wait_for_timeout(400)
            view.evaluate(DRAWN)
            take(view, HERE / f"{name}.png", width, "#multi")
        view = browser.new_page(viewport={"width": 1280, "height": 800})
        view.goto(address)
        view.wait_for_timeout(400)
        view.evaluate("document.querySelector('#maps-title').scrollIntoView()")
        take(view, HERE / "report-agreement.png", 1280, ".two.agree", "#maps-title")
        browser.close()


def take(view: Page, file: Path, width: int, last: str, first: str = "body") -> None:
    """Take what lies between two elements, in few colours: it is a drawing, not a photograph."""
    edges = "([first, last]) => [document.querySelector(first).getBoundingClientRect().top"
    edges += " + scrollY, document.querySelector(last).getBoundingClientRect().bottom + scrollY]"
    top, bottom = view.evaluate(edges, [first, last])
    clip = {"x": 0, "y": max(0, top - 12), "width": width, "height": bottom - top + 36}
    picture = Image.open(io.BytesIO(view.screenshot(full_page=True, clip=clip)))
    picture.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(file, optimize=True)
    print(file)


if __name__ == "__main__":
    main()
