"""Every Python block of README.md and docs/ runs as it stands there."""

import csv
import inspect
import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest
import typer
from commands import call

import nlbench
from nlbench import registry
from nlbench.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    for page in PAGES
}

# What a reader has: models, inputs, a segment, training data, labelled items, texts.
READERS = """
import torch as _torch

_torch.manual_seed(0)

def _network():
    layers = (_torch.nn.Linear(4, 8), _torch.nn.ReLU(), _torch.nn.Linear(8, 3))
    return _torch.nn.Sequential(*layers)

model, other = _network(), _network()
inputs = _torch.randn(16, 4)
start, end = inputs[0], inputs[1]
batches = [(inputs, _torch.arange(16) % 3)]
criterion = _torch.nn.CrossEntropyLoss()
items = [(_torch.rand(3, 32, 32), 0)]
"""

# Only for the blocks that use it, since its import takes longer than a block.
READERS_OF_TEXT = """
import transformers as _transformers

gpt = _transformers.GPT2LMHeadModel(
    _transformers.GPT2Config(vocab_size=128, n_embd=16, n_layer=2, n_head=2)
)
texts = [f"The square of {i} is {i * i}." for i in range(40)]

def tokenize(texts):
    ids = _torch.tensor([list(text[:20].ljust(24, chr(0)).encode()) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}
"""

# These are called by the registry; here the page's last lines call them.
USES = {
    "docs/models-and-data.md": "mine()(_torch.rand(2, 3, 8, 8)); blobs(0.1)",
    "docs/plugins.md": """
import nlbench
nlbench.evaluate(model, inputs, [Energy, LargestChange])
mynet()(_torch.rand(2, 3, 8, 8)); mydata(); seeds_of(["vgg8"], ["0-3"])
""",
    "docs/studies.md": """
from pathlib import Path
from nlbench.studies.framework import Context
study = Wider()
study.analyse(study.measure(Context(Path("studies"), "wider", True)))
""",
}
IS_A_SERVICE = ("cluster.py",)
"""Blocks that wait for a cluster."""


@pytest.mark.parametrize(
    "page", [str(page.relative_to(ROOT)) for page, blocks in BLOCKS.items() if blocks]
)
def test_the_python_of_a_page_runs(page, tmp_path):
    blocks = BLOCKS[ROOT / page]
    for block in blocks:
        compile(block, page, "exec")
    if page == "docs/report.md":
        made = call(
            "run", "--measures", "affinity,absdev,r2", "--model", "vgg8,resnet18-w4",
            "--data", "digits", "--samples", "32", "--set", "lines.number=1",
            "--set", "lines.anchors=2", "--out", "runs/first", cwd=tmp_path,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    parts = [block for block in blocks if not any(name in block for name in IS_A_SERVICE)]
    script = tmp_path / "page.py"
    # Each block begins with the reader's names.
    names = re.compile(r"\b(gpt|texts|tokenize)\b")
    parts = [READERS_OF_TEXT * bool(names.search(part)) + part for part in parts]
    script.write_text("\n".join(READERS + part for part in [*parts, USES.get(page, "")]))
    done = call(cwd=tmp_path, script=str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs" / "tutorials").glob("*.py"))])
def test_the_commands_of_a_page_parse(page):
    text = re.sub(r"\\\n[# ]*", "", page.read_text(encoding="utf-8"))
    is_page = page.suffix == ".md"
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.S | re.M) if is_page else [text]
    commands = typer.main.get_command(app).commands
    for line in re.findall(r"^(?:#    )?(nlbench .*)$", "\n".join(blocks), re.M):
        _, name, *arguments = shlex.split(line, comments=True)
        assert commands[name].make_context(name, arguments).info_name == name


def test_the_api_page_lists_every_public_name():
    listed = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8").split()
    assert set(nlbench.__all__) <= set(listed)


def test_the_readme_counts_measures_and_defects():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    defects = (ROOT / "docs" / "defects.md").read_text(encoding="utf-8").count("| `tests/")
    claims = [entry.claims[0].value for entry in registry.entries("measures").values()]
    measures = sum(claim.startswith("nlbench.") for claim in claims)
    assert f"computes {measures} measures" in readme
    assert f"For each of {defects}" in readme


def test_the_tests_that_pages_name_exist():
    for page in PAGES:
        for file, name in re.findall(r"`(tests/\S+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (page, name)


def test_planted_ladder_has_the_versions_of_the_measures():
    with (ROOT / "docs" / "planted_ladder.csv").open(encoding="utf-8") as file:
        versions = {(row["measure"], row["version"]) for row in csv.DictReader(file)}
    assert versions
    for name, version in versions:
        current = registry.load("measures", name).version
        assert version == current, f"run python docs/planted_ladder.py {name}"


MEASURES = [
    name
    for name, entry in registry.entries("measures").items()
    if entry.claims[0].value.startswith("nlbench.measures.")
]


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_documents_its_definition_and_limits(name):
    text = inspect.cleandoc(registry.load("measures", name).__doc__)
    for section in ("Definition", "Units", "Undefined", "Cost", "Limits"):
        assert f"\n{section}\n{'-' * len(section)}\n" in text, section


def test_the_recorded_runs_of_the_leaderboard_are_runs(tmp_path):
    files = sorted((ROOT / "docs" / "leaderboard").glob("*.tar.xz"))
    assert {file.name.partition(".")[0] for file in files} >= {"torchvision", "vgg8", "zoo"}
    assert sum(file.stat().st_size for file in files) < 2_000_000
    for file in files:
        with tarfile.open(file) as packed:
            packed.extractall(tmp_path, filter="data")
        run = nlbench.load_run(tmp_path / file.name.partition(".")[0])
        assert any(record.result.status == "ok" for record in run.records)
        assert "/work" not in json.dumps(dict(run.manifest))
