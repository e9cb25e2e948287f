"""The page: self-contained, escaped, complete."""

import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from made_records import make_record
from made_runs import make_run
from made_scores import page_content, page_table, scores_of

from nlbench.cli.common import show_run
from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.reports import page as page_module
from nlbench.reports.exports import to_latex
from nlbench.reports.leaderboard import leaderboard
from nlbench.reports.page import is_current_page, render_page, write_page
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run, load_run

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, ids, visible text and the text of each open tag's innermost section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts += data
        else:
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(text for text in self.texts if text)

    def values(self, *names: str) -> list[str]:
        return [v or "" for _, attrs in self.tags for k, v in attrs.items() if k in names]


@pytest.fixture
def hostile(conftest):
    bad = "</title><script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = conftest.cell_rows((bad, f"w{bad}", "digits", 0), bad, {bad: 0.5, "b": bad})
    rows += conftest.missing_row(("other", "init", "digits", 0), bad, "failed", bad)
    scores = conftest.frame(rows)
    manifest = conftest.manifest_of(scores)
    details = {**conftest.DETAILS["affinity"], "description": bad}
    details["source"] = {"citation": bad, "equation": bad, "bibtex": bad}
    manifest |= {"measures": {bad: details}, "command": bad, "environment": {bad: bad}}
    return conftest.FakeRun(bad, None, scores, manifest)


@pytest.fixture(scope="module")
def html(conftest) -> str:
    return render_page(conftest.realistic_run())


@pytest.fixture
def page(html) -> Page:
    return Page(html)


def test_page_has_no_external_resources(page) -> None:
    links = page.values("href", "src", "xlink:href")
    assert all(value.startswith("#") or value == "data:," for value in links)
    assert not page.values("srcset", "action", "data", "poster", "background")
    code = page.scripts.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"@import|https?:|fetch\(|XMLHttpRequest|WebSocket|import\(", code)
    assert not any(re.search(r"url\((?!#)", value) for value in page.values("style"))
    assert {tag for tag, _ in page.tags} & {"img", "iframe", "object", "base"} == set()


def test_the_browser_is_told_to_load_nothing(page) -> None:
    assert any("default-src 'none'" in value for value in page.values("content"))


def test_links_of_citations_are_plain_text(page) -> None:
    assert "url = {https://example.org/a}" in page.text


@pytest.mark.parametrize("runs", [1, 3])
def test_ids_are_unique_and_references_resolve(conftest, runs) -> None:
    page = Page(render_page([conftest.realistic_run(seeds=(0, 1)) for _ in range(runs)]))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    labels = [name for value in page.values("aria-labelledby") for name in value.split()]
    anchors = {v[1:] for v in page.values("href") if v.startswith("#") and "=" not in v}
    assert anchors | set(labels) <= set(ids)


def test_hostile_names_stay_text(hostile) -> None:
    html = render_page(hostile)
    page = Page(html)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 3  # the data, the program and its start
    assert "img" not in tags
    assert not page.values("onerror")
    assert html.count("<script>alert(1)") == 0
    assert page.text.count("<script>alert(1)</script>") > 10


def test_numbers_of_the_board_match_the_table(page, run) -> None:
    cells = [attrs for tag, attrs in page.tags if tag == "td" and "data-v" in attrs]
    summaries = run.scores.query("place == '' and statistic == 'value' and status == 'ok'")
    assert sorted(float(cell["data-v"] or "") for cell in cells) == sorted(summaries["value"])


def test_the_page_holds_the_tidy_table(html, run) -> None:
    found = page_table(html)
    keys = ["model", "weights", "data", "seed", "measure", "place", "statistic"]
    left = found.drop(columns="run").set_index(keys).sort_index()
    right = run.scores.set_index(keys).sort_index()
    assert left.index.equals(right.index)
    np.testing.assert_array_equal(left["value"].to_numpy(float), right["value"].to_numpy(float))
    for column in ("n", "status", "reason"):
        assert left[column].tolist() == right[column].tolist()


