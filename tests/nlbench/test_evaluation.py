import json
import math

import numpy as np
import pytest
import torch
from commands import call
from torch import nn

import nlbench
from nlbench.errors import PluginError, RequestError
from nlbench.measure import Measure, Result, Value, site_measure
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec


@site_measure()
def good(x, y):
    """Fine."""
    return (y - x).abs().mean()


def test_evaluate_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(40, 4)
    kept = inputs.clone()
    nlbench.evaluate(model, inputs, measures=["affinity", "r2", "cka", "absdev", "density"])
    assert model.training
    assert torch.equal(inputs, kept)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_labelled_loader_and_tensor_agree():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs, labels = torch.randn(40, 4), torch.zeros(40)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, labels), batch_size=7
    )
    measures = ["affinity", "absdev"]
    given = nlbench.evaluate(model, inputs, measures).scores
    assert nlbench.evaluate(model, loader, measures).scores.equals(given)
    assert set(given.model) == {"Sequential"}


def test_evaluate_accepts_unregistered_measures():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    inputs = torch.randn(40, 4)
    result = nlbench.evaluate(model, inputs, [good, "r2"], name="mine")
    with torch.no_grad():
        x = model[0](inputs)
    assert result["good"].summary["value"] == pytest.approx(
        (x.relu() - x).abs().mean().item(), rel=1e-5
    )
    assert set(result.scores.model) == {"mine"}


