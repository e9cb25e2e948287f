import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import nlbench
from nlbench import registry
from nlbench.errors import RequestError, Undefined
from nlbench.plan import make_plan
from nlbench.request import ExecutionOptions, Request
from nlbench.settings import resolve_settings
from nlbench.subjects.load import build_model, load_dataset, load_subject
from nlbench.subjects.model import declared_info, resolve_arguments
from nlbench.subjects.own import OwnModel
from nlbench.subjects.spec import SubjectSpec

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, in_channels=3, num_classes=10, width: int = 4, act="relu", sizes=(1, 2)):
        super().__init__()
        self.sizes = sizes
        self.act = act
        self.body = nn.Sequential(nn.Conv2d(in_channels, width, 3), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def plan(model: str, **fields):
    fields = {"measures": "r2", "data": "digits", "samples": 8, **fields}
    return make_plan(Request(models=[model], **fields), "cpu", lambda _: None)


def build(model: str, seed: int = 0, **arguments) -> nn.Module:
    return build_model(model, load_dataset("digits"), seed, arguments)


def test_a_file_in_the_folder_is_measured(folder):
    write(folder / "my_net.py", NET)
    request = Request("r2", ["my_net.py"], "digits", samples=16, settings={"model.width": "6"})
    run = nlbench.run(request, folder / "run")
    (record,) = run.records
    assert record.result.status == "ok"
    assert record.subject.model == "my_net.py:Net"
    assert record.subject.arguments == {"width": 6}


@pytest.mark.parametrize("name", ["Net", "make_net", "net", "small.net"])
def test_classes_functions_and_instances_are_networks(folder, name):
    extra = "def make_net(num_classes): return Net(num_classes=num_classes)\nnet = Net()\n"
    write(folder / "my_net.py", NET + extra + "class small: net = net\n")
    assert build(f"my_net.py:{name}").head.out_features == 10


def test_modules_of_packages_are_found_in_the_folder(folder):
    write(folder / "pack" / "__init__.py", "")
    write(folder / "pack" / "blocks.py", NET)
    write(folder / "pack" / "nets.py", "from .blocks import Net\nfrom pack import blocks\n")
    assert build("pack.nets:Net").head.out_features == 10


def test_relative_imports_need_no_package(folder):
    write(folder / "common.py", "WIDTH = 5\n")
    write(folder / "my nets" / "blocks.py", NET)
    write(folder / "my nets" / "my_net.py", "from ..common import WIDTH\nfrom .blocks import Net\n")
    assert build("my nets/my_net.py:Net").head.out_features == 10


def test_installed_modules_are_networks():
    assert build("torchvision.models:resnet18", num_classes=3).fc.out_features == 3


def test_files_of_one_name_are_kept_apart(folder):
    for number in (1, 2):
        write(folder / f"v{number}" / "my_net.py", NET.replace("width: int = 4", "width: int = W"))
        net = folder / f"v{number}" / "my_net.py"
        net.write_text(net.read_text().replace("import torch\n", "from helper import W\n", 1))
        write(folder / f"v{number}" / "helper.py", f"W = {number}\n")
    before = set(sys.modules), list(sys.path)
    widths = [build(f"v{n}/my_net.py:Net").head.in_features for n in (1, 2, 1)]
    assert widths == [1, 2, 1]
    assert (set(sys.modules), sys.path) == before


def test_modules_imported_while_building_are_found(folder):
    late = NET.replace("super().__init__()", "super().__init__()\n        import late")
    write(folder / "my_net.py", late)
    write(folder / "late.py", "")
    assert build("my_net.py:Net")
    assert "late" not in sys.modules


def test_a_file_may_be_named_like_a_library(folder):
    write(folder / "random.py", NET + "import random\nrandom.Random\n")
    assert build("random.py:Net")
    assert "nlbench" not in str(sys.modules["random"].__file__)


def test_instances_are_built_anew_for_each_seed(folder):
    write(folder / "my_net.py", NET + "net = Net()\n")
    first, other, again = (build("my_net.py:net", seed).head.weight for seed in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_loaded_statistics_are_not_fresh(folder):
    norm = "import torch\nfrom torch import nn\ndef net(): return nn.Sequential(layer, nn.ReLU())\n"
    write(folder / "my_net.py", norm + "layer = nn.BatchNorm2d(3)\nlayer.running_mean.fill_(1.0)\n")
    subject = load_subject(SubjectSpec("my_net.py:net", "init", "digits"), torch.device("cpu"))
    assert subject.facts.batch_norm == "statistics as built"


def test_planning_runs_nothing(folder):
    trace = folder / "executed"
    write(folder / "my_net.py", f"open({str(trace)!r}, 'w')\n{NET}\nx = torch.zeros(4, 3)\n")
    plan("my_net.py", data="my_net.py:x", settings={"model.width": 2})
    registry.describe(registry.find("models", "my_net.py:Net"))
    assert not trace.exists()


@pytest.mark.parametrize("changed", ["my_net.py", "helper.py", "sub/deep.py"])
def test_keys_depend_on_own_files(folder, changed):
    write(folder / "my_net.py", f"def f():\n    import helper\n{NET}")
    write(folder / "helper.py", "from sub import deep\n")
    write(folder / "sub" / "deep.py", "")
    write(folder / "unused.py", "")
    keys = [plan("my_net.py").cells[0].key]
    for name in ("unused.py", changed):
        write(folder / name, (folder / name).read_text() + "# changed\n")
        keys.append(plan("my_net.py").cells[0].key)
    assert keys[0] == keys[1] != keys[2]


def test_the_hash_does_not_depend_on_the_folder(folder):
    for name in ("a", "b"):
        write(folder / name / "my_net.py", NET)
    assert OwnModel("a/my_net.py:Net").fingerprint() == OwnModel("b/my_net.py:Net").fingerprint()


def test_arguments_change_the_key_and_are_converted(folder):
    write(folder / "my_net.py", NET)
    texts, numbers, default = (
        plan("my_net.py", settings=settings).subjects[0]
        for settings in ({"model.width": "8"}, {"my_net.py:Net.width": 8}, {})
    )
    assert texts.spec.arguments == (("width", 8),)
    assert texts.key == numbers.key != default.key


def test_arguments_without_a_plain_default_are_literals(folder):
    write(folder / "my_net.py", NET)
    network = build("my_net.py:Net", act="None", sizes="[3, 4]")
    assert (network.act, network.sizes) == ("None", [3, 4])


@pytest.mark.parametrize("kind", ["double", "bfloat16"])
def test_samples_have_the_networks_precision(folder, kind):
    layers = "nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10)"
    write(folder / "my_net.py", f"from torch import nn\nnet = nn.Sequential({layers}).{kind}()\n")
    request = Request("sparsity,absdev,nlc", ["my_net.py:net"], "digits", samples=16)
    run = nlbench.run(request, folder / "run")
    assert "failed" not in {record.result.status for record in run.records}
    assert run.records[0].result.status == "ok"


TYPED = """
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, Optional, Union
from torch import nn

class Kind(Enum):
    RELU = "relu"
    GELU = "gelu"

@dataclass(frozen=True)
class Config:
    depth: int = 1

class Net(nn.Linear):
    def __init__(
        self, first=1, /, kind: Kind = Kind.RELU, *, plain=Kind.RELU, drop: Optional[float] = None,
        size: Annotated[int, "pixels"] = 3, path: str | None = None, norm: Literal["a", 2] = "a",
        width: Union[int, str] = 7, config: Config = Config(), heads: int = None, tag: str = None,
        act: callable = None, depth: 3 = None,
    ):
        super().__init__(1, 1)
        self.values = dict(locals())
"""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("first", "4", "4"),
        ("kind", "gelu", "Kind.GELU"),
        ("kind", "GELU", "Kind.GELU"),
        ("plain", "gelu", "Kind.GELU"),
        ("drop", "0.5", "0.5"),
        ("drop", "None", "None"),
        ("size", "5", "5"),
        ("path", "007", "007"),
        ("norm", "2", "2"),
        ("width", "5", "5"),
        ("width", "wide", "wide"),
        ("config", "{'depth': 2}", "Config(depth=2)"),
        ("heads", "None", "None"),
        ("heads", "4", "4"),
        ("tag", "None", "None"),
        ("tag", "4", "4"),
        ("act", "None", "None"),
        ("depth", "None", "None"),
        ("depth", "2", "2"),
    ],
)
def test_arguments_have_their_annotated_types(folder, name, text, value):
    write(folder / "my_net.py", TYPED)
    request = Request("r2", ["my_net.py:Net"], settings={f"model.{name}": text})
    (arguments,) = {p.spec.arguments for p in make_plan(request, "cpu", print).subjects}
    assert str(build("my_net.py:Net", **dict(arguments)).values[name]) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kind", "rely"),
        ("plain", "rely"),
        ("drop", "much"),
        ("size", "large"),
        ("norm", "c"),
        ("config", "2"),
        ("config", "{'dept': 2}"),
        ("heads", "many"),
    ],
)
def test_arguments_of_other_types_are_refused(folder, name, text):
    write(folder / "my_net.py", TYPED)
    with pytest.raises(RequestError, match=f"model.{name}"):
        build("my_net.py:Net", **{name: text})