def test_rows_of_the_board_follow_the_leaderboard(html, run) -> None:
    rows = leaderboard(scores_of(run.scores, run.manifest["measures"]))
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    found = re.findall(r'data-row="(\d+)".*?data-v="([\d.]+)"', body, re.DOTALL)
    assert [int(index) for index, _ in found] == list(range(6))
    values = [float(value) for _, value in found]
    assert values == sorted(values) == [row.entries["affinity"].value for row in rows]


def test_missing_cells_are_listed_with_reasons(page) -> None:
    listed = page.text[page.text.index("Missing values (") :]
    assert "hardswish at features.0.2: not piecewise affine" in listed
    assert "failed out of memory" in listed
    assert "vgg8 · init layer0.2.relu, layer1.2.relu undefined constant output" in listed


def test_a_complete_run_says_that_nothing_is_missing(conftest) -> None:
    scores = conftest.frame(conftest.cell_rows(("a", "init", "d", 0), "affinity", {"relu": 0.5}))
    run = conftest.FakeRun("whole", None, scores, conftest.manifest_of(scores, ["affinity"]))
    text = Page(render_page(run)).text
    assert "Every cell and every place has a value." in text
    assert "1 network, 1 measure, d, 512 samples" in text


def test_places_with_one_reason_are_named_together(conftest) -> None:
    sites = {f"act{i}": "constant output" for i in range(9)} | {"last": 0.5}
    scores = conftest.frame(conftest.cell_rows(("a", "init", "d", 0), "affinity", sites))
    run = conftest.FakeRun("r", None, scores, conftest.manifest_of(scores, ["affinity"]))
    assert "act0, act1, act2, act3, act4, act5 and 3 more" in Page(render_page(run)).text


def test_page_shows_settings_of_numbers(page, html) -> None:
    for fact in (
        "nlbench run --measures affinity,absdev,pathlength --model vgg8",
        "2026-03-04T10:20:30+00:00",
        "reduction = spatial, batch = 128",
        "shrinkage = ledoit-wolf, ridge = 1e-06",
        "parameters 174116",
        "8×8 digits, enlarged to 32×32, three channels, normalised",
        "commit 0123456789abcdef",
        "@article{absdev}",
    ):
        assert fact in page.text


def test_measures_are_explained_with_direction_and_source(page) -> None:
    text = page.text
    assert "↓ more nonlinear · 0 to 1 · probe sites · shrinkage = ledoit-wolf" in text
    assert "↑ more nonlinear · grows with the logits · at least 0 · probe lines · Gamba" in text
    assert "Gamba et al., 2022, eq. 3" in text


def test_a_run_without_anything_still_gives_a_page(conftest) -> None:
    text = Page(render_page(conftest.FakeRun("empty"))).text
    assert "No scores have been recorded." in text
    assert "0 networks, 0 measures" in text


def test_failed_runs_give_a_page(conftest) -> None:
    rows = []
    for name in ("affinity", "absdev", "pathlength"):
        rows += conftest.missing_row(("a", "init", "d", 0), name, "failed", f"no memory for {name}")
    scores = conftest.frame(rows)
    run = conftest.FakeRun("bad", None, scores, conftest.manifest_of(scores))
    page = Page(render_page(run))
    assert not any("strip" in value for value in page.values("class"))
    for name in ("affinity", "absdev", "pathlength"):
        assert f"failed no memory for {name}" in page.text


def test_seeds_of_a_network_make_one_row(conftest) -> None:
    page = Page(render_page(conftest.realistic_run(seeds=(0, 1, 2))))
    assert len(page.values("data-row")) == 6
    assert "init · 3 seeds" in page.texts
    assert "6 networks (18 with their seeds)" in page.text


@pytest.mark.parametrize(
    ("weights", "title"), [("trained", "vgg8 trained on digits"), ("init", "vgg8 (init) on digits")]
)
def test_single_pages_are_titled_by_their_network(conftest, weights, title) -> None:
    rows = conftest.cell_rows(("vgg8", weights, "digits", 0), "affinity", {"relu": 0.5})
    scores = conftest.frame(rows)
    run = conftest.FakeRun("whole", None, scores, conftest.manifest_of(scores, ["affinity"]))
    assert f"<title>{title}: nonlinearity</title>" in render_page(run)


