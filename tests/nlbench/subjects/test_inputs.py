"""How inputs are read, and how models that take or give more than a tensor are measured."""

import collections
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nlbench
from nlbench.errors import RequestError
from nlbench.subjects.inputs import (
    ArgumentLayout,
    Arguments,
    BatchReader,
    OutputChoice,
    single_tensor_call,
)

ALL = ["affinity", "r2", "nlc", "density", "absdev", "pathlength"]


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(3, 8)
        self.act, self.head = nn.ReLU(), nn.Linear(8, 2)

    def forward(self, a, b):
        return self.head(self.act(self.first(a) + self.second(b)))


class Packed(nn.Module):
    """The same, with both side by side in one tensor."""

    def __init__(self, model):
        super().__init__()
        self.first, self.second = model.first, model.second
        self.act, self.head = model.act, model.head

    def forward(self, x):
        return self.head(self.act(self.first(x[:, :4]) + self.second(x[:, 4:])))


class Words(nn.Module):
    """A mean over the words that a mask leaves."""

    def __init__(self):
        super().__init__()
        self.embed, self.act, self.head = nn.Embedding(11, 6), nn.GELU(), nn.Linear(6, 2)
        self.masks = []

    def forward(self, input_ids, attention_mask=None, labels=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.masks.append(mask.dtype)
        h = self.act(self.embed(input_ids)) * mask[..., None]
        return SimpleNamespace(logits=self.head(h.sum(1) / mask.sum(1, keepdim=True)))


def scores(run):
    frame = run.scores
    return frame[["measure", "place", "statistic", "value", "n", "status", "reason"]]


def words(n=24, length=5):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (n, length), generator=generator)
    mask = torch.randint(0, 2, (n, length), generator=generator)
    mask[:, 0] = 1
    return ids, mask


def test_tuples_are_arguments_for_every_probe():
    model, a, b = seeded(lambda: (Two(), torch.randn(64, 4), torch.randn(64, 3)))
    both = nlbench.evaluate(model, (a, b), ALL)
    one = nlbench.evaluate(Packed(model), torch.cat([a, b], 1), ALL)
    # Random draws differ, since the models' names do.
    exact = [name for name in ALL if name != "nlc"]
    for name in exact:
        assert both[name].status == one[name].status, (both[name].reason, one[name].reason)
        assert both[name].summary == pytest.approx(one[name].summary, rel=1e-9)
    assert both["nlc"].status == "ok"
    assert both["nlc"].summary["value"] == pytest.approx(one["nlc"].summary["value"], rel=0.5)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_mappings_are_keyword_arguments_also_from_loaders():
    model, a, b = seeded(lambda: (Two(), torch.randn(60, 4), torch.randn(60, 3)))
    whole = scores(nlbench.evaluate(model, (a, b), ALL[:2]))
    for inputs in ({"a": a, "b": b}, [{"a": a[:30], "b": b[:30]}, {"a": a[30:], "b": b[30:]}]):
        assert scores(nlbench.evaluate(model, inputs, ALL[:2])).equals(whole)
    loader = DataLoader(TensorDataset(a, b), batch_size=16)
    assert scores(nlbench.evaluate(model, loader, ALL[:2], labels=False)).equals(whole)


def test_masks_are_neither_measured_nor_dropped():
    ids, mask = words()
    model = seeded(Words)
    run = nlbench.evaluate(model, (ids, mask), ["affinity"])
    with torch.no_grad():
        x = model.embed(ids)
        expected = nlbench.evaluate(nn.Sequential(nn.GELU()), x, ["affinity"])
    assert run.records[0].subject.samples == len(ids)
    assert run["affinity"].n == len(ids)
    assert run["affinity"].values[0].status == "ok"
    assert expected["affinity"].values[0].status == "ok"
    assert set(model.masks) == {torch.int64}
    again = nlbench.evaluate(model, {"input_ids": ids, "attention_mask": mask}, ["affinity"])
    assert scores(again).equals(scores(run))