@pytest.mark.parametrize(
    ("text", "settings", "name"),
    [
        (NET, {"model.widht": 8}, "'width'"),
        (NET, {"model.width": "wide"}, r"model\.width"),
        (NET, {"modle.width": 8}, "'model'"),
        ("def Net(): ...\n", {"model.outptu": "a"}, r"model\.output"),
        ("def Net(num_classes, depth, width=3): ...\n", {}, "depth"),
    ],
)
def test_wrong_arguments_are_refused(folder, text, settings, name):
    write(folder / "my_net.py", text)
    with pytest.raises(RequestError, match=name):
        plan("my_net.py:Net", settings=settings)


@pytest.mark.parametrize(
    ("text", "model", "name"),
    [
        ("class Net(:\n", "my_net.py:Net", "SyntaxError"),
        ("class Net(:\n", "my_net.py", "SyntaxError"),
        (NET, "my_net.py:Nte", "'Nte'.*'Net'"),
        (NET + "def make_net(): return Net()\n", "my_net.py", "Net, make_net"),
        ("x = 1\n", "my_net.py", r"nn\.Module"),
        ("\0", "my_net.py:Net", r"my_net\.py"),
    ],
)
def test_unusable_files_are_refused_before_they_run(folder, text, model, name):
    write(folder / "my_net.py", text)
    with pytest.raises(RequestError, match=name):
        plan(model)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("import sys\nsys.exit(3)\n", "my_net.py, line 2"),
        ("\n1 / 0\n", "my_net.py, line 2"),
        ("import no_such_module\n", "my_net.py, line 1"),
        ("import helper\n", "helper.py, line 1"),
    ],
)
def test_errors_of_a_file_name_its_line(folder, text, place):
    write(folder / "helper.py", "wrong\n")
    write(folder / "my_net.py", text + NET)
    with pytest.raises(RequestError, match=place):
        build("my_net.py:Net")