def test_single_pages_show_the_mean_over_seeds(conftest) -> None:
    rows = []
    for seed, shift in ((0, -0.2), (1, 0.1), (2, 0.1)):
        subject = ("net", "init", "digits", seed)
        sites = {"a": 0.5 + shift, "b": 0.9, "c": 0.8, "d": 0.85}
        rows += conftest.cell_rows(subject, "affinity", sites)
    scores = conftest.frame(rows)
    run = conftest.FakeRun("r", None, scores, conftest.manifest_of(scores, ["affinity"]))
    page = Page(render_page(run))
    assert "0.76 ± 0.03 (3 seeds)" in page.texts
    assert "By affinity, 4 activations lie in 0.50–0.90" in page.text
    assert page.texts.count("0.50") == 1  # the strip


@pytest.mark.parametrize(("of", "noun"), [("blocks", "block"), ("h.*", "module")])
def test_places_are_named_after_what_was_measured(conftest, of, noun) -> None:
    sites = {f"h.{i}": 0.99 + i / 2000 for i in range(5)}
    scores = conftest.frame(conftest.cell_rows(("net", "init", "d", 0), "affinity", sites))
    manifest = conftest.manifest_of(scores, ["affinity"]) | {"probes": {"sites": {"of": of}}}
    text = Page(render_page(conftest.FakeRun("r", None, scores, manifest))).text
    assert f"By affinity, 5 {noun}s lie in 0.990–0.992." in text


def test_rows_of_several_runs_name_their_run(conftest) -> None:
    first, second = conftest.realistic_run("early"), conftest.realistic_run("late")
    page = Page(render_page([first, second]))
    assert {"early · init", "late · init"} <= set(page.texts)
    assert "12 networks" in page.text


def test_runs_of_one_name_are_told_apart(conftest) -> None:
    twice = [conftest.realistic_run("same"), conftest.realistic_run("same")]
    assert "same (2) · vgg8 · init" in Page(render_page(twice)).text


def test_differently_made_runs_are_marked(conftest) -> None:
    first, second = conftest.realistic_run("early"), conftest.realistic_run("late")
    alike = Page(render_page([first, second])).text
    other = {**conftest.DETAILS["affinity"], "options": {"shrinkage": "none"}}
    measures = {**second.manifest["measures"], "affinity": other}
    second = replace(second, manifest={**second.manifest, "measures": measures})
    differing = Page(render_page([first, second])).text
    assert "The settings of these runs differ" not in alike
    assert "The settings of these runs differ" in differing
    assert "affinity.shrinkage ledoit-wolf early none late" in differing


def test_interrupted_runs_name_the_command_to_resume(conftest, run) -> None:
    command = "nlbench run --measures 'a*' --out <there>"
    manifest = {**run.manifest, "command": command, "unfinished": True}
    page = Page(render_page(replace(run, name="cut", manifest=manifest)))
    assert any(text.startswith("cut was interrupted") for text in page.texts)
    assert command in page.texts
    assert "interrupted" not in render_page(run)


def test_unrequested_measures_are_not_missing(conftest) -> None:
    first, second = conftest.realistic_run("early"), conftest.realistic_run("late")
    del second.manifest["measures"]["pathlength"]
    second.scores = second.scores[second.scores["measure"] != "pathlength"]
    text = Page(render_page([first, second])).text
    assert "nothing is recorded" not in text[text.index("Missing values") :]


def test_numbers_per_logit_are_in_the_table(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "d", 0), "absdev", {"path0": 1.0, "path1": 2.0})
    subject = ("a", "init", "d", 0)
    rows += [
        (*subject, "absdev", "path0", name, value, 8, "ok", "")
        for name, value in {"logit0": 0.25, "logit1": 0.75, "length": 31.5, "q90": 4.0}.items()
    ]
    scores = conftest.frame(rows)
    run = conftest.FakeRun("r", None, scores, conftest.manifest_of(scores, ["absdev"]))
    found = page_table(render_page(run))["statistic"]
    assert {"length", "q90"} <= set(found)
    assert not {"logit0", "logit1"} & set(found)