def test_integer_arguments_keep_their_type():
    ids, mask = words()
    model = seeded(Words)
    nlbench.evaluate(model, {"input_ids": ids, "attention_mask": mask.bool()}, ["r2"])
    assert set(model.masks) == {torch.bool}


def test_constants_in_a_mapping_are_passed_on():
    ids, mask = words()
    model = seeded(Words)
    with_none = {"input_ids": ids, "attention_mask": mask, "labels": None}
    run = nlbench.evaluate(model, with_none, ["affinity"], labels=False)
    assert scores(run).equals(scores(nlbench.evaluate(model, (ids, mask), ["affinity"])))


@pytest.mark.parametrize("measure", ["nlc", "density", "absdev"])
def test_integers_are_undefined_for_differentiating_probes(measure):
    ids, mask = words()
    model = seeded(Words)
    for inputs in (ids, (ids, mask), {"input_ids": ids, "attention_mask": mask}):
        assert nlbench.evaluate(model, inputs, [measure])[measure].status == "undefined"


def test_ambiguous_pairs_raise():
    ids, mask = words()
    with pytest.raises(RequestError):
        nlbench.evaluate(seeded(Words), [(ids, mask)], ["r2"])
    both = nlbench.evaluate(seeded(Words), [(ids, mask)], ["r2"], labels=False)
    assert scores(both).equals(scores(nlbench.evaluate(seeded(Words), (ids, mask), ["r2"])))
    one = nlbench.evaluate(seeded(Words), [(ids, mask)], ["r2"], labels=True)
    assert scores(one).equals(scores(nlbench.evaluate(seeded(Words), ids, ["r2"])))


def test_mapped_labels_are_not_passed_to_model():
    ids, mask = words()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0]}
    found = nlbench.evaluate(seeded(Words), [batch], ["r2"])
    assert scores(found).equals(scores(nlbench.evaluate(seeded(Words), (ids, mask), ["r2"])))
    named = {**batch, "target": batch.pop("labels")}
    del named["labels"]
    again = nlbench.evaluate(seeded(Words), [named], ["r2"], labels="target")
    assert scores(again).equals(scores(found))
    with pytest.raises(RequestError, match="'targets'"):
        nlbench.evaluate(seeded(Words), [named], ["r2"], labels="targets")


def test_ambiguous_decoder_labels_raise():
    model, batch = seeded(Words), {"input_ids": words()[0], "labels": words()[0]}
    model.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(RequestError):
        BatchReader(model, None).read(batch)


def test_labels_that_repeat_tokens_become_next_tokens():
    ids = words()[0]
    padded = ids.masked_fill(torch.arange(5) > 3, -100)
    reader = BatchReader(seeded(Words), None)
    _, labels = reader.read({"input_ids": ids, "labels": padded})
    assert labels[:, :3].equal(ids[:, 1:4])
    assert (labels[:, 3:] == -100).all()
    _, others = reader.read({"input_ids": ids, "labels": ids.flip(1)})
    assert others.equal(ids.flip(1))


def test_labels_are_as_many_as_samples():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(RequestError, match="labels"):
        nlbench.evaluate(model, torch.randn(8, 4), ["r2"], labels=torch.zeros(3))
    with pytest.raises(RequestError):
        nlbench.evaluate(model, [torch.randn(8, 4)], ["r2"], labels=torch.zeros(8))


