import torch
from torch import nn

from nlbench.models.networks.transformer import TransformerTiny


def test_position_ignores_later_targets():
    torch.manual_seed(0)
    network = TransformerTiny(20).eval()
    tokens = torch.randint(4, 20, (2, 2, 9))
    changed = tokens.clone()
    changed[:, 1, 5:] = 7
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_source_padding_changes_nothing():
    torch.manual_seed(0)
    network = TransformerTiny(20).eval()
    tokens = torch.randint(4, 20, (2, 2, 6))
    longer = nn.functional.pad(tokens, (0, 3))
    torch.testing.assert_close(network(tokens), network(longer)[:, :6])


def test_evaluation_without_gradients_equals_training_output():
    # PyTorch's fused encoder layer would apply a ReLU of its own here.
    torch.manual_seed(0)
    network = TransformerTiny(20)
    for module in network.modules():
        if isinstance(getattr(module, "activation", None), nn.ReLU):
            module.activation = nn.Tanh()
    tokens = torch.randint(4, 20, (2, 2, 6))
    expected = network.train()(tokens)
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(tokens), expected)


def test_parameter_count_follows_from_sizes():
    attention = 4 * (64 * 64 + 64)
    feed_forward = 64 * 128 + 128 + 128 * 64 + 64
    encoder = 2 * (attention + feed_forward + 2 * 128) + 128
    decoder = 2 * (2 * attention + feed_forward + 3 * 128) + 128
    ends = 50 * 64 + 64 * 50 + 50
    found = sum(p.numel() for p in TransformerTiny(50).parameters())
    assert found == encoder + decoder + ends