def test_file_output_goes_to_standard_error(folder, capsys):
    write(folder / "my_net.py", NET + "import sys\nprint('hello', len(sys.argv))\n")
    build("my_net.py:Net")
    assert capsys.readouterr() == ("", "hello 1\n")


def test_workers_measure_own_networks(folder):
    write(folder / "my_net.py", NET)
    write(folder / "data.py", "import torch\nx = torch.zeros(12, 3, 8, 8)\n")
    request = Request("norm", ["my_net.py"], ["data.py:x"], seeds=(0, 1))
    execution = ExecutionOptions(executor="processes", workers=1)
    run = nlbench.run(request, folder / "run", execution=execution)
    assert [record.result.status for record in run.records] == ["ok", "ok"]


DATA = """
import torch
from torch.utils.data import (
    BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset
)
x = torch.arange(20.).reshape(10, 2)
y = torch.arange(10) % 3
pair = (x, y)
dataset = TensorDataset(x, y)
loader = DataLoader(dataset, batch_size=4, shuffle=True)
def collate(items): return torch.stack([a for a, _ in items]), torch.tensor([b for _, b in items])
collated = DataLoader(dataset, batch_size=3, collate_fn=collate)
class Stream(IterableDataset):
    def __iter__(self): return iter(dataset)
unbatched = Stream()
stream = DataLoader(unbatched, batch_size=4)
column = TensorDataset(x.double(), y[:, None])
batched = DataLoader([(x[:5], y[:5]), (x[5:], y[5:])], batch_size=None)
batches = [(x[:5], y[:5]), (x[5:], y[5:])]
def make(count: int = 10, scale=None): return x[:count] * (scale or 1), y[:count]
indexed = [(a, b, i) for i, (a, b) in enumerate(zip(x, y))]
unsigned = (x.numpy(), y.numpy().astype("u2"))
swapped = (x.numpy(), y.numpy().astype(">i8"))
half = DataLoader(dataset, 2, sampler=SubsetRandomSampler(range(4)))
dropped = DataLoader(dataset, 4, drop_last=True)
listed = DataLoader(dataset, batch_sampler=[[1, 0], [3]])
class Endless(BatchSampler):
    def __iter__(self):
        while True: yield from super().__iter__()
endless = DataLoader(dataset, batch_sampler=Endless(range(10), 4, False))
halves = [x[:5], x[5:]]
unknown = TensorDataset(x, torch.where(y == 2, -1, y))
declared = TensorDataset(x, torch.where(y == 2, -1, y))
declared.classes = ["a", "b"]
def skip(items): return collate([item for item in items if item[1] == 0])
skipping = DataLoader(dataset, 4, collate_fn=skip)
"""

