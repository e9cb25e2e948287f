"""The page in a real browser, where there is one."""

import io
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nlbench.reports import page as page_module
from nlbench.reports.estimates import change
from nlbench.reports.leaderboard import leaderboard
from nlbench.reports.page import write_page
from nlbench.reports.tables import read_run
from nlbench.reports.text import plus_minus
from nlbench.serialization.files import spreadsheet_text
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run  # noqa: E402
from made_scores import page_table  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
    pytest.mark.slow,
]
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZE = {"width": 1280, "height": 800}
MILLISECONDS = 120_000
"""Time that the browser may take on a busy machine."""
SCRIPT, FORMULA = "<script>alert(1)</script>", "=cmd|' /C calc'!A0"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(QUIET), timeout=MILLISECONDS
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_page(make_run(8, seeds=2), folder / "eight.html")
    write_page(make_run(1, seeds=2), folder / "one.html")
    run = make_run(2, measures=("affinity", "r2", "absdev", "density"))
    renamed = [_renamed(record) for record in run.records]
    manifest = {**run.manifest, **Manifest().describe_records(renamed)}
    write_page(Run(manifest, renamed), folder / "hostile.html")
    return folder


def _renamed(record):
    measure = record.measure
    if measure.name == "r2":
        measure = replace(measure, name=FORMULA)
    subject = replace(record.subject, model=SCRIPT + record.subject.model)
    return replace(record, subject=subject, measure=measure)


def board_of(run):
    """The rows of a run's leaderboard and the metadata of its measures."""
    scores = read_run(run)
    return leaderboard(scores), scores.measures


class Seen:
    """A page with everything that it said and asked for."""

    def __init__(self, browser, path, hash="", **context):
        self.context = browser.new_context(**{"viewport": SIZE, **context})
        self.context.set_default_timeout(MILLISECONDS)
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = path.as_uri()
        self.open(hash)

    def open(self, hash=""):
        """Open the page as if it had not been open before."""
        self.page.goto("about:blank")
        self.said.clear()
        self.asked.clear()
        self.page.goto(self.address + hash)
        self.page.wait_for_function("typeof update === 'function'")  # the data are unpacked
        self.wait()

    def wait(self):
        """Wait for what the page draws when it is idle, and when a figure comes into view."""
        self.page.evaluate(
            "(async () => { for (let i = 0; i < 3; i++) {"
            " await new Promise(done => setTimeout(done, 0));"
            " await new Promise(done => requestAnimationFrame(done)); } })()"
        )

    def names(self):
        rows = "#board tbody tr[data-row]:not([hidden]) th a"
        return self.page.locator(rows).all_inner_texts()

    def column(self, number):
        cells = f"#board tbody tr[data-row]:not([hidden]) > :nth-child({number})"
        return self.page.locator(cells).evaluate_all("all => all.map(td => td.dataset.v)")

    def hash(self):
        return self.page.evaluate("location.hash")


@pytest.fixture(scope="module")
def of_eight(browser, files):
    seen = Seen(browser, files / "eight.html")
    yield seen
    seen.context.close()


@pytest.fixture
def eight(of_eight):
    # A tab opened anew takes thrice as long as its page. The page keeps nothing but its address.
    seen = of_eight
    seen.open()
    yield seen
    seen.page.emulate_media(media="null", color_scheme="null")
    seen.page.set_viewport_size(SIZE)
    assert seen.page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert seen.said == []
    elsewhere = [url for url in seen.asked if not url.startswith((seen.address, "blob:", "data:"))]
    assert elsewhere == []


def shown_values(page):
    """Every element of the page that bears a number, with the number it stands for."""
    return page.evaluate(
        """() => [...document.querySelectorAll('[data-v]')].map(e => {
            const tr = e.closest('tr'), text = (e.querySelector('b') || e).firstChild.data;
            return {exact: Number(e.dataset.v), text, row: tr.dataset.row || null};
        })"""
    )


