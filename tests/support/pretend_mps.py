"""A simulated Apple GPU, which has no double precision."""

import contextlib

import torch
from pretend_cuda import DEVICE, DefaultGenerator, PretendCuda, current
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _DeviceReplacement(TorchFunctionMode):
    """Replaces MPS devices with DEVICE, since PyTorch supports no MPS device without a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.device:
            args, kwargs = tree_map(_replace_mps, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _replace_mps(argument):
    is_device = isinstance(argument, (torch.device, str))
    return DEVICE if is_device and str(argument).startswith("mps") else argument


def _mps_functions():
    generator = DefaultGenerator()
    return {
        "is_available": lambda: True,
        "synchronize": lambda: current().count_wait("synchronize"),
        "empty_cache": lambda: None,
        "get_rng_state": generator.get_state,
        "set_rng_state": generator.set_state,
        "manual_seed": generator.manual_seed,
        "seed": lambda: None,
        "_get_default_mps_generator": lambda: generator,
    }


class PretendMps(PretendCuda):
    """A context with a simulated Apple GPU."""

    device = torch.device("mps", 0)
    has_double = False

    def stand_ins(self):
        return [(torch.mps, _mps_functions()), (torch.backends.mps, {"is_available": lambda: True})]

    @contextlib.contextmanager
    def modes(self):
        with _DeviceReplacement(), super().modes():
            yield