LINEAR = """
import torch
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(2, 3)
"""


def load_own(folder, name):
    write(folder / "my_data.py", DATA)
    write(folder / "my_net.py", LINEAR)
    spec = SubjectSpec("my_net.py:Net", "init", f"my_data.py:{name}", seed=3, samples=None)
    return load_subject(spec, torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    ["pair", "dataset", "loader", "collated", "stream", "batches", "make", "indexed", "unbatched",
     "column", "batched", "unsigned", "swapped", "endless"],
)  # fmt: skip
def test_all_forms_of_data_yield_the_same_samples(folder, name):
    sample = load_own(folder, name)
    dataset = load_dataset(f"my_data.py:{name}")
    assert dataset.classes == 3
    assert sorted(sample.inputs[:, 0].tolist()) == list(range(0, 20, 2))
    assert torch.equal(sample.inputs[:, 0] / 2 % 3, sample.labels.float())


@pytest.mark.parametrize(
    ("name", "indices"), [("half", range(4)), ("dropped", range(8)), ("listed", [0, 1, 3])]
)
def test_samplers_of_loaders_choose_the_samples(folder, name, indices):
    sample = load_own(folder, name)
    assert sorted(sample.inputs[:, 0].tolist()) == [2 * index for index in indices]


def test_lists_of_two_batches_hold_both(folder):
    sample = load_own(folder, "halves")
    assert sorted(sample.inputs[:, 0].tolist()) == list(range(0, 20, 2))


def test_items_without_classes_leave_out_labels(folder):
    sample = load_own(folder, "unknown")
    assert sample.labels is None
    assert "labels that are no class indices are left out" in sample.facts.preprocessing
    with pytest.raises(Undefined):
        sample.labelled(10)


@pytest.mark.parametrize("name", ["declared", "skipping"])
def test_items_unlike_the_first_are_refused(folder, name):
    with pytest.raises(RequestError, match=name):
        load_own(folder, name)