def is_rounding(text, value):
    """Whether a text is the number to the digits that it shows, before its error."""
    text = text.partition(" ± ")[0].replace(",", "").replace("−", "-").lstrip("+")
    read = float(text)
    digits = re.sub(r"e.*", "", text).partition(".")[2]
    power = int(text.partition("e")[2] or 0)
    return abs(read - value) <= 0.500001 * 10.0 ** (power - len(digits))


def test_every_number_on_the_page_is_the_tables(browser, files, eight):
    scores = page_table((files / "eight.html").read_text(encoding="utf-8"))
    summaries = scores[(scores["place"] == "") & (scores["statistic"] == "value")]
    resources = summaries.groupby(["model", "measure"])["value"].mean()
    known = {round(v, 12) for v in [*summaries["value"], *resources, *scores["value"]] if v == v}
    eight.page.evaluate("setList('open', ROWS.map(row => row.label)); update()")
    for label in ("vgg8", "torchvision/convnext8 · seed 1"):
        eight.page.evaluate("label => { state.subject = label; update(); }", label)
        found = shown_values(eight.page)
        assert len(found) > 8 * 10 + 16 * 10
        for one in found:
            assert round(one["exact"], 12) in known
            assert is_rounding(one["text"], one["exact"]), one


def test_script_output_equals_python_output(eight):
    before = eight.page.locator("#board td.num b").all_inner_texts()
    eight.page.evaluate("drawCells()")
    assert eight.page.locator("#board td.num b").all_inner_texts() == before


def test_the_script_formats_no_values():
    script = (Path(page_module.__file__).parent / "templates" / "page.js").read_text()
    # Coordinates and the numbers at axes are all that it rounds.
    axes = script[script.index("function ticks(") : script.index("/* Returns an axis")]
    rest = script.replace(axes, "")
    assert "toPrecision" not in rest
    assert "toLocaleString" not in rest
    assert "toExponential" not in rest


def test_a_header_sorts_by_mouse_and_by_keyboard(eight):
    header = eight.page.locator("#board thead th.num button").nth(6)
    assert header.inner_text() == "absdev"
    header.click()
    values = [float(v) for v in eight.column(9)]
    assert values == sorted(values, reverse=True)
    assert eight.page.locator("#board th[aria-sort]").get_attribute("aria-sort") == "descending"
    header.focus()
    eight.page.keyboard.press("Enter")
    assert [float(v) for v in eight.column(9)] == values[::-1]
    assert "sort=absdev" in eight.hash()


def test_missing_numbers_stay_last_in_any_order(eight):
    header = eight.page.locator("#board thead th.num button").nth(7)
    for _ in range(2):
        header.click()
        values = eight.column(10)
        assert values[-3:] == [None] * 3
        assert None not in values[:-3]


def test_view_settings_are_kept_in_the_address(eight, browser, files):
    page = eight.page
    page.fill("#filter", "torch")
    page.click("[data-menu=family] summary")
    for family in ("resnet", "swin"):
        page.check(f"[data-facet=family][value={family}]")
    page.keyboard.press("Escape")
    page.click("[data-menu=measures] summary")
    page.uncheck("[data-column-box='2']")
    page.keyboard.press("Escape")
    page.click("[data-set=show][data-value=ranks]")
    assert sorted(eight.names()) == ["resnet8", "swin8"]
    other = Seen(browser, files / "eight.html", eight.hash())
    assert other.names() == eight.names()
    assert not other.page.locator("#board thead th[data-column='2']").is_visible()
    ranks = other.page.locator("#board tbody tr:not([hidden]) td:nth-child(3) b").all_inner_texts()
    assert all(re.fullmatch(r"=?\d", rank) for rank in ranks)
    assert other.page.input_value("#filter") == "torch"
    other.context.close()


