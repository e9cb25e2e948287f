"""Arguments in containers, constants, graphs, and outputs that are no tensors."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import RequestError
from nlbench.measures.affinity import affinity_score
from nlbench.subjects.inputs import ArgumentLayout, OutputChoice

SETTINGS = {"lines.number": 1}


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def values(run):
    return [
        (record.measure.name, value.place, dict(value.statistics))
        for record in run.records
        for value in record.result.values
    ]


class Plain(nn.Module):
    """Takes a tensor. The others take the same in other forms."""

    def __init__(self):
        super().__init__()
        self.layer, self.act, self.head = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.act(self.layer(x)))


class Features(Plain):
    def forward(self, features, **kwargs):
        return {"embedding": super().forward(features["x"])}


class Nested(Plain):
    def forward(self, pair, scale=2.0, *, mode="sum", extra=None):
        first, others = pair
        assert mode == "sum"
        assert extra is None
        return super().forward(first * scale + others["shift"][0])


class Timed(Plain):
    """A denoiser: a sample, a timestep, and an output with one attribute."""

    @dataclass
    class Output:
        sample: torch.Tensor

    def forward(self, sample, timestep, return_dict=True):
        return self.Output(super().forward(sample + torch.sin(timestep)))


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str = "table"


class Attributes(Plain):
    def forward(self, sample):
        assert sample.name == "table"
        return super().forward(sample.x)


def data():
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


ZEROS = torch.zeros(40, 4)
FORMS = {
    "mapping as first argument": (Features, {"x": data()}),
    "object": (Attributes, Sample(data())),
    "object as an argument": (Attributes, nlbench.Arguments(Sample(data()))),
    "loader of objects": (Attributes, [Sample(part) for part in data().split(16)]),
    "nested containers": (
        Nested,
        nlbench.Arguments((data() / 2, {"shift": [ZEROS]}), 2.0, mode="sum", extra=None),
    ),
    "tuple with a mapping": (Nested, ((data() / 2, {"shift": [ZEROS]}), 2.0)),
    "timestep": (Timed, (data(), torch.tensor(0.0))),
    "number": (Timed, nlbench.Arguments(data(), torch.tensor(0), return_dict=False)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_arguments_changes_no_value(name):
    kind, inputs = FORMS[name]
    measures = ["r2", "density", "nlc"]
    expected = nlbench.evaluate(seeded(Plain), data(), measures, settings=SETTINGS)
    run = nlbench.evaluate(seeded(kind), inputs, ["r2"])
    assert values(run) == [row for row in values(expected) if row[0] == "r2"]
    if name.startswith(("mapping", "timestep", "object", "loader")):
        run = nlbench.evaluate(seeded(kind), inputs, ["density"], settings=SETTINGS)
        assert values(run) == [row for row in values(expected) if row[0] == "density"]


class Graph(nn.Module):
    """A graph convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        source, target = edge_index
        h = self.act(self.first(x))
        return self.second(torch.zeros_like(h).index_add(0, target, h[source]))


def graph(nodes=150, edges=400):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(nodes, 4, generator=generator)
    return x, torch.randint(0, nodes, (2, edges), generator=generator)


def node_rows():
    x, _ = graph()
    model = seeded(Graph)
    return nlbench.evaluate(nn.Sequential(model.first, model.act), x, ["r2"], settings=WHOLE)


WHOLE = {"sites.batch": 150}


@pytest.mark.parametrize("rows", ["samples", "nodes"])
def test_graphs_with_edges_run_as_a_whole(rows):
    x, edges = graph()
    measures = ["r2", "density", "nlc", "accuracy", "substitution"]
    labels = torch.arange(150) % 3
    settings = {**SETTINGS, "sites.rows": rows}
    run = nlbench.evaluate(seeded(Graph), (x, edges), measures, labels=labels, settings=settings)
    (expected,) = node_rows()["r2"].values
    (value,) = run["r2"].values
    assert value.place == "act"
    # The nodes of a graph keep their order, in which the folds of r2 are dealt.
    assert value.statistics["value"] == pytest.approx(expected.statistics["value"], rel=1e-9)
    assert run["accuracy"].status == "ok"
    assert "inputs[1] without samples" in run.records[0].subject.preprocessing
    for name in ("density", "nlc", "substitution"):
        assert run[name].status != "ok"
        assert "depend on each other through inputs[1]" in run[name].reason