def test_evaluate_returns_a_run_like_load_run(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    result = nlbench.evaluate(model, torch.randn(40, 4), ["affinity", "r2"])
    result.save(tmp_path / "mine")
    loaded = nlbench.load_run(tmp_path / "mine")
    assert type(loaded) is type(result)
    assert loaded.scores.equals(result.scores)
    json.dumps(dict(loaded.manifest))


def test_a_network_without_activations_is_undefined():
    result = nlbench.evaluate(nn.Linear(4, 2), torch.randn(20, 4), ["affinity", "absdev"])
    assert result["affinity"].status == "undefined"
    assert result["absdev"].summary["value"] == pytest.approx(0.0, abs=1e-9)


class NumpyNumbers(Measure):
    """Counts with numpy."""

    probe = "sites"
    source = "only a citation"

    def update(self, observation):
        self.total = np.float32(0.5)

    def compute(self):
        return Result.of([Value("all", {"value": self.total})], notes={"of": "numpy"})


class OddNotes(NumpyNumbers):
    """Notes what can't be recorded."""

    def compute(self):
        return Result.of({"all": 1.0}, notes={"tensor": torch.zeros(1)})


class NanSummary(NumpyNumbers):
    """A summary that is no number."""

    def compute(self):
        return Result({"value": math.nan})


class NotMade(NumpyNumbers):
    """Can't be made."""

    def __init__(self, **settings):
        raise RuntimeError("not today")


def test_broken_measure_fails_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    measures = [NotMade, OddNotes, NanSummary, NumpyNumbers]
    result = nlbench.evaluate(model, torch.randn(8, 4), measures)
    reasons = {r.measure.name: r.result.reason for r in result.records}
    assert [r.result.status for r in result.records] == ["failed"] * 3 + ["ok"]
    assert "not today" in reasons["notmade"]
    assert "Tensor" in reasons["oddnotes"]
    assert reasons["nansummary"] == "the summary is not finite"
    assert result["numpynumbers"].summary["value"] == 0.5
    assert result.records[-1].measure.source.citation == "only a citation"


def test_a_measure_of_no_known_probe_is_refused():
    class Odd(NumpyNumbers):
        """Looks nowhere."""

        probe = "nowhere"

    class Sites(NumpyNumbers):
        """Bears a probe's name."""

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(PluginError, match="'nowhere'"):
        nlbench.evaluate(model, torch.randn(8, 4), [Odd])
    with pytest.raises(PluginError):
        nlbench.evaluate(model, torch.randn(8, 4), [Sites])


def test_names_in_one_text_are_taken_apart():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    result = nlbench.evaluate(model, torch.randn(40, 4), "affinity, r2")
    assert [r.measure.name for r in result.records] == ["affinity", "r2"]


def test_channels_last_images_translate_along_positions():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return torch.relu(self.conv(x.permute(0, 3, 1, 2))).mean((2, 3))

    inputs = torch.rand(8, 16, 16, 3)
    result = nlbench.evaluate(Last(), inputs, ["density"])
    assert result.manifest["probes"]["lines"]["paths"] == "auto"
    assert result.records[0].probe.facts["paths"] == "pairs"
    assert result["density"].status == "ok"
    forced = nlbench.evaluate(Last(), inputs, ["density"], settings={"lines.paths": "closed"})
    assert forced["density"].status == "undefined"
    assert "channels last" in forced["density"].reason


NET = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        layers = torch.nn.LazyLinear(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        super().__init__(torch.nn.Flatten(), *layers)
"""


@pytest.mark.parametrize(
    ("shape", "paths", "number"),
    [((40, 12), "pairs", 4), ((5, 12), "pairs", 2), ((6, 3, 9, 9), "closed", 4),
     ((3, 3, 9, 9), "closed", 3), ((9, 4, 3), "pairs", 4)],
)  # fmt: skip
def test_runs_choose_the_paths_of_evaluations(shape, paths, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_net.py").write_text(NET)
    inputs = torch.randn(*shape)
    np.save("x.npy", inputs.numpy())
    request = nlbench.Request("absdev", ["my_net.py:Net"], ["x.npy"], samples=0)
    (recorded,) = nlbench.run(request, "run").records
    spec = SubjectSpec("my_net.py:Net", "init", "x.npy")
    network = load_subject(spec, torch.device("cpu")).model
    (evaluated,) = nlbench.evaluate(network, inputs, "absdev").records
    assert dict(recorded.probe.options) == dict(evaluated.probe.options)
    for record in (recorded, evaluated):
        assert (record.probe.facts["paths"], record.probe.facts["number"]) == (paths, number)
    assert recorded.probe.facts["paths_hash"] == evaluated.probe.facts["paths_hash"]
    assert recorded.result.values == evaluated.result.values


def test_last_batch_weighs_no_more_than_its_samples():
    model, inputs = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(258, 6)
    sizes = []

    @site_measure()
    def size(x, y):
        """Samples of a batch."""
        sizes.append(len(x))
        return 0.0

    nlbench.evaluate(model, inputs, [size], errors="none")
    assert sizes == [86, 86, 86]


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("bounds", None),
        ("bounds", (0,)),
        ("bounds", ("0", "1")),
        ("bounds", (1, 0)),
        ("more_means", "bogus"),
        ("options", {"k": 2}),
        ("source", None),
        ("version", 1),
    ],
)
def test_a_malformed_declaration_is_named(attribute, value):
    odd = type("Odd", (NumpyNumbers,), {attribute: value})
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(PluginError, match=attribute):
        nlbench.evaluate(model, torch.randn(8, 4), [odd])


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (Result({}), "no 'value'"),
        (Result({"foo": 1.0}), "no 'value'"),
        (Result({"value": 1.0}, status="great"), "unknown status 'great'"),
        (Result.missing("undefined", ""), "without a reason"),
        (Result({"value": 1.0}, (Value("", {"value": 1.0}),)), "places must have distinct names"),
        (Result({"value": 1.0}, (Value("a", {"value": 1.0}),) * 2), "distinct names"),
    ],
)
def test_unusable_result_is_a_failure(result, says):
    class Odd(NumpyNumbers):
        """Gives it."""

        def compute(self):
            return result

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    result = nlbench.evaluate(model, torch.randn(8, 4), [Odd, "r2"])
    assert result["odd"].status == "failed"
    assert says in result["odd"].reason
    assert result["r2"].status == "undefined"


def test_sample_count_is_always_recorded():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    result = nlbench.evaluate(model, torch.randn(30, 4), [NumpyNumbers])
    assert set(result.scores.n) == {30}


def test_two_measures_of_one_name_are_refused():
    @site_measure()
    def r2(x, y):
        """Somebody else's."""
        return 1.0

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(RequestError, match="'r2'"):
        nlbench.evaluate(model, torch.randn(30, 4), ["r2", r2])


@pytest.mark.parametrize("settings", [{"lines.radius": 0}, {"lines.radius": 0.4}])
def test_a_path_without_length_is_refused(settings):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    result = nlbench.evaluate(model, torch.rand(4, 3, 8, 8), ["density"], settings=settings)
    assert result["density"].status == "failed"
    assert "the paths have no length" in result["density"].reason


def test_a_run_is_not_saved_over_anything_else(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    first, second = (nlbench.evaluate(model, torch.randn(40, 4), ["r2"]) for _ in range(2))
    first.save(tmp_path / "run")
    first.save(tmp_path / "run")
    with pytest.raises(RequestError):
        second.save(tmp_path / "run")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text("{}")
    with pytest.raises(RequestError):
        second.save(tmp_path / "app")
    assert nlbench.load_run(tmp_path / "run").scores.equals(first.scores)
    page = nlbench.load_run(tmp_path / "run").report(tmp_path / "page.html")
    assert "Sequential" in page.read_text(encoding="utf-8")


def test_assumed_channel_axis_is_noted_in_the_reason():
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU())
    first, second = nlbench.evaluate(model, torch.randn(40, 3, 8, 8), ["affinity"])[
        "affinity"
    ].values
    assert (first.status, second.status) == ("ok", "ok")
    assert "channel axis unknown, assumed: 0 (axis 1)" in first.reason
    assert second.reason == ""


def test_new_style_precision_is_restored(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, nlbench\n"
        "torch.backends.fp32_precision = 'tf32'\n"
        "matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn\n"
        "seen = []\n"
        "@nlbench.site_measure()\n"
        "def looks(x, y):\n"
        "    'Look at the settings.'\n"
        "    seen.extend([matmul.fp32_precision, cudnn.conv.fp32_precision])\n"
        "    return 0.0\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())\n"
        "run = nlbench.evaluate(model, torch.randn(64, 4), [looks, 'r2'])\n"
        "assert run['r2'].status == 'ok'\n"
        "assert seen and set(seen) == {'ieee'}, seen\n"
        "assert matmul.fp32_precision == 'tf32'\n"
        "assert run.manifest['environment']['float32']['matmul'] == 'ieee'\n"
        # What nobody has set still follows what is set for all.
        "torch.backends.fp32_precision = 'ieee'\n"
        "assert matmul.fp32_precision == cudnn.conv.fp32_precision == 'ieee'\n"
    )
    done = call(cwd=tmp_path, script=str(script))
    assert done.returncode == 0, done.stderr


def test_several_models_are_subjects_of_one_run():
    torch.manual_seed(0)
    models = {
        f"epoch {n}": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for n in (1, 4)
    }
    inputs = torch.randn(64, 4)
    together = nlbench.evaluate(models, inputs, ["r2", "affinity"])
    assert [s["weights"] for s in together.manifest["subjects"]] == list(models)
    for name, model in models.items():
        alone = nlbench.evaluate(model, inputs, ["r2", "affinity"])
        mine = together.scores[together.scores["weights"] == name]
        assert mine["value"].tolist() == alone.scores["value"].tolist()
    assert len(together.leaderboard()) == 2


def test_an_iterator_is_refused_for_several_models():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    batches = iter([torch.randn(32, 4)])
    with pytest.raises(nlbench.RequestError):
        nlbench.evaluate({"a": model, "b": model}, batches, ["r2"])
    with pytest.raises(nlbench.RequestError):
        nlbench.evaluate({}, torch.randn(8, 4), ["r2"])


def test_runs_are_compared_from_python():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    first = nlbench.evaluate(model, torch.randn(64, 4), ["r2"])
    second = nlbench.evaluate(model, 3 * torch.randn(64, 4), ["r2"])
    frame = nlbench.compare(first, second).frame()
    expected = second["r2"].summary["value"] - first["r2"].summary["value"]
    assert frame["place"].tolist() == ["", "1"]
    assert frame["difference"].tolist() == pytest.approx([expected, expected])
    assert "<table" in nlbench.compare(first, second)._repr_html_()


def test_places_to_replace_follow_those_of_sites():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    inputs = torch.randn(64, 4)

    def places(**settings):
        settings = {name.replace("_", "."): value for name, value in settings.items()}
        run = nlbench.evaluate(model, inputs, ["substitution"], settings=settings)
        return [value.place for value in run["substitution"].values]

    assert places(sites_of="modules:1") == ["1"]
    assert places(sites_of="modules:1", replacement_of="modules:2") == ["2"]
    with pytest.raises(RequestError, match="'sites'"):
        places(sites_rows="tokens")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_scripted_model_is_measured_as_a_function_only():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(64, 4)
    scripted = nlbench.evaluate(torch.jit.script(model), inputs, ["affine-residual", "linearity"])
    eager = nlbench.evaluate(model, inputs, ["affine-residual"])
    expected = eager["affine-residual"].summary["value"]
    assert scripted["affine-residual"].summary["value"] == pytest.approx(expected, rel=1e-6)
    assert "for others pass the module it was made from" in scripted["linearity"].reason


@pytest.mark.parametrize("convert", [list, tuple, np.array])
def test_labels_are_any_sequence_of_classes(convert):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(12, 4)
    labels = [0, 1, 2] * 4
    expected = nlbench.evaluate(model, x, ["accuracy"], labels=torch.tensor(labels))
    found = nlbench.evaluate(model, x, ["accuracy"], labels=convert(labels))
    assert found["accuracy"].summary == expected["accuracy"].summary


@pytest.mark.parametrize("dtype", ["uint16", "uint64", ">i8", "int8"])
def test_labels_of_any_integers_are_read(dtype):
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(30, 4)
    labels = np.arange(30) % 3
    expected = nlbench.evaluate(model, inputs, "accuracy", labels=labels)["accuracy"]
    run = nlbench.evaluate(model, inputs, "accuracy", labels=labels.astype(dtype))
    assert run["accuracy"].summary == expected.summary
    if dtype.startswith("u"):
        loader = [(inputs, torch.from_numpy(labels.astype(dtype)))]
        assert nlbench.evaluate(model, loader, "accuracy")["accuracy"].summary == expected.summary