def test_differences_to_a_chosen_row(eight):
    eight.page.select_option("#base", "vgg8")
    cells = "#board tr[data-row='{}'] td:nth-child(3)"
    rows = eight.page.evaluate("ROWS.map(row => [row.label, num(row.cells[0].value)])")
    base = dict(rows)["vgg8"]
    for index, (label, value) in enumerate(rows):
        text = eight.page.locator(cells.format(index)).locator("b").inner_text()
        if label == "vgg8":
            assert not text.startswith("+")
        else:
            assert is_rounding(text.rstrip("abcdefgh†"), value - base)


def test_seeds_open_under_their_network(eight):
    button = eight.page.locator("tr[data-row='0'] button.seeds")
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert eight.page.locator("tr.seed th").all_inner_texts() == ["seed 0", "seed 1"]
    values = eight.page.locator("tr.seed td:nth-child(3)").evaluate_all(
        "a => a.map(e => e.dataset.v)"
    )
    mean = float(eight.column(3)[0])
    assert sum(map(float, values)) / 2 == pytest.approx(mean, rel=1e-12)


def test_strips_of_seeds_show_their_mean(eight):
    fields = "#board tr[data-row='0'] td.print .strip i"
    read = "a => a.map(e => e.className)"
    written = eight.page.locator(fields).evaluate_all(read)
    assert len(written) > 4
    eight.page.evaluate("drawnStrips[0] = ''; refreshStrip(0)")
    assert eight.page.locator(fields).evaluate_all(read) == written
    means, seeds = eight.page.evaluate(
        "(() => { const m = measureIndex(state.strip); return [placeValues(rowCell(0, m)),"
        " ROWS[0].subjects.map(s => placeValues(cellOf(s, m)))]; })()"
    )
    assert len(seeds) == 2
    assert means == pytest.approx(np.mean(seeds, axis=0), rel=1e-12)


def test_copied_text_equals_shown_text(eight):
    page = eight.page
    page.evaluate("navigator.clipboard && (navigator.clipboard.writeText = async () => {})")

    def copied(name):
        page.click(f"#cite-controls button:text-is('{name}')")
        eight.wait()
        return page.evaluate("copied")

    table = pd.read_csv(io.StringIO(page.evaluate("asCsv()")))
    assert len(table) == 8
    assert table["affinity"].tolist() == [float(v) for v in eight.column(3)]
    markdown = copied("Markdown").splitlines()
    assert len(markdown) == 10
    first = page.locator("#board td.num b").first.inner_text()
    assert f"| {first} |" in markdown[2]
    latex = copied("LaTeX")
    assert latex == make_run(8, seeds=2).to_latex(error=True)
    page.fill("#filter", "vgg")
    assert copied("Link").endswith("#q=vgg")


def test_the_tidy_table_can_be_taken_away(eight, files):
    page = eight.page
    page.click("[data-menu=download] summary")
    with page.expect_download() as download:
        page.click("text=all numbers, tidy (CSV)")
    taken = pd.read_csv(download.value.path(), keep_default_na=False, na_values={"value": [""]})
    held = page_table((files / "eight.html").read_text(encoding="utf-8"))
    assert len(taken) == len(held)
    pd.testing.assert_series_equal(taken["value"].astype(float), held["value"].astype(float))
    assert taken["place"].tolist() == held["place"].tolist()


def test_a_figure_can_be_taken_away(eight):
    for kind, begins in (("SVG", b"<svg"), ("CSV", b"point")):
        with eight.page.expect_download() as download:
            eight.page.locator("#scatter .tools button", has_text=kind).click()
        assert Path(download.value.path()).read_bytes().startswith(begins)


def test_paths_are_marks_for_measures_of_lines(eight):
    page = eight.page
    page.select_option("#pick-x", "absdev")
    page.select_option("#pick-y", "curvature")
    page.click("[data-set=by][data-value=place]")
    eight.wait()
    assert "one mark per path · n 128" in page.locator("#scatter").inner_text()
    page.select_option("#pick-y", "affinity")
    eight.wait()
    assert "one mark per network" in page.locator("#scatter").inner_text()


