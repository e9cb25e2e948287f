r"""Take the pictures of the page that README and docs show.

``python docs/screenshots.py NETWORKS SINGLE`` takes them of the folders of two runs, into this
folder. Needs playwright and Chromium. The runs behind those that are there:

    nlbench run --measures affinity,cka,sparsity,pathlength --data digits --samples 64 \
        --model vgg8,resnet18-w8,resnet20,torchvision/resnet18,torchvision/mobilenet_v3_small,\
    torchvision/googlenet,torchvision/convnext_tiny --out runs/networks
    nlbench run --measures affinity,absdev --model vgg8 --out runs/single
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import nlbench
from nlbench.reports.page import write_page

HERE = Path(__file__).parent
WIDTH = 1280
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DRAWN = "document.querySelectorAll('#multi figure').forEach(figure => figure.draw && figure.draw())"


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/screenshots.py NETWORKS SINGLE")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        networks, single = (
            opened(browser, write_page(nlbench.load_run(run), Path(folder, f"{number}.html")))
            for number, run in enumerate(sys.argv[1:])
        )
        take(networks, HERE / "report.png", "#multi")
        take(networks, HERE / "report-agreement.png", ".two.agree", "#maps-title")
        take(single, HERE / "report-single.png", ".cite")
        browser.close()


def opened(browser: Browser, page: Path) -> Page:
    """Open a page and draw all of its figures."""
    view = browser.new_page(viewport={"width": WIDTH, "height": 800})
    view.goto(page.as_uri())
    view.wait_for_timeout(400)
    view.evaluate(DRAWN)
    return view


def take(view: Page, file: Path, last: str, first: str = "body") -> None:
    """Take what lies between two elements, in few colours: it is a drawing, not a photograph."""
    edges = "([first, last]) => [document.querySelector(first).getBoundingClientRect().top"
    edges += " + scrollY, document.querySelector(last).getBoundingClientRect().bottom + scrollY]"
    top, bottom = view.evaluate(edges, [first, last])
    clip = {"x": 0, "y": max(0, top - 12), "width": WIDTH, "height": bottom - top + 36}
    picture = Image.open(io.BytesIO(view.screenshot(full_page=True, clip=clip)))
    picture.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(file, optimize=True)
    print(file)


if __name__ == "__main__":
    main()