def test_core_runs_give_a_page_with_readings(tmp_path) -> None:
    result = Result.of(
        [
            Value("relu", {"value": 0.123456, "std": 0.01, "batches": 2.0}, 64),
            Value("relu:1", {"value": 0.654321, "std": 0.02, "batches": 2.0}, 64),
            Value.missing("relu:2", "undefined", "constant output", 64),
        ]
    )
    about = {"name": "affinity", "probe": "sites", "more_means": "less nonlinear"}
    record = make_record(
        key="0",
        subject={"model": "net", "weights": "init", "data": "digits", "seed": 3},
        measure={**about, "bounds": [0.0, 1.0], "version": "1", "options": {}},
        probe={"name": "sites", "options": {"reduction": "spatial"}},
        result=result,
    )
    folder = Run(Manifest(device="cpu").describe_records([record]), [record]).save(
        tmp_path / "saved"
    )
    html = render_page(load_run(folder))
    page = Page(html)
    assert "saved" in page.text
    assert "0.3889" in page.texts  # a record without replicates has no ±
    assert page_table(html)["value"].isin([0.654321]).any()
    assert "constant output" in page.texts


def test_minimal_manifest_is_accepted(conftest, run) -> None:
    bare = conftest.FakeRun("bare", None, run.scores, {"subjects": [{"model": "vgg8"}]})
    assert "vgg8" in Page(render_page(bare)).text


def test_the_same_runs_give_the_same_page(conftest) -> None:
    assert render_page(conftest.realistic_run()) == render_page(conftest.realistic_run())


def test_pages_are_written_whole(run, tmp_path) -> None:
    target = tmp_path / "new" / "report.html"
    assert write_page([run], target) == target
    target.write_text("old")
    write_page([run], target)
    assert target.read_text(encoding="utf-8") == render_page([run])
    assert [file.name for file in target.parent.iterdir()] == ["report.html"]