class GraphObject:
    """Attributes in a store of their own, as graph libraries keep them."""

    def __init__(self, **attributes):
        self.store = attributes

    def __getattr__(self, name):
        if name == "store" or name not in self.store:
            raise AttributeError(name)
        return self.store[name]

    def __setattr__(self, name, value):
        if name == "store":
            super().__setattr__(name, value)
        else:
            self.__dict__["store"] = {**self.store, name: value}

    def __iter__(self):
        return iter(self.store.items())

    def to_dict(self):
        return dict(self.store)


class GraphOfObject(Graph):
    def forward(self, graph):
        return super().forward(graph.x, graph.edge_index)


def test_a_graph_may_be_one_object():
    x, edges = graph()
    whole = GraphObject(x=x, edge_index=edges, name="citations", y=torch.arange(150) % 3)
    expected = nlbench.evaluate(
        seeded(Graph), (x, edges), ["r2", "accuracy"], labels=torch.arange(150) % 3
    )
    run = nlbench.evaluate(seeded(GraphOfObject), whole, ["r2", "accuracy"], labels="y")
    assert values(run) == values(expected)
    assert whole.store["x"] is x


class Graphs(Graph):
    """Classifies several graphs."""

    def forward(self, x, edge_index, graph):
        h = super().forward(x, edge_index)
        return torch.zeros(3, 3).index_add(0, graph, h)


class GraphsOfObject(Graphs):
    def forward(self, graph):
        return super().forward(graph.x, graph.edges, graph.batch)