def test_a_network_has_a_page_of_its_own(eight):
    eight.page.locator("#board tbody th a", has_text="vgg8").click()
    subject = eight.page.locator("#subject")
    assert subject.is_visible()
    assert "layer0.0.act1" in subject.inner_text()
    assert subject.locator("svg.chart").count() >= 1
    assert eight.hash().startswith("#subject=vgg8")
    eight.page.keyboard.press("Escape")
    assert not subject.is_visible()


def test_two_seeds_have_one_value_everywhere(eight):
    eight.open()
    row = eight.page.locator("#board tbody tr[data-row]").first
    label = row.locator("th a").inner_text()
    board = row.locator("td.num").first.locator("b").inner_text()
    row.locator("th a").click()
    numbers = eight.page.locator("#subject table").first.locator("tr", has_text="affinity")
    texts = [numbers.locator("td").nth(i).inner_text() for i in range(4)]
    value, interval, spread, rank = texts
    assert float(value.partition(" ± ")[0]) == float(board)
    assert " to " in interval
    assert rank
    low, high = map(float, interval.split(" to "))
    assert low <= float(board) <= high
    assert "–" in spread
    assert "Mean of 2 seeds" in eight.page.locator("#subject").inner_text()
    curve = eight.page.locator("#multi figure", has_text=label).first
    curve.scroll_into_view_if_needed()
    eight.wait()
    least, most = re.search(r"([\d.]+) to ([\d.]+)", curve.inner_text()).groups()
    assert float(least) <= float(board) <= float(most)


def test_differences_have_paired_errors(eight):
    run = make_run(8, seeds=2)
    rows, measures = board_of(run)
    eight.page.select_option("#base", rows[0].label)
    cells = "#board tr[data-row='{}'] td.num"
    names = list(measures)
    for index, row in enumerate(rows[1:], 1):
        for column, name in enumerate(names):
            entries = rows[0].entries[name], row.entries[name]
            if any(entry.status != "ok" for entry in entries):
                continue
            found = change(*entries)
            texts = eight.page.locator(cells.format(index)).nth(column).inner_text()
            shown = " ".join(texts.split()).replace("†", "")
            expected = plus_minus(found.value, found.error, signed=True)
            assert re.sub(r"(?<=\d)[a-h]", "", shown) == expected
        break


def test_networks_are_laid_over_each_other(eight):
    page = eight.page
    page.locator("#multi").scroll_into_view_if_needed()
    eight.wait()
    for place in (0, 1):
        page.locator("#multi figcaption button").nth(place).click()
    eight.wait()
    assert page.locator("#over .keys li").count() == 2
    assert page.locator("#over svg.chart").count() == 3  # two keys and the figure
    assert page.locator("#multi [aria-pressed=true]").count() == 2


def test_pairs_of_measures_are_chosen_in_the_heatmap(eight):
    page = eight.page
    page.locator(".heats:not([hidden]) td[data-pair='0,2'] button").click()
    eight.wait()
    assert "affinity vs. cka" in page.locator("#scatter").inner_text()
    page.click("[data-agree=pearson]")
    eight.wait()
    assert "one mark per activation" in page.locator("#scatter").inner_text()


@pytest.mark.parametrize("width", [390, 900, 1440])
def test_page_never_scrolls_sideways(eight, width):
    eight.page.set_viewport_size({"width": width, "height": 900})
    eight.open()
    assert eight.page.evaluate("document.documentElement.scrollWidth") <= width
    assert eight.page.locator("#board td.num b").first.is_visible()


def test_narrow_pages_show_the_selected_measure(eight):
    eight.page.set_viewport_size({"width": 390, "height": 900})
    eight.open()
    names = eight.page.locator("#one option").all_inner_texts()
    for index in (0, len(names) - 1):
        eight.page.select_option("#one", names[index])
        eight.wait()
        shown = eight.page.locator("#board thead th.num:visible")
        assert shown.count() == 1
        assert names[index] in shown.inner_text()
        wide = eight.page.locator(".wide:has(#board)")
        assert wide.evaluate("box => box.scrollWidth <= box.clientWidth")
    eight.page.set_viewport_size({"width": 1440, "height": 900})
    assert eight.page.locator("#board thead th.num:visible").count() == len(names)
    assert not eight.page.locator("#one").is_visible()


