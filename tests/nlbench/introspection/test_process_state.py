"""Settings and functions of the process are restored."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from nlbench.introspection import process_state
from nlbench.introspection.process_state import restored_process_state


@pytest.fixture(autouse=True, scope="module")
def compare_all_modules(all_compared_modules):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_state, "_modules", all_compared_modules)
        yield


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def entered(context):
    context.__enter__()
    KEPT.append(context)  # Some are left when they are deleted.


KEPT = []

CHANGES = {
    "torch.get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_default_device": lambda: torch.set_default_device("meta"),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.is_grad_enabled": lambda: torch._C._set_grad_enabled(False),
    "torch.is_anomaly_enabled": lambda: torch.set_anomaly_enabled(True),
    "torch.is_autocast_enabled('cpu')": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch.backends.cudnn.enabled": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "torch.backends.cuda.flash_sdp_enabled": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "numpy.geterr": lambda: np.seterr(over="raise"),
    "the environment variable NLBENCH_TEST": lambda: os.environ.update(NLBENCH_TEST="1"),
    "the environment variable PATH": lambda: os.environ.pop("PATH"),
    "the working directory": lambda: os.chdir("/"),
    "torch.nn.modules.module._global_forward_hooks": (
        lambda: nn.modules.module.register_module_forward_hook(print)
    ),
    "torch.relu": lambda: setattr(torch, "relu", torch.tanh),
    "torch.nn.functional.relu": lambda: setattr(nn.functional, "relu", torch.tanh),
    "torch.nn.Module.__call__": lambda: setattr(nn.Module, "__call__", lambda self, x: x),
    "torch.Tensor.relu": lambda: setattr(torch.Tensor, "relu", lambda self: self),
    "torch.nn.ReLU.forward": lambda: setattr(nn.ReLU, "forward", lambda self, x: x),
    "torch.nn.ReLU6.forward": lambda: setattr(nn.ReLU6, "forward", lambda self, x: x),
    "torch.nn.Linear.forward": lambda: setattr(nn.Linear, "forward", lambda self, x: x),
    "torch.nn.Linear.reset_parameters": (
        lambda: setattr(nn.Linear, "reset_parameters", lambda self: None)
    ),
    "torch.nn.Linear.__call__": lambda: setattr(nn.Linear, "__call__", lambda self, x: x),
    "torch.nn.LayerNorm.__init__": lambda: delattr(nn.LayerNorm, "__init__"),
    "torch.nn.Linear": lambda: setattr(nn, "Linear", nn.Identity),
    "torch.nn.init.kaiming_uniform_": lambda: setattr(nn.init, "kaiming_uniform_", print),
    "torch.nn.functional.linear": lambda: delattr(nn.functional, "linear"),
    "torch.nn.init": lambda: setattr(nn, "init", torch),
    "torch.linalg.norm": lambda: setattr(torch.linalg, "norm", print),
    "torch._C._nn.gelu": lambda: setattr(torch._C._nn, "gelu", print),
    "torch._VF.lstm": lambda: setattr(torch._VF, "lstm", print),
    "torch.autograd.grad": lambda: setattr(torch.autograd, "grad", print),
    "torch.autograd.Function.apply": (
        lambda: setattr(torch.autograd.Function, "apply", classmethod(print))
    ),
    "torch.Tensor.__add__": lambda: setattr(torch.Tensor, "__add__", lambda self, other: self),
    "torch.Tensor.grad": lambda: setattr(torch.Tensor, "grad", property(print)),
    "torch.float32": lambda: setattr(torch, "float32", torch.float64),
    "numpy.maximum": lambda: setattr(np, "maximum", np.minimum),
    "numpy.linalg.norm": lambda: setattr(np.linalg, "norm", print),
    "math.exp": lambda: setattr(math, "exp", math.log),
    "torch.pi": lambda: setattr(torch, "pi", 3.0),
    # Equal, but another object, with which arithmetic differs.
    "math.pi": lambda: setattr(math, "pi", torch.tensor(math.pi)),
    "sys.modules['torch.nn.functional']": lambda: sys.modules.pop("torch.nn.functional"),
    "sys.path": lambda: sys.path.clear(),
    "sys.meta_path": lambda: setattr(sys, "meta_path", []),
    "the active TorchFunctionModes": lambda: entered(Functions()),
    "the active TorchDispatchModes": lambda: entered(Dispatch()),
    "the active saved_tensors_hooks": (
        lambda: entered(torch.autograd.graph.saved_tensors_hooks(abs, abs))
    ),
    "the level of torch.autograd.forward_ad": lambda: entered(forward_ad.dual_level()),
    "the active transforms of torch.func": (
        lambda: torch._C._functorch._vmap_increment_nesting(2, "error")
    ),
    "torch._C.DisableTorchFunction": lambda: entered(torch._C.DisableTorchFunction()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_restored_and_named(name):
    with restored_process_state() as changes:
        CHANGES[name]()
    with restored_process_state() as again:
        pass
    assert (changes, again) == ([name], [])


def test_additions_are_not_changes():
    with restored_process_state() as changes:
        torch.nlbench_test = nn.Linear.nlbench_test = print
        sys.path.insert(0, "nlbench_test")
    del torch.nlbench_test, nn.Linear.nlbench_test
    sys.path.remove("nlbench_test")
    assert not changes


def test_leaked_inference_mode_is_named_and_ended():
    with restored_process_state() as changes:
        entered(torch.inference_mode())
    assert "torch.is_inference_mode_enabled" in changes
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_leaked_device_is_left_and_default_kept():
    torch.set_default_device("cpu")
    try:
        with restored_process_state() as changes:
            entered(torch.device("meta"))
        assert changes == ["the active TorchFunctionModes"]
        assert torch.zeros(1).device.type == torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_active_modes_stay_active():
    with Functions() as functions, Dispatch() as dispatch:
        with restored_process_state() as changes:
            torch._C._pop_torch_function_stack()
            torch._C._pop_torch_dispatch_stack(None)
            entered(Functions())
        assert torch.overrides._get_current_function_mode_stack() == [functions]
        assert _python_dispatch._get_current_dispatch_mode_stack() == [dispatch]
    assert changes == ["the active TorchFunctionModes", "the active TorchDispatchModes"]


def test_unrestorable_change_is_named_afterwards():
    name = "torch.ops.aten.frac (CPU)"
    library = torch.library.Library("aten", "IMPL")
    try:
        with restored_process_state() as changes:
            library.impl("frac", torch.zeros_like, "CPU", allow_override=True)
        with restored_process_state() as again:
            pass
        assert (list(changes), list(again)) == ([name], [])
        assert changes.left() == again.left()
        assert name in again.left()
        assert not changes.restored("the pass")
    finally:
        library._destroy()
    with restored_process_state() as later:
        pass
    assert not later.left()


def test_many_changes_are_listed_in_short():
    with restored_process_state() as changes:
        for name in list(vars(nn.init)):
            if name.endswith("_") and not name.startswith("_"):
                setattr(nn.init, name, print)
    assert len(changes) > 10
    assert changes.restored("it").endswith(f" and {len(changes) - 10} more; since restored")


def test_ordinary_use_of_libraries_is_not_a_change():
    """In a fresh process, in which nothing has been imported or initialised before."""
    code = """
