"""A site whose samples are on no axis costs that site, and no other."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import RequestError
from nlbench.probes.sites.sites_observation import observe_sites


def seeded(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().eval()


class Routed(nn.Module):
    """Tokens are routed to one of two experts by the sign of a feature."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Linear(6, 8), nn.GELU()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.expert, self.after = nn.ReLU(), nn.Tanh()

    def forward(self, x):
        x = self.act(self.stem(x))
        goes_first = x[..., 0] > x[..., 1]
        routed = torch.empty_like(x)
        routed[goes_first] = self.expert(self.first(x[goes_first]))
        routed[~goes_first] = self.second(x[~goes_first])
        return self.after(routed).mean(1)


class Packed(nn.Module):
    """Sequences of different lengths are packed one after another."""

    def __init__(self):
        super().__init__()
        self.layer, self.act, self.after = nn.Linear(6, 8), nn.ReLU(), nn.Tanh()

    def forward(self, x):
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        rows = self.act(self.layer(packed.data))
        return self.after(x.mean(1)) + rows.sum()


class Boxes(nn.Module):
    """A varying number of boxes is cut out of each image."""

    def __init__(self):
        super().__init__()
        self.backbone, self.act, self.head = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 5)

    def forward(self, x):
        maps = self.act(self.backbone(x))
        boxes = torch.cat([image.flatten(1).T[: 2 + i % 3] for i, image in enumerate(maps)])
        scores = torch.sigmoid(self.head(boxes))
        return maps.mean((2, 3)) + scores.mean()


def places(result):
    return {value.place: value.status for value in result.values}


CASES = [
    (Routed, (24, 5, 6), "expert", {"act", "after"}),
    (Packed, (23, 5, 6), "act", {"after"}),
    (Boxes, (23, 3, 6, 6), "sigmoid", {"act"}),
]


@pytest.mark.parametrize(("kind", "shape", "odd", "others"), CASES)
def test_odd_site_fails_alone(kind, shape, odd, others):
    model = seeded(kind)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = nlbench.evaluate(model, x, ["r2"])["r2"]
    assert result.status == "ok"
    assert places(result) == {odd: "undefined"} | dict.fromkeys(others, "ok")
    (value,) = (value for value in result.values if value.place == odd)
    assert "samples" in value.reason
    alone = nlbench.evaluate(model, x, ["r2"], settings={"sites.select": f"{odd}"})["r2"]
    assert alone.status == "undefined"
    selected = ",".join(sorted(others))
    rest = nlbench.evaluate(model, x, ["r2"], settings={"sites.select": selected})["r2"]
    assert places(rest) == dict.fromkeys(others, "ok")


@pytest.mark.parametrize(("kind", "shape", "odd", "others"), CASES)
def test_tokens_of_any_number_are_rows(kind, shape, odd, others):
    model, rows = seeded(kind), []
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    module = {"expert": "first", "act": "layer", "sigmoid": "head"}[odd]
    handle = model.get_submodule(module).register_forward_hook(
        lambda module, args, output: rows.append(output.detach().clone())
    )
    model(x)
    handle.remove()
    settings = {"rows": "tokens"}
    observed = {}
    observe_sites(model, [x], lambda batch: observed.update({batch.place: batch}), **settings)
    assert torch.equal(observed[odd].x, rows[0])
    assert observed[odd].sample_index is None
    assert observed[odd].sources is None
    assert set(observed) == {odd, *others}
    result = nlbench.evaluate(model, x, ["r2", "affinity"], settings={"sites.rows": "tokens"})
    assert places(result["affinity"]) == dict.fromkeys((odd, *others), "ok")


def test_some_tokens_of_each_sample_need_its_tokens():
    x, reasons = torch.randn(24, 5, 6), {}
    for rows in ("tokens:2", "last"):
        observe_sites(
            seeded(Routed), [x], lambda batch: None, rows=rows, on_undefined=reasons.setdefault
        )
        assert list(reasons) == ["expert"]