def test_cells_show_their_record_by_mouse_and_keyboard(eight):
    page, dialog = eight.page, eight.page.locator("#record")
    page.locator("#board td.none").first.click()
    assert "not piecewise affine" in dialog.inner_text()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.locator("#board td.num").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    text = dialog.inner_text()
    label = page.evaluate("ROWS[order[1]].label")
    assert text.startswith(f"r2 of {label}")
    assert text.count("cells/") == 2  # one of each seed
    assert "version 1" in text
    page.keyboard.press("Escape")


def test_a_training_has_a_curve_of_each_measure(browser, tmp_path, conftest):
    rows = []
    for epoch in (0, 3, 10):
        for seed in (0, 1):
            subject = ("mlp", f"seed{seed}/epoch{epoch}.pt", "digits", 0)
            sites = {"net.1": 0.9 - 0.03 * epoch + 0.01 * seed, "net.3": 0.8}
            rows += conftest.cell_rows(subject, "affinity", sites)
            rows += conftest.cell_rows(subject, "pathlength", {"net.1": 4.0, "net.3": 2.0})
    table = conftest.frame(rows)
    manifest = conftest.manifest_of(table, ("affinity", "pathlength"))
    run = conftest.FakeRun("training", None, table, manifest)
    seen = Seen(browser, write_page([run], tmp_path / "training.html"))
    assert seen.names() == ["mlp", "mlp", "mlp"]
    about = seen.page.locator("#board tbody th small").all_inner_texts()
    assert [text.split(" 2")[0] for text in about] == ["epoch 0", "epoch 3", "epoch 10"]
    figures = seen.page.locator("#curves figure")
    assert figures.count() == 1  # the path length is constant
    assert "most changed: net.1" in figures.first.inner_text()
    tips = figures.locator("circle[data-tip]").evaluate_all("all => all.map(e => e.dataset.tip)")
    assert len(tips) == 3
    assert "epoch 10: affinity 0.703 ± 0.003; 95 % interval 0.671 to 0.734" in tips[-1]
    assert "± over 2 seeds" in tips[-1]
    assert seen.said == []
    seen.context.close()


def test_dark_and_light_themes_differ(eight):
    brightness = {}
    for scheme in ("light", "dark"):
        eight.page.emulate_media(color_scheme=scheme)
        style = "getComputedStyle(document.documentElement)"
        colours = eight.page.evaluate(f"[{style}.backgroundColor, {style}.color]")
        brightness[scheme] = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours]
    assert brightness["light"][0] > 600 > 200 > brightness["light"][1]
    assert brightness["dark"][0] < 200 < 600 < brightness["dark"][1]


def test_printed_pages_have_all_rows_and_no_controls(eight):
    eight.page.emulate_media(media="print")
    assert not eight.page.locator("#controls").is_visible()
    assert eight.page.locator("#board tbody tr[data-row]").count() == 8


def test_hostile_names_are_shown_and_not_run(browser, files):
    seen = Seen(browser, files / "hostile.html")
    page = seen.page
    assert SCRIPT in page.locator("#multi").inner_text()
    assert FORMULA in page.locator("#board thead").inner_text()
    page.locator("#board tbody th a").first.click()
    assert SCRIPT in page.locator("#subject").inner_text()
    text = page.evaluate("asCsv()")
    assert f"'{FORMULA}" in text
    read = pd.read_csv(io.StringIO(text))
    assert FORMULA in {spreadsheet_text(name) for name in read.columns}
    assert seen.said == []
    seen.context.close()


