"""The number of activation calls inside PyTorch's recurrent kernels."""

from __future__ import annotations

from torch import Tensor

from .function_calls import FunctionCall

# Calls per layer and step. An LSTM has three gates, a candidate state and a tanh of its cell state.
_CALLS = {"lstm": 5, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def hidden_calls(call: FunctionCall) -> int:
    """Return the number of activation calls that a recurrent kernel replaces; 0 if unknown.

    Examples
    --------
    >>> import torch
    >>> cell = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    >>> flat = cell._flat_weights
    >>> states = (torch.zeros(4, 1, 4), torch.zeros(4, 1, 4))
    >>> args = (torch.zeros(7, 1, 3), states, flat, True, 2, 0.0, False, True, False)
    >>> hidden_calls(FunctionCall(torch._VF.lstm, args))
    140
    """
    name, args = call.name.removesuffix("_cell"), call.args
    calls_per_step = _CALLS.get(name, 0)
    if call.name.endswith("_cell") or not calls_per_step:
        return calls_per_step
    try:
        if isinstance(args[1], Tensor) and args[1].ndim == 1:  # Batch sizes of a packed sequence.
            steps, layers, is_bidirectional = len(args[1]), args[5], args[8]
        else:
            layers, is_bidirectional = args[4], args[7]
            steps = args[0].shape[bool(args[8]) and args[0].ndim == 3]
        return int(calls_per_step * steps * layers * (1 + bool(is_bidirectional)))
    except (IndexError, TypeError):
        return 0