import warnings; warnings.simplefilter("ignore")
import torch
from torch import nn
from nlbench.introspection.process_state import restored_process_state
with restored_process_state() as changes:
    import torchvision, torch.ao.quantization, torch.export, torch.distributions, torch.fx
    import transformers
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    x = torch.ones(2, 3)
    torch.compile(model, backend="eager")(x)
    torch.jit.trace(torch.jit.script(model), x)
    torch.export.export(model, (x,))
    torch.fx.symbolic_trace(model)
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    torch.func.vmap(torch.func.jacrev(model))(x)
    torch.optim.AdamW(model.parameters()).step()
    torchvision.models.squeezenet1_1()(torch.zeros(1, 3, 32, 32))
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)
    transformers.GPT2LMHeadModel(config)(torch.tensor([[1, 2]]))
print([list(changes), changes.lasting])
"""
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[[], []]"


def test_every_setting_can_be_written():
    for setting in (
        *process_state._SETTINGS,
        *process_state._THREAD_SETTINGS,
        *process_state._MODES,
    ):
        value = setting.read()
        setting.write(value)
        assert setting.read() == value, setting.name


def test_state_is_restored_after_an_error():
    def fail():
        with restored_process_state():
            torch.set_default_dtype(torch.float64)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_default_dtype() is torch.float32


def test_continued_context_restores_what_it_changed():
    relu = torch.relu
    with restored_process_state():
        pass
    with restored_process_state(is_continued=True) as changes:
        torch.relu = torch.tanh
    assert torch.relu is relu
    assert changes == ["torch.relu"]


def test_entering_anew_keeps_changes_made_outside(monkeypatch):
    with restored_process_state():
        pass
    monkeypatch.setattr(torch, "relu", torch.tanh)
    with restored_process_state() as changes:
        pass
    assert torch.relu is torch.tanh
    assert changes == []
