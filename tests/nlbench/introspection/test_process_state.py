"""Settings and functions of the process are restored."""

import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from nlbench.introspection import process_state
from nlbench.introspection.process_state import restored_process_state

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
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_restored_and_named(name):
    with restored_process_state() as changes:
        CHANGES[name]()
    with restored_process_state() as again:
        pass
    assert (changes, again) == ([name], [])


def test_additions_are_no_changes():
    with restored_process_state() as changes:
        torch.nlbench_test = 1
    del torch.nlbench_test
    assert not changes


def test_every_setting_can_be_written():
    for setting in (*process_state._SETTINGS, *process_state._THREAD_SETTINGS):
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


def test_overlapping_threads_do_not_restore_each_others_settings():
    begun, done = threading.Event(), threading.Event()

    def overlap():
        with restored_process_state():
            begun.set()
            assert done.wait(60)

    thread = threading.Thread(target=overlap)
    with restored_process_state():
        torch.backends.mkldnn.enabled = False
        thread.start()
        assert begun.wait(60)
    assert not torch.backends.mkldnn.enabled
    done.set()
    thread.join()
    assert torch.backends.mkldnn.enabled
