"""What runs without PyTorch, and a run of one probe without the code of others."""

import subprocess
import sys

import pytest
from commands import call

# In one process, since each step may only add to what has been imported: what it runs, and the
# libraries that it must not import.
STEPS = {
    "for name in registry.expand('models', ['zoo/*']):\n"
    "    registry.describe(registry.find('models', name))": ("numpy", "transformers"),
    "for group in registry.GROUPS:\n"
    "    for entry in registry.entries(group).values(): registry.describe(entry)": (
        "nlbench.measures.affinity",
    ),
    "registry.expand('models', ['*', 'torchvision/*', 'timm/resnet10t'])": (),
    "run('--help', '--version', 'run --help', 'list measures', 'list probes', 'list')": ("pandas",),
    "import nlbench.subjects.load, nlbench.subjects.weights": (),
    "from nlbench import Option; from nlbench.subjects.data import dataset\n"
    "dataset(options={'size': Option(1)})(lambda size: None)": (),
    "registry.load('datasets', 'text/python')": (),
}
CODE = """
import contextlib, io, sys
from nlbench import registry

def run(*commands):
    from nlbench.cli.app import main
    for words in commands:
        sys.argv = ['nlbench', *words.split()]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main()

for step, libraries in STEPS.items():
    exec(step)
    for library in ('torch', 'torchvision', 'timm', *libraries):
        if library in sys.modules:
            sys.exit(f'{step} imports {library}')
"""


def test_names_and_listings_import_no_libraries():
    command = [sys.executable, "-c", f"STEPS = {STEPS!r}\n{CODE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PROBES = """
import sys, torch, nlbench
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
nlbench.evaluate(model, torch.randn(16, 4), [sys.argv[1]])
names = [name.split(".") for name in sys.modules if name.startswith("nlbench.probes.")]
print(*sorted({name[2] for name in names}))
"""


PAGE = """
import sys, torch, nlbench
sys.modules["pandas"] = None  # An import raises an error.
models = {name: torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU()) for name in "ab"}
run = nlbench.evaluate(models, torch.randn(16, 4), ["norm", "r2"])
run.save("run")
run.report("page.html")
"""


def test_saving_and_reporting_a_run_needs_no_pandas(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PAGE)
    done = call(cwd=tmp_path, script=str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("measure", "absent"),
    [("norm", {"lines", "graph"}), ("pathlength", {"lines"}), ("regions", {"graph"})],
)
def test_a_run_of_one_probe_loads_no_other(measure, absent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROBES)
    done = call(measure, cwd=tmp_path, script=str(script))
    assert done.returncode == 0, done.stderr
    assert not absent & set(done.stdout.split())