class Graph(nn.Module):
    """Sums messages along edges. Edges have features, too."""

    def __init__(self):
        super().__init__()
        self.node, self.edge, self.head = nn.Linear(4, 6), nn.Linear(12, 6), nn.Linear(6, 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]))

    def forward(self, x):
        x = torch.relu(self.node(x))
        source, target = self.edges
        messages = torch.tanh(self.edge(torch.cat([x[source], x[target]], 1)))
        return self.head(torch.zeros_like(x).index_add(0, target, messages))


@pytest.mark.parametrize("nodes", [10, 12])
def test_rows_are_nodes_and_edges_of_any_number(nodes):
    observed = {}
    x = torch.randn(nodes, 4)
    observe_sites(
        seeded(Graph), [x], lambda batch: observed.update({batch.place: batch}), rows="nodes"
    )
    assert {place: len(batch.x) for place, batch in observed.items()} == {"relu": nodes, "tanh": 5}


def test_nodes_have_no_positions_to_skip():
    with pytest.raises(RequestError, match=r"sites\.skip"):
        nlbench.evaluate(
            seeded(Graph),
            torch.randn(9, 4),
            ["r2"],
            settings={"sites.rows": "nodes", "sites.skip": 1},
        )


class Detector(nn.Module):
    """Images are resized one by one and put together again, as in torchvision's detectors."""

    def __init__(self):
        super().__init__()
        self.backbone, self.act = nn.Conv2d(3, 4, 3), nn.ReLU()

    def forward(self, x):
        images = [nn.functional.interpolate(image[None], scale_factor=2)[0] for image in x]
        batch = images[0].new_full((len(images), 3, 16, 16), 0)
        for place, image in zip(batch, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]].copy_(image)
        maps = self.act(self.backbone(batch))
        return [{"boxes": one.flatten(1).T, "scores": one.sum((1, 2))} for one in maps]


def test_a_detectors_backbone_is_measured():
    x = torch.randn(20, 3, 7, 7)
    run = nlbench.evaluate(seeded(Detector), x, ["r2", "nlc"])
    assert places(run["r2"]) == {"act": "ok"}
    assert run["r2"].values[0].n == 20
    assert "model.output" in run["nlc"].reason


class Nested(nn.Module):
    """Sequences of different lengths in a nested tensor."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.last = nn.Tanh()

    def forward(self, x):
        rows = [sample.expand(1 + i % 2, 4) for i, sample in enumerate(x[:, None])]
        y = self.net(torch.nested.nested_tensor(rows, layout=self.layout))
        return self.last(torch.stack([sample.mean(0) for sample in y.unbind()]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_undefined(layout):
    measures = ["norm", "substitution", "effective-depth"]
    run = nlbench.evaluate(Nested(layout), torch.randn(12, 4), measures, errors="none")
    assert {record.result.status for record in run.records} <= {"undefined", "ok"}
    values = {value.place: value for value in run["norm"].values}
    assert "nested" in values["net.1"].reason
    assert values["last"].status == "ok"


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 8))])
def test_a_scripted_part_is_undefined(make):
    model = nn.Sequential(nn.Linear(4, 8), make(nn.Sequential(nn.ReLU(), nn.Linear(8, 3))))
    measures = ["norm", "substitution", "absdev", "pathlength", "influence"]
    run = nlbench.evaluate(model, torch.randn(12, 4), measures, errors="none")
    for record in run.records:
        assert record.result.status == "undefined", record.measure.name
        assert record.result.reason.startswith("1 is scripted")


class Wrapper(torch.Tensor):
    """A tensor that only refers to another."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, cls) else value

        return cls(func(*map(unwrap, args), **(kwargs or {})))


def test_tensors_without_memory_are_undefined():
    class Wrapping(nn.Sequential):
        def forward(self, x):
            return super().forward(Wrapper(x)).inner

    model = Wrapping(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = nlbench.evaluate(model, torch.randn(20, 4), ["norm", "substitution"])
    for record in run.records:
        assert record.result.status == "undefined"
        assert "Wrapper without memory" in record.result.reason