class Embedded(nn.Module):
    """A mean over the embeddings that a mask leaves."""

    def __init__(self):
        super().__init__()
        self.act, self.head = nn.GELU(), nn.Linear(6, 2)

    def forward(self, inputs_embeds, attention_mask):
        h = self.act(inputs_embeds) * attention_mask[..., None]
        return self.head(h.sum(1) / attention_mask.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_floats_beside_masks_reach_the_model_exactly(dtype):
    x, mask = torch.randn(24, 5, 6).to(dtype), words()[1].bool()
    model = seeded(Embedded).to(dtype)
    batch = Arguments(inputs_embeds=x, attention_mask=mask)
    arguments = ArgumentLayout.of(batch)
    _, unpacked = arguments.unpack(arguments.pack(batch))
    assert unpacked["inputs_embeds"].equal(x)
    assert unpacked["inputs_embeds"].dtype == dtype
    assert unpacked["attention_mask"].equal(mask)
    with single_tensor_call(model, arguments):
        packed = arguments.pack(batch)
        # Sums round by the layout of their terms, which packing changes.
        torch.testing.assert_close(model(packed), model.forward(x, mask))
        torch.testing.assert_close(model.double()(packed), model.forward(x.double(), mask))


def test_floats_beside_masks_have_no_lines():
    model, x, mask = seeded(Embedded), torch.randn(24, 5, 6), words()[1]
    settings = {"sites.rows": "tokens"}
    batch = {"inputs_embeds": x, "attention_mask": mask}
    run = nlbench.evaluate(model, batch, ["r2", "absdev", "nlc"], settings=settings)
    rows = x[mask.bool()]
    alone = nlbench.evaluate(nn.Sequential(nn.GELU()), rows, ["r2"])
    assert run["r2"].summary["value"] == pytest.approx(alone["r2"].summary["value"], abs=0.05)
    assert [run[name].status for name in ("absdev", "nlc")] == ["undefined"] * 2


def test_floats_of_different_types_are_refused():
    for other in (torch.zeros(3, 3).double(), torch.zeros(3, 3, dtype=torch.complex64)):
        with pytest.raises(RequestError):
            nlbench.evaluate(seeded(Two), (torch.zeros(3, 4), other), ["r2"])


def test_sequences_of_different_lengths_are_refused_with_advice():
    batches = [{"input_ids": torch.zeros(2, t, dtype=torch.long)} for t in (5, 7)]
    with pytest.raises(RequestError, match=r"\(5,\), \(7,\)"):
        nlbench.evaluate(seeded(Words), batches, ["r2"])


Named = collections.namedtuple("Named", "out aux")
OUTPUTS = {
    "attribute": lambda y: SimpleNamespace(logits=y, loss=None),
    "mapping": lambda y: {"logits": y, "hidden": y + 1},
    "segmentation": lambda y: {"out": y, "aux": y + 1},
    "only tensor": lambda y: (y, (y, y)),
    "list": lambda y: [y],
    "named tuple": lambda y: Named(y, y + 1),
}


@pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_are_taken_apart_for_all_probes(wrap):
    class Wrapped(nn.Sequential):
        def forward(self, x):
            return wrap(super().forward(x))

    layers, inputs = seeded(
        lambda: ([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)], torch.randn(40, 4))
    )
    plain = nlbench.evaluate(nn.Sequential(*layers), inputs, ALL, name="net")
    wrapped = nlbench.evaluate(Wrapped(*layers), inputs, ALL, name="net")
    assert [r.result.status for r in wrapped.records] == ["ok"] * len(ALL)
    assert scores(wrapped).equals(scores(plain))