OPTIONAL = """
import torch
from torch.utils.data import TensorDataset
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(2, 3)
    def forward(self, x, scale=None):
        return super().forward(x if scale is None else x * scale)
class Two(Net):
    def forward(self, x, scale):
        return super().forward(x, scale)
x, y = torch.randn(20, 2), torch.randn(20, 1)
pair = (x, y)
items = TensorDataset(x, y)
triples = TensorDataset(x, y, y)
"""


def load_optional(folder, network, data):
    write(folder / "my_net.py", OPTIONAL)
    spec = SubjectSpec(f"my_net.py:{network}", "init", f"my_net.py:{data}", samples=None)
    return load_subject(spec, torch.device("cpu"))


def test_real_labels_beside_optional_argument_raise(folder):
    with pytest.raises(RequestError, match="optional argument"):
        load_optional(folder, "Net", "items")
    assert load_optional(folder, "Net", "pair").inputs.shape == (20, 2)


@pytest.mark.parametrize("data", ["items", "triples"])
def test_required_arguments_are_not_labels(folder, data):
    subject = load_optional(folder, "Two", data)
    assert subject.inputs.shape == (20, 3)
    assert subject.labels is None


TOKENS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = torch.relu(self.layer(self.embed(input_ids)))
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

random = torch.Generator().manual_seed(0)
ids = torch.randint(0, 20, (80, 6), generator=random)
mask = (torch.arange(6) < torch.randint(2, 7, (80, 1), generator=random)).long()
labels = torch.randint(0, 3, (80,), generator=random)
names = ("input_ids", "attention_mask", "labels")
mappings = [dict(zip(names, sample)) for sample in zip(ids, mask, labels)]
tuples = TensorDataset(ids, mask, labels)
loader = DataLoader(tuples, 16)

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return len(mappings)

    def __getitem__(self, index):
        return mappings[index]

items = Items()
"""


@pytest.mark.parametrize("data", ["tuples", "loader"])
def test_integer_masks_of_items_are_arguments(folder, data):
    write(folder / "tokens.py", TOKENS)
    measures = ("norm", "accuracy", "pathlength")

    def values(data):
        request = Request(measures, ["tokens.py:Net"], [f"tokens.py:{data}"], errors="none")
        run = nlbench.run(request, folder / data)
        return {record.measure.name: record.result.summary for record in run.records}

    expected = values("items")
    assert expected["norm"]
    assert values(data) == expected


def test_random_data_are_the_same_for_all_subjects(folder):
    draw = "torch.tensor([[random.random(), numpy.random.rand(), torch.rand(1)]])"
    write(
        folder / "my_data.py", f"import random, numpy, torch\nx = {draw}\ndef f(): return {draw}\n"
    )
    for name in ("x", "f"):
        first, second = (load_dataset(f"my_data.py:{name}").test[0][0] for _ in range(2))
        assert torch.equal(first, second)


def test_augmented_items_are_the_same_for_all_subjects(folder):
    augmented = """