def test_unrenderable_pages_leave_the_older_one(tmp_path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    made = make_run(1)
    with pytest.raises(RequestError):
        write_page(Run(made.manifest, made.records * 2), target)
    assert target.read_text() == "old"


def test_names_outside_utf8_do_not_stop_the_page(conftest, tmp_path) -> None:
    rows = conftest.cell_rows(("bad\ud800name", "init", "d", 0), "affinity", {"relu": 0.5})
    run = conftest.FakeRun("r", None, conftest.frame(rows), {})
    page = write_page(run, tmp_path / "report.html")
    content = page_content(page.read_text(encoding="utf-8"))
    assert content["subjects"][0]["model"] == "bad?name"


def test_folders_without_a_run_are_refused(run, tmp_path) -> None:
    with pytest.raises(RequestError):
        write_page([run], tmp_path)
    with pytest.raises(RequestError):
        write_page([], tmp_path / "report.html")


def test_long_pages_hold_the_leaderboards_ends(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("nlbench.reports.page.MAX_BYTES", 8 * (500 + 2 * 400))
    run = make_run(20, measures=("absdev", "nlc"), seeds=2, paths=3)
    page = write_page(run, tmp_path / "page.html")
    text = page.read_text()
    assert "the 6 most and the 2 least nonlinear of 20 networks; scores.csv contains all." in text
    assert "Values for individual seeds are only in scores.csv." in text
    content = page_content(text)
    rows = leaderboard(scores_of(run.scores, run.manifest["measures"]))
    labels = [row.label for row in rows]
    assert [row["label"] for row in content["rows"]] == labels[:6] + labels[-2:]
    assert len(content["subjects"]) == 8


def test_four_thousand_networks_fit_in_five_megabytes():
    small, large = (
        len(render_page(make_run(n, measures=("affinity",), sites=5)).encode()) for n in (100, 300)
    )
    assert small + (large - small) / 200 * 3900 < 5_000_000


def test_the_last_networks_places_are_in_the_table(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("nlbench.reports.embedded.MAX_PLACE_VALUES", 5 * 3 * 2)
    page = write_page(make_run(8, measures=("absdev",), paths=3), tmp_path / "page.html")
    assert "Values by place for 3 networks are only in scores.csv." in page.read_text()
    places = page_table(page.read_text(encoding="utf-8")).query("place != ''")
    assert places["model"].nunique() == 5


def test_a_manifest_is_serialized_once_for_a_page(monkeypatch, tmp_path) -> None:
    run = make_run(12, measures=("absdev",))
    reads = Counter()
    original = Manifest.__getitem__
    monkeypatch.setattr(
        Manifest, "__getitem__", lambda self, key: reads.update([key]) or original(self, key)
    )
    write_page(run, tmp_path / "page.html")
    assert reads["subjects"] <= 2


def test_control_characters_of_names_are_not_displayed(conftest) -> None:
    name = "vgg\x1b[31m\u202e8"
    scores = conftest.frame(conftest.cell_rows((name, "init", "d", 0), "affinity", {"a": 0.5}))
    run = conftest.FakeRun("r", None, scores, conftest.manifest_of(scores, ["affinity"]))
    text = render_page(run)
    visible = text[: text.index('<script type="text/plain"')]
    assert "vgg[31m8" in visible
    assert not set("\x1b\u202e") & set(visible)
    latex = to_latex(run)
    assert "vgg[31m8" in latex
    assert not set("\x1b\u202e") & set(latex)


def test_a_page_is_renewed_whatever_its_time(tmp_path, capsys) -> None:
    older, newer = (tmp_path / name / "run" for name in ("older", "newer"))
    make_run(2, measures=("affinity",)).save(older)
    make_run(2, measures=("affinity", "absdev")).save(newer)
    show_run(load_run(older), True)
    page = newer / "report.html"
    page.write_bytes((older / "report.html").read_bytes())
    os.utime(page, (2**32, 2**32))
    assert is_current_page(load_run(older), page)
    show_run(load_run(newer), True)
    assert is_current_page(load_run(newer), page)
    assert "absdev" in Page(page.read_text(encoding="utf-8")).text


def test_current_pages_are_kept_whatever_their_time(tmp_path, capsys) -> None:
    make_run(1, measures=("affinity",)).save(tmp_path / "run")
    run = load_run(tmp_path / "run")
    show_run(run, True)
    os.utime(tmp_path / "run" / "report.html", (0, 0))
    show_run(load_run(tmp_path / "run"), True)
    assert (tmp_path / "run" / "report.html").stat().st_mtime == 0


@pytest.mark.parametrize("old", ["pipe", "folder", "text", "missing"])
def test_non_page_file_is_no_current_page(run, tmp_path, old) -> None:
    page = tmp_path / "report.html"
    if old == "pipe":
        os.mkfifo(page)
    elif old == "folder":
        page.mkdir()
    elif old == "text":
        page.write_text("old")
    assert not is_current_page(run, page)


def test_the_bibtex_of_a_page_begins_with_nlbench(html):
    text = re.search(r'id="bibtex">(.*?)</pre>', html, re.S)[1]
    assert text.startswith("@software{nlbench,")
    assert text.index("@software") < text.index("@article{affinity")


@pytest.mark.parametrize("networks", [1, 2])
def test_unknown_errors_are_named(networks):
    run = make_run(networks, measures=("affinity", "r2"))
    note = "Where ± is missing, the error is unknown: r2."
    assert note not in render_page(run)
    bare = [
        replace(record, result=replace(record.result, replicates=(), values=()))
        if record.measure.name == "r2"
        else record
        for record in run.records
    ]
    assert note in render_page(Run(run.manifest, bare))


def test_measures_that_disagree_lead_to_the_questions(html, monkeypatch):
    assert 'id="which-measure"' in html
    assert "How nonlinear are its activations?" in html
    link = 'href="#which-measure"'
    assert (link in html) == ("disagree: " in html)
    monkeypatch.setattr(page_module, "findings", lambda *_: ["a and b disagree: yes."])
    assert link in render_page(make_run(2))


def test_other_statistics_have_a_legend(conftest):
    content = page_content(render_page(make_run(2)))
    shown = {name for cells in content["cells"] for cell in cells for name in cell.get("t", {})}
    assert set(content["statistics"]) <= shown