def test_nodes_are_found_where_outputs_are_graphs():
    x, edges = graph()
    whole = GraphObject(x=x, edges=edges, batch=torch.arange(150) // 50, y=torch.arange(3))
    run = nlbench.evaluate(seeded(GraphsOfObject), whole, ["r2"], settings={"sites.rows": "nodes"})
    (expected,) = node_rows()["r2"].values
    (value,) = run["r2"].values
    assert value.statistics["value"] == pytest.approx(expected.statistics["value"], rel=1e-9)
    assert "inputs[0]['edges']" in run.records[0].subject.preprocessing


def test_other_edges_make_another_key():
    x, edges = graph()
    runs = [nlbench.evaluate(seeded(Graph), (x, e), ["r2"]) for e in (edges, edges.flip(1))]
    assert runs[0].records[0].key != runs[1].records[0].key


def test_samples_can_be_named():
    x, edges = graph(2, 2)
    with pytest.raises(RequestError):
        nlbench.Arguments(x, edges, samples=(True,))
    named = nlbench.Arguments(x, edges, samples=(True, False))
    assert list(ArgumentLayout.of(named).whole_tensors) == ["[1]"]
    run = nlbench.evaluate(seeded(Graph), nlbench.Arguments(*graph(), samples=(True, False)), "r2")
    (value,), (expected,) = run["r2"].values, node_rows()["r2"].values
    assert value.statistics["value"] == pytest.approx(expected.statistics["value"], rel=1e-9)


def test_edges_among_first_nodes_do_not_split_graphs():
    x, edges = graph()
    run = nlbench.evaluate(seeded(Graph), (x, edges % 70), ["nlc", "density"], settings=SETTINGS)
    assert {record.result.status for record in run.records} & {"ok"} == set()


def test_a_table_for_all_samples_leaves_them_independent():
    class Table(Plain):
        def forward(self, x, table):
            return super().forward(x + table.sum(0))

    inputs = nlbench.Arguments(data(), torch.zeros(7, 4), samples=(True, False))
    run = nlbench.evaluate(seeded(Table), inputs, ["r2", "density"], settings=SETTINGS)
    expected = nlbench.evaluate(seeded(Plain), data(), ["r2", "density"], settings=SETTINGS)
    assert values(run) == values(expected)


def test_activations_of_a_table_with_as_many_rows_are_undefined():
    class Table(Plain):
        def forward(self, x, table):
            return super().forward(x) + (table @ torch.ones(4, 1)).relu().mean()

    x = data()
    inputs = nlbench.Arguments(x, x.flip(0), samples=(True, False))
    first, second = nlbench.evaluate(seeded(Table), inputs, "r2")["r2"].values
    (expected,) = nlbench.evaluate(seeded(Plain), x, "r2")["r2"].values
    assert first == expected
    assert second.status == "undefined"
    assert "hold no samples" in second.reason


class Several(Plain):
    """Returns a list of detections and a mapping."""

    def forward(self, x):
        scores = super().forward(x)
        return {"boxes": [{"scores": scores}], "head": {"all": scores, "no": x}}


def test_the_output_is_chosen_by_name_or_function():
    model, measures = seeded(Several), ["r2", "density", "accuracy"]
    labels = torch.arange(40) % 3
    run = nlbench.evaluate(model, data(), measures, labels=labels, settings=SETTINGS)
    assert run["r2"].status == "ok"
    for name in ("density", "accuracy"):
        assert run[name].status != "ok"
        assert "model.output" in run[name].reason
    plain = nlbench.evaluate(seeded(Plain), data(), measures, labels=labels, settings=SETTINGS)
    for choice in ("head.all", lambda output: output["head"]["all"]):
        settings = {**SETTINGS, "model.output": choice}
        run = nlbench.evaluate(model, data(), measures, labels=labels, settings=settings)
        assert values(run) == values(plain)
        assert "output" in run.records[0].subject.preprocessing
    settings = {**SETTINGS, "model.output": "heads"}
    run = nlbench.evaluate(model, data(), ["density"], settings=settings)
    assert "did you mean 'head'" in run["density"].reason


def test_a_choice_leaves_a_chosen_tensor():
    assert OutputChoice("a")(nn.Identity(), (), torch.ones(1)).item() == 1


def batches(**extra):
    y = torch.arange(40) % 3
    rows = zip(data().split(16), y.split(16), torch.arange(40).split(16), strict=True)
    return [(x, labels, index) for x, labels, index in rows]


def test_labels_of_a_loader_serve_accuracy():
    model, measures = seeded(Plain), ["accuracy", "substitution"]
    labels = torch.arange(40) % 3
    expected = nlbench.evaluate(model, data(), measures, labels=labels)
    pairs = [(x, y) for x, y, _ in batches()]
    assert values(nlbench.evaluate(model, pairs, measures)) == values(expected)
    assert values(nlbench.evaluate(model, batches(), measures)) == values(expected)
    names = [(x, y, [f"{i}.png" for i in index]) for x, y, index in batches()]
    assert values(nlbench.evaluate(model, names, measures)) == values(expected)
    whole = expected["accuracy"].summary["value"]
    assert nlbench.evaluate(model, pairs, ["accuracy"])["accuracy"].summary["value"] == whole


def test_a_mapping_of_another_library_names_its_labels():
    model = seeded(Plain)
    loader = [{"image": x, "label": y, "index": index} for x, y, index in batches()]
    with pytest.raises(RequestError, match="labels"):
        nlbench.evaluate(model, loader, ["accuracy"])
    run = nlbench.evaluate(model, loader, ["accuracy"], labels="label")
    labels = torch.arange(40) % 3
    expected = nlbench.evaluate(model, data(), ["accuracy"], labels=labels)
    assert values(run) == values(expected)


def test_paths_start_at_samples_drawn_from_all():
    torch.manual_seed(0)
    inputs = torch.randn(60, 4)
    inputs[:20] = inputs[0]
    run = nlbench.evaluate(seeded(Plain), inputs, ["absdev"], settings={"lines.number": 8})
    assert any(value.statistics["length"] > 0 for value in run["absdev"].values)
    again = nlbench.evaluate(
        seeded(Plain), list(inputs.split(7)), ["absdev"], settings={"lines.number": 8}
    )
    assert values(again) == values(run)


def test_mappings_that_fit_no_argument_are_refused():
    with pytest.raises(RequestError):
        nlbench.evaluate(seeded(Plain), {"a": data(), "b": data()}, ["r2"])


def neighbours():
    return torch.randint(0, 40, (40, 3), generator=torch.Generator().manual_seed(5))


class Adjacency(Plain):
    """Averages over neighbours, which are a matrix (n, n) among the arguments."""

    def forward(self, x, adjacency):
        return super().forward(adjacency @ x)


class OwnAdjacency(Plain):
    """Averages over neighbours, which the network knows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", matrix())

    def forward(self, x):
        return super().forward(self.adjacency @ x)


class Neighbours(Plain):
    """Averages over neighbours, whose indices are among the arguments."""

    def forward(self, x, neighbours):
        return super().forward(x[neighbours].mean(1))


def matrix():
    return torch.zeros(40, 40).scatter_(1, neighbours(), 1.0)


RELATED = {
    "argument": (Adjacency, (data(), matrix()), matrix() @ data()),
    "buffer": (OwnAdjacency, data(), matrix() @ data()),
    "indices": (Neighbours, (data(), neighbours()), data()[neighbours()].mean(1)),
}


@pytest.mark.parametrize(("kind", "inputs", "means"), RELATED.values(), ids=RELATED)
def test_related_samples_keep_their_order(kind, inputs, means):
    model = seeded(kind)
    with torch.no_grad():
        before = model.layer(means)
    run = nlbench.evaluate(model, inputs, ["affinity", "absdev"])
    affinity, deviation = (record.result for record in run.records)
    assert affinity.summary["value"] == pytest.approx(
        float(affinity_score(before.double(), before.relu().double())), rel=1e-6
    )
    assert deviation.status == "undefined"


@pytest.mark.parametrize(("kind", "inputs", "means"), RELATED.values(), ids=RELATED)
def test_weight_linearity_keeps_related_samples(kind, inputs, means):
    def compared(kind, inputs):
        checkpoints = {"first": seeded(kind), "second": perturbed(seeded(kind))}
        run = nlbench.evaluate(checkpoints, inputs, ["r2"])
        return run.weight_linearity(directions=8)["value"].item()

    assert compared(kind, inputs) == pytest.approx(compared(Plain, means), rel=1e-6)


def perturbed(model):
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_related_samples_of_loaders_are_undefined():
    for inputs in ([data()], torch.utils.data.DataLoader(data(), batch_size=16)):
        run = nlbench.evaluate(seeded(OwnAdjacency), inputs, ["affinity"])
        assert run.records[0].result.status == "undefined"


def test_networks_of_fixed_batches_are_measured():
    class Fixed(Plain):
        def forward(self, x):
            return super().forward(x.reshape(40, 4))

    expected = nlbench.evaluate(seeded(Plain), data(), ["affinity"])
    assert values(nlbench.evaluate(seeded(Fixed), data(), ["affinity"])) == values(expected)


@dataclass
class GraphSample:
    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("nodes", [(6, 9, 7), (7, 7, 7)])
def test_loaders_of_graphs_are_refused(nodes):
    samples = [GraphSample(*graph(count, 3 * count), torch.zeros(1)) for count in nodes]
    with pytest.raises(RequestError, match="Arguments"):
        nlbench.evaluate(seeded(GraphOfObject), samples, ["affinity"], labels=False)


def test_datasets_of_objects_are_refused():
    class Graphs(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return GraphSample(*graph(5, 9), torch.zeros(1))

    with pytest.raises(RequestError, match="collate_fn"):
        nlbench.evaluate(seeded(GraphOfObject), Graphs(), ["affinity"])