import random, torch
class Augmented(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.rand(3) + random.random(), index
data = Augmented()
"""
    write(folder / "my_data.py", augmented)
    first, second = (load_dataset("my_data.py:data").sample(4).inputs for _ in range(2))
    assert torch.equal(first, second)
    assert len(first.unique()) > 4


def test_drawn_weights_depend_on_their_seed_alone(folder):
    text = NET.replace("import torch\n", "import torch, numpy\nSHIFT = numpy.random.rand()\n", 1)
    write(folder / "my_net.py", text.replace("self.act = act", "self.act = SHIFT"))
    first = build("my_net.py:Net", seed=1).act
    write(folder / "my_net.py", (folder / "my_net.py").read_text() + "# another version\n")
    assert build("my_net.py:Net", seed=2).act == first


def test_scripted_networks_are_functions(folder):
    text = NET.replace('act="relu", sizes=(1, 2)', "act: int = 0").replace(
        "self.sizes = sizes\n        self.act", "self.act"
    )
    write(folder / "my_net.py", text + "\nnet = torch.jit.script(Net(1))\n")
    spec = SubjectSpec("my_net.py:net", "init", "digits", samples=4)
    assert len(load_subject(spec, torch.device("cpu")).inputs) == 4
    with pytest.raises(RequestError, match="scripted"):
        load_subject(replace(spec, arguments=(("output", "0"),)), torch.device("cpu"))


def test_scripted_networks_of_several_arguments_are_refused(folder):
    write(
        folder / "my_net.py",
        """
import torch
from torch import nn

class Sum(nn.Module):
    def forward(self, x, y):
        return x + y

net = torch.jit.script(Sum())
pairs = [{"x": torch.ones(4, 2), "y": torch.ones(4, 2)}]
""",
    )
    with pytest.raises(RequestError, match="scripted"):
        load_subject(SubjectSpec("my_net.py:net", "init", "my_net.py:pairs"), torch.device("cpu"))


def test_tensors_have_no_labels(folder):
    write(folder / "my_data.py", DATA)
    assert load_dataset("my_data.py:x").sample(4).labels is None


def test_labels_that_are_text_are_left_out(folder):
    write(folder / "my_data.py", "import torch\nx = [(torch.zeros(3), 'cat')]\n")
    dataset = load_dataset("my_data.py:x")
    assert "left out" in dataset.preprocessing
    assert dataset.sample(1).labels is None


def test_functions_of_data_take_arguments(folder):
    write(folder / "my_data.py", DATA)
    assert len(load_dataset("my_data.py:make", {"count": "4", "scale": "2"}).test) == 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x = 3\n", "int"),
        ("import torch\nx = torch.nn.Sequential(torch.nn.ReLU())\n", "Sequential"),
        ("import torch\nx = torch.zeros(0, 3)\n", "n at least 1"),
        ("x = []\n", "nothing"),
        ("x = [({'a': 1}, 1)]\n", r"shape \(1,\)"),
        ("x = [({'a': 'b'}, 1)]\n", "dict"),
    ],
)
def test_unusable_data_are_refused(folder, text, name):
    write(folder / "my_data.py", text)
    with pytest.raises(RequestError, match=name):
        load_dataset("my_data.py:x").sample(1)


def test_path_with_brackets_is_not_a_glob(tmp_path):
    (tmp_path / "x[1]").mkdir()
    file = tmp_path / "x[1]" / "net.py"
    file.write_text("from torch import nn\nclass Net(nn.ReLU): pass\n")
    assert registry.expand("models", [f"{file}:Net"]) == [f"{file}:Net"]


def test_globs_of_files_name_their_networks(folder):
    for name in ("a", "b"):
        write(folder / "nets" / f"{name}.py", NET)
    write(folder / "nets" / "helper.py", "")
    names = ["nets/a.py:Net", "nets/b.py:Net"]
    assert registry.expand("models", ["nets/*.py"]) == names
    assert registry.expand("models", ["nets/[ab].py:Net"]) == names


def test_transformers_adapters_are_named(folder):
    write(folder / "tuned" / "adapter_config.json", "{}")
    with pytest.raises(RequestError):
        registry.load("models", "hf/tuned")


TWO_OUTPUTS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3072, 6)

    def forward(self, x):
        y = self.layer(x.flatten(1)).relu()
        return {"first": y, "second": 2 * y[:, :3]}
"""


def test_a_setting_selects_a_tensor_of_the_output(tmp_path):
    (tmp_path / "two.py").write_text(TWO_OUTPUTS)

    def widths(output):
        settings = {"model.output": output} if output else {}
        name = f"{tmp_path}/two.py:Net"
        info = declared_info(name)
        arguments = tuple(resolve_arguments(name, info, {"output": output}).items())
        spec = SubjectSpec(name, "init", "digits", samples=4, arguments=arguments)
        subject = load_subject(spec, torch.device("cpu"))
        resolved = resolve_settings([], settings, models={name: info})
        assert dict(resolved.models[name]) == dict(arguments)
        return subject.model(subject.inputs).shape[1]

    (tmp_path / "pick.py").write_text("def last(output): return output['second'][:, :2]\n")
    assert widths("first") == 6
    assert widths("second") == 3
    assert widths(f"{tmp_path}/pick.py:last") == 2


def test_files_of_output_functions_are_in_the_key(folder):
    write(folder / "two.py", TWO_OUTPUTS)
    keys = []
    for text in ("def last(output): return output['second']\n", "last = max\n"):
        write(folder / "pick.py", text)
        cells = plan("two.py:Net", settings={"model.output": "pick.py:last"}).cells
        keys.append(cells[0].key)
    assert keys[0] != keys[1]


def test_registered_models_choose_only_an_output():
    info = declared_info("vgg8")
    models = {"vgg8": info}
    resolved = resolve_settings([], {"model.output": "0"}, models=models)
    assert resolved.models == {"vgg8": {"output": "0"}}
    with pytest.raises(RequestError):
        resolve_settings([], {"model.width": "3"}, models=models)


BATCHES = """
import torch
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(24, 4)
y = torch.arange(24) % 3
index = torch.arange(24)
scale = torch.ones(24, 1)
pair = (x, y)
plain = TensorDataset(x, y)

class Items(torch.utils.data.Dataset):
    def __init__(self, make): self.make = make
    def __len__(self): return 24
    def __getitem__(self, i): return self.make(i)

@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor

indexed = DataLoader(TensorDataset(x, y, index), batch_size=5)
mapping = DataLoader(Items(lambda i: {"x": x[i], "label": y[i], "name": f"img{i}"}), batch_size=5)
items = Items(lambda i: {"id": i, "x": x[i], "labels": int(y[i])})
encoding = DataLoader(items, batch_size=5, collate_fn=lambda b: UserDict(
    x=torch.stack([i["x"] for i in b]), labels=torch.tensor([i["labels"] for i in b])))
objects = [Sample(x[:9], y[:9]), Sample(x[9:], y[9:])]
def select(indices): return SimpleNamespace(x=x[indices], target=y[indices])
namespaces = DataLoader(Items(lambda i: i), collate_fn=select)
listed = [{"x": x[i], "target": int(y[i])} for i in range(24)]
nested = [({"x": x[:9]}, y[:9]), ({"x": x[9:]}, y[9:])]
several = DataLoader(TensorDataset(x, scale, y), batch_size=5)
named = [{"x": x, "scale": scale, "y": y, "id": index}]

class One(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, num_classes))
    def forward(self, x): return self.body(x)

class Two(One):
    def forward(self, x, scale): return self.body(x * scale)

class Whole(One):
    def forward(self, batch): return self.body(batch["x"])
"""


@pytest.mark.parametrize(
    ("model", "data"),
    [
        *(("One", name) for name in ("indexed", "mapping", "items", "encoding", "objects")),
        *(("One", name) for name in ("namespaces", "listed", "nested")),
        *(("Two", name) for name in ("several", "named")),
        *(("Whole", name) for name in ("mapping", "listed", "nested", "named")),
    ],
)
def test_batches_of_every_form_are_those_of_tensors(folder, model, data):
    write(folder / "net.py", BATCHES)
    subjects = [
        load_subject(SubjectSpec(f"net.py:{model}", "init", f"net.py:{data}"), torch.device("cpu"))
        for model, data in ((model, data), ("One", "pair"))
    ]
    # Packed inputs have other strides, for which kernels may add in another order.
    torch.testing.assert_close(*(subject.model(subject.inputs) for subject in subjects))
    assert torch.equal(*(subject.labels for subject in subjects))
    assert subjects[0].inputs.is_floating_point()


def test_mappings_are_measured(folder):
    write(folder / "net.py", BATCHES)
    request = Request("r2,accuracy,nlc", models=["net.py:Two"], data="net.py:named")
    run = nlbench.run(request, folder / "run")
    assert [record.result.status for record in run.records] == ["ok"] * 3
    assert "inputs x, scale" in run.records[0].subject.preprocessing


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors", "notes.txt"])
def test_file_without_network_raises(folder, name):
    Path(name).write_bytes(b"PK")
    with pytest.raises(RequestError, match=name):
        registry.find("models", name)