def test_outputs_of_several_tensors_are_refused():
    class Odd(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y, y

    measures = list(dict.fromkeys([*ALL[:5], "pathlength"]))
    run = nlbench.evaluate(Odd(nn.Linear(4, 8), nn.ReLU()), torch.randn(40, 4), measures)
    assert [run[name].status for name in ("affinity", "r2")] == ["ok", "ok"]
    for name in ("nlc", "density", "absdev", "pathlength"):
        assert run[name].status in ("undefined", "failed")
        assert "tuple" in run[name].reason


def test_random_numbers_come_from_the_recorded_key(monkeypatch):
    from nlbench.execution import probe_pass, unit_runner

    drawn = []

    class Noted(probe_pass.RandomStream):
        def __init__(self, name, device=None):
            drawn.append(name)
            super().__init__(name, device)

    monkeypatch.setattr(probe_pass, "RandomStream", Noted)
    monkeypatch.setattr(unit_runner, "RandomStream", Noted)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    first, second = torch.randn(2, 30, 4)
    for inputs in (first, second, list(first.split(7))):
        drawn.clear()
        # With errors they come from the key without, so that values are the same.
        run = nlbench.evaluate(model, inputs, ["nlc", "density"], errors="none")
        assert {record.key for record in run.records} <= set(drawn)


def test_loaders_draw_as_one_tensor_does():
    model, inputs = seeded(lambda: (nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(40, 4)))
    loader = DataLoader(TensorDataset(inputs), batch_size=7)
    whole, parts = (nlbench.evaluate(model, given, ["nlc"]) for given in (inputs, loader))
    assert scores(whole).equals(scores(parts))


def test_threads_are_set_and_given_back():
    from nlbench.introspection.threads import default_threads

    seen = []

    class Noting(nn.Sequential):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        expected = default_threads()
        model = Noting(nn.Linear(4, 8), nn.ReLU())
        run = nlbench.evaluate(model, torch.randn(8, 4), ["r2"])
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {expected} == {4}
    assert run.manifest["environment"]["threads"] == 4


SHAPES = st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=2, max_size=4)
INTEGERS = st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool])


@given(shapes=SHAPES, n=st.integers(1, 4), data=st.data())
def test_packing_several_arguments_loses_nothing(shapes, n, data):
    floats = data.draw(st.sampled_from([torch.float32, torch.float64, None]))
    tensors = tuple(
        torch.randint(0, 2, (n, *shape)).to(floats or data.draw(INTEGERS)) for shape in shapes
    )
    names = [f"k{i}" for i in range(len(tensors))]
    for batch in (Arguments(*tensors), Arguments(**dict(zip(names, tensors, strict=True)))):
        arguments = ArgumentLayout.of(batch)
        packed = arguments.pack(batch)
        assert packed.shape == (n, sum(math.prod(shape) for shape in shapes))
        args, kwargs = arguments.unpack(packed)
        for before, after in zip(tensors, (*args, *kwargs.values()), strict=True):
            assert before.dtype == after.dtype
            assert torch.equal(before, after)


def test_scripted_forward_with_unclear_labels_raises():
    class Any(nn.Module):
        def forward(self, *args):
            return args[0]

    with pytest.raises(RequestError, match="labels=True"):
        BatchReader(Any(), None).read((torch.zeros(2, 2), torch.zeros(2)))


def test_an_output_without_logits_stays_as_it_is():
    for output in ("text", None, (1, 2), {"a": torch.zeros(1), "b": torch.zeros(1)}):
        assert OutputChoice()(nn.Identity(), (), output) is output


def test_tensor_subclasses_are_read_as_numbers():
    class Named(torch.Tensor):
        pass

    model, inputs = seeded(lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(9, 4)))
    plain, named = (
        nlbench.evaluate(model, given, ["density", "r2"]) for given in (inputs, Named(inputs))
    )
    assert scores(plain).equals(scores(named))


def test_inference_mode_changes_no_number():
    model, inputs = seeded(lambda: (nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(9, 4)))
    settings = {"lines.paths": "directions", "lines.direction": "gradient", "lines.number": 1}
    outside = nlbench.evaluate(model, inputs, ["nlc", "absdev"], settings=settings)
    with torch.inference_mode():
        inside = nlbench.evaluate(model, inputs.clone(), ["nlc", "absdev"], settings=settings)
    assert [record.result.status for record in inside.records] == ["ok", "ok"]
    assert scores(outside).equals(scores(inside))


def test_datasets_of_unknown_size_are_refused():
    class Items(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return torch.zeros(3)

    with pytest.raises(RequestError, match="__len__"):
        nlbench.evaluate(nn.Linear(3, 2), Items(), ["r2"])
