"""The small GPT, and its training on text."""

import dataclasses

import pytest
import torch

from nlbench.errors import RequestError
from nlbench.models.training.recipes import translation
from nlbench.models.training.tasks import NextToken, get_task
from nlbench.probes.sites.modules import find_places
from nlbench.studies.networks.gpt import SmallGPT
from nlbench.subjects.load import load_dataset


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "ab.txt"
    file.write_text("abc" * 4000)
    return load_dataset(f"text/{file}", {"windows": 64, "length": 16})


def network():
    torch.manual_seed(0)
    return SmallGPT(256, 16, blocks=2, width=32)


def test_later_tokens_do_not_change_earlier_logits():
    model, tokens = network().eval(), torch.randint(256, (3, 16))
    changed = tokens.clone()
    changed[:, 9:] += 1
    first, second = model(tokens), model(changed % 256)
    torch.testing.assert_close(first[:, :9], second[:, :9])
    assert (first[:, 9:] - second[:, 9:]).abs().amax((1, 2)).min() > 1e-3


def test_gpt_blocks_attentions_and_mlps_are_places():
    tokens = torch.randint(256, (2, 16))
    for of, name in (("blocks", ""), ("attention", ".attention"), ("mlp", ".mlp")):
        places = find_places(network(), tokens, of)
        assert [place.name for place in places] == [f"blocks.{i}{name}" for i in range(2)]


def test_training_on_text_learns_the_next_token(text):
    task, model = get_task(text, translation, 0), network()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    cpu, generator = torch.device("cpu"), torch.Generator()
    before = task.accuracy(model, "test", cpu)
    for _ in range(12):
        for inputs, targets in task.read("train", torch.arange(task.size), 16, cpu, generator):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
    assert before < 0.1 < 0.9 < task.accuracy(model, "test", cpu)


def test_recipes_of_images_are_refused(text):
    noisy = dataclasses.replace(translation, label_noise=0.2)
    with pytest.raises(RequestError):
        NextToken(text, noisy)