@pytest.mark.parametrize(
    ("page", "scheme"),
    [("eight.html#subject=vgg8", "light"), ("eight.html#subject=vgg8", "dark"),
     ("one.html", "light")],
)  # fmt: skip
def test_page_has_no_axe_violations(browser, files, page, scheme):
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    from axe_playwright_python.sync_playwright import Axe

    name, _, place = page.partition("#")
    # axe is a script of its own, which the page's policy would refuse
    seen = Seen(browser, files / name, f"#{place}", bypass_csp=True, color_scheme=scheme)
    seen.page.evaluate("$$('details').forEach(one => { one.open = true; })")
    # The schemes differ in colours only.
    rules = {"options": {"runOnly": ["color-contrast"]}} if scheme == "dark" else {}
    violations = Axe().run(seen.page, **rules).response["violations"]
    assert [(v["id"], [node["target"] for node in v["nodes"]][:3]) for v in violations] == []
    seen.context.close()


def test_runs_of_one_number_open(browser, tmp_path):
    run = make_run(1, measures=("pathlength",))
    seen = Seen(browser, write_page(run, tmp_path / "one.html"))
    assert seen.page.locator(".gauge h3").inner_text().split() == ["pathlength", "8", "(exact)"]
    assert not seen.page.locator("#board").count()
    assert seen.said == []
    seen.context.close()


@pytest.mark.parametrize("width", [390, 1440])
def test_single_networks_have_their_own_page(browser, tmp_path, width):
    run = make_run(1, measures=("affinity", "r2", "absdev", "pathlength"))
    path = write_page(run, tmp_path / "one.html")
    seen = Seen(browser, path, viewport={"width": width, "height": 900})
    text = seen.page.locator("header").inner_text()
    assert re.search(r"By affinity, .+ (stand|is the most nonlinear)", text)
    sites = next(r for r in run.records if r.measure.name == "affinity").result.values
    assert seen.page.locator(".fields li").count() == len(sites)
    assert seen.page.locator(".gauge").count() == 4
    assert re.search(r"0\.\d+ ± 0\.\d+", seen.page.locator(".gauge h3").first.inner_text())
    legend = "± is how much a value would change with other samples"
    assert seen.page.locator("main").inner_text().count(legend) == 1
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    for absent in ("difference from", "rank of", "Similar networks", "Do the measures agree"):
        assert absent not in seen.page.locator("main").inner_text()
    cited = seen.page.locator("#cite-text").inner_text()
    assert "affinity" in cited
    assert "nlbench 0.1.0" in cited
    # Each value stands once until a part is opened.
    place = sites[0].place
    assert place not in seen.page.locator("#subject").inner_text()
    seen.page.evaluate("$$('details').forEach(one => { one.open = true; })")
    opened = seen.page.locator("#subject").inner_text()
    assert place in opened
    assert "[object" not in opened
    assert seen.page.locator("#subject .tools").count() >= 1
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    with seen.page.expect_download() as saved:
        seen.page.get_by_role("button", name="signature of", exact=False).first.click()
    content = Path(saved.value.path()).read_bytes()
    assert content.startswith(b"<svg")
    assert seen.said == []
    seen.context.close()


def test_many_networks_are_laid_out_on_demand(browser, tmp_path):
    path = write_page(
        make_run(101, measures=("pathlength", "units"), sites=5), tmp_path / "many.html"
    )
    seen = Seen(browser, path)
    page = seen.page
    assert len(seen.names()) == 60
    page.evaluate("state.sort = 'units'; state.back = '1'; update()")
    shortest = [float(value) for value in seen.column(3)]
    assert shortest == sorted(shortest)
    page.fill("#filter", "vgg")
    assert all("vgg" in name for name in seen.names())
    page.fill("#filter", "")
    assert page.evaluate("asCsv()").count("\n") == 102
    page.click("#more")
    assert len(seen.names()) == 101
    assert "all=1" in seen.hash()
    assert seen.said == []
    seen.context.close()
