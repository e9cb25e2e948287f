"""Networks defined by a function, recorded as programs."""

import torch
from torch import nn

from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines.exact.trace import trace_exactly
from nlbench.probes.lines.recording.agreement import check_program
from nlbench.probes.lines.recording.program import run_program
from nlbench.probes.lines.recording.recorder import record_program


class Net(nn.Module):
    """A forward function with the modules that it uses."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def record_checked_program(network, example):
    program = record_program(network, example[:1].clone())
    check_program(program, network, example)
    return program


def record_network(net, *shape):
    network = double_copy(net)
    return network, record_checked_program(network, torch.randn(3, *shape, dtype=torch.float64))


def assert_reproduces(net, *shape):
    """Assert that the program of a batch reproduces the network on other inputs, one by one."""
    network, program = record_network(net, *shape)
    inputs = torch.randn(5, *shape, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.cat([network(x.clone()) for x in inputs.split(1)])
    torch.testing.assert_close(run_program(program, inputs), expected, rtol=1e-12, atol=1e-12)
    return program


def trace_program(program, start, end, *, limit=None):
    (trace,) = trace_exactly(program, torch.stack([start, end])[None], limit=limit)
    return trace
