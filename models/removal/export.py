"""Export of networks with calls or blocks removed, for transformers or PyTorch alone."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nlbench.errors import RequestError, first_line
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.function_calls import tensors_in
from nlbench.introspection.model_copy import rebound_copy
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.wrapped_calls import replace_module
from nlbench.models.networks.hugging_face import model_folder, quiet, read_json
from nlbench.subjects.subject import Subject
from nlbench.subjects.weights import save_weights

from .network import AffineActivation
from .spans import SpanResult, pretrained_model

FOLDING_TOLERANCE = 1e-9
"""Tolerance for outputs in float64 after a change, relative to the largest one."""


def fold_activations(network: nn.Module, inputs: Tensor) -> tuple[nn.Module, int, int]:
    """Copy a network, with maps of activations folded into neighbouring layers.

    A map folds into the convolution, linear layer or batch norm before it if nothing else reads
    that layer's output, or else into the convolution or linear layer after it. Two such layers with
    only a folded map between them are merged if that leaves fewer parameters and operations. Each
    change is checked in float64, and undone if it changes the outputs. A folded map, and the first
    of two merged layers, become an `torch.nn.Identity`.

    Parameters
    ----------
    network : torch.nn.Module
        From `nlbench.models.removal.network.network_with_maps`. Not modified.
    inputs : tensor of shape (n, ...)

    Returns
    -------
    network : torch.nn.Module
        In evaluation mode.
    folded, maps : int
        Number of folded maps, and of all.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), AffineActivation(3), nn.Linear(3, 1))
    >>> fold_activations(model, torch.zeros(2, 2))[0]
    Sequential(
      (0): Identity()
      (1): Identity()
      (2): Linear(in_features=2, out_features=1, bias=True)
    )
    """
    twin = rebound_copy(network).eval().double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    maps = sum(isinstance(module, AffineActivation) for module in twin.modules())
    before: set[str] = set()
    after: set[str] = set()
    with torch.no_grad(), evaluation_mode(twin), without_fast_path():
        expected = _outputs(twin, inputs)
        for change, changed in ((_fold_before, before), (_fold_after, after), (_merge, set())):
            for pair in _find_pairs(twin, inputs):
                if change is _merge and pair.first not in before:
                    continue
                candidate = copy.deepcopy(twin)
                if change(candidate, pair) and _computes(candidate, inputs, expected):
                    twin = candidate
                    changed.add(pair.first)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return twin.to(dtype), len(before) + len(after), maps


@dataclass(frozen=True)
class _Pair:
    """Two modules, each called once, of which the second reads the output of the first.

    Parameters
    ----------
    first, second : str
        Paths.
    shape : torch.Size
        Shape of the tensor between them.
    values : int
        Number of values that the second returns.
    """

    first: str
    second: str
    shape: torch.Size
    values: int

    def refers_to_channels(self, layer: AffineActivation, module: nn.Module) -> bool:
        """Return True if a map refers to the channels of a layer."""
        axis = len(self.shape) - 1 if isinstance(module, nn.Linear) else 1
        return layer.axis % len(self.shape) == axis and self.shape[axis] == len(layer.weight)


def _find_pairs(network: nn.Module, inputs: Tensor) -> list[_Pair]:
    """Return the pairs of maps and layers between which a tensor passes."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
        calls.append((path, args[0], output))

    handles = []
    for path, module in network.named_modules():
        if isinstance(module, AffineActivation) or _can_absorb(module):
            handles.append(module.register_forward_hook(partial(note, path)))
    try:
        network(inputs.clone())
    finally:
        for handle in handles:
            handle.remove()
    paths = [path for path, _, _ in calls]
    single = [call for call in calls if paths.count(call[0]) == 1]
    pairs = []
    for first, _, passed in single:
        for second, x, output in single:
            if x is passed:
                pairs.append(_Pair(first, second, passed.shape, output.numel()))
    return pairs


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _can_absorb(module: nn.Module) -> bool:
    """Return True for layers whose output channels are rows of a weight."""
    if parametrize.is_parametrized(module) or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return module.affine and module.track_running_stats
    return _is_layer(module)


def _fold_before(network: nn.Module, pair: _Pair) -> bool:
    """Fold a map into the layer before it, in place, if that is exact."""
    producer: Any = network.get_submodule(pair.first)
    layer = network.get_submodule(pair.second)
    if not isinstance(layer, AffineActivation) or isinstance(producer, AffineActivation):
        return False
    if not pair.refers_to_channels(layer, producer):
        return False
    producer.weight.mul_(layer.weight.view(-1, *[1] * (producer.weight.ndim - 1)))
    bias = layer.bias if producer.bias is None else producer.bias * layer.weight + layer.bias
    producer.bias = nn.Parameter(bias.clone())
    replace_module(network, layer, nn.Identity())
    return True


def _fold_after(network: nn.Module, pair: _Pair) -> bool:
    """Fold a map into the layer after it, in place, if that is exact.

    A convolution pads with zeros after the map, so that only a map without intercept passes.
    """
    layer = network.get_submodule(pair.first)
    reader: Any = network.get_submodule(pair.second)
    if not isinstance(layer, AffineActivation) or not _is_layer(reader):
        return False
    pads_zeros = _is_padded(reader) and reader.padding_mode == "zeros"
    if not pair.refers_to_channels(layer, reader) or (pads_zeros and bool(layer.bias.any())):
        return False
    weight = reader.weight
    groups = getattr(reader, "groups", 1)
    rows = weight.view(groups, len(weight) // groups, *weight.shape[1:])
    shape = (groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
    shift = (rows * layer.bias.view(shape)).flatten(2).sum(2).flatten()
    reader.bias = nn.Parameter(shift if reader.bias is None else reader.bias + shift)
    rows.mul_(layer.weight.view(shape))
    replace_module(network, layer, nn.Identity())
    return True


def _is_padded(layer: nn.Module) -> bool:
    padding: Any = getattr(layer, "padding", 0)
    return padding == "same" or (not isinstance(padding, str) and bool(torch.tensor(padding).any()))


def _merge(network: nn.Module, pair: _Pair) -> bool:
    """Merge two layers, in place, if that is exact and leaves less to store and to compute.

    The second convolution must not pad: its padding doesn't pass the first one.
    """
    first: Any = network.get_submodule(pair.first)
    second: Any = network.get_submodule(pair.second)
    if not (_is_layer(first) and type(first) is type(second)) or _is_padded(second):
        return False
    if isinstance(first, nn.Linear):
        weight = second.weight @ first.weight
        merged: Any = nn.Linear(first.in_features, second.out_features)
    else:
        is_plain = {1} == {first.groups, second.groups, *first.dilation, *second.dilation}
        if not is_plain or isinstance(first.padding, str):
            return False
        convolve: Any = getattr(nn.functional, f"conv_transpose{first.weight.ndim - 2}d")
        weight = convolve(second.weight, first.weight, stride=first.stride)
        stride = tuple(a * b for a, b in zip(first.stride, second.stride, strict=True))
        settings = {"padding": first.padding, "padding_mode": first.padding_mode}
        kernel = tuple(weight.shape[2:])
        merged = type(first)(first.in_channels, len(weight), kernel, stride, **settings)
    positions = pair.shape.numel() // len(first.weight), pair.values // len(second.weight)
    sizes = first.weight.numel(), second.weight.numel()
    operations = sum(size * count for size, count in zip(sizes, positions, strict=True))
    if weight.numel() >= sum(sizes) or weight.numel() * positions[1] >= operations:
        return False
    bias = torch.zeros(len(weight)).to(weight) if second.bias is None else second.bias
    if first.bias is not None:
        bias = bias + second.weight.reshape(*second.weight.shape[:2], -1).sum(2) @ first.bias
    merged.to(weight)
    merged.weight.copy_(weight)
    merged.bias.copy_(bias)
    replace_module(network, second, merged)
    replace_module(network, first, nn.Identity())
    return True


def _outputs(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    return list(tensors_in((network(inputs.clone()),)))


def _computes(network: nn.Module, inputs: Tensor, expected: list[Tensor]) -> bool:
    """Return True if a changed network still runs and computes the expected outputs."""
    try:
        outputs = _outputs(network, inputs)
    except Exception:  # For example where a residual branch reads a tensor that changed its shape.
        return False
    return all(
        a.shape == b.shape
        and float((a - b).abs().max()) <= FOLDING_TOLERANCE * max(1e-300, float(b.abs().max()))
        for a, b in zip(outputs, expected, strict=True)
    )


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
)
IMAGES = "preprocessor_config.json"

RELOAD_TOLERANCE = 1e-5
"""Least tolerance for logits in another process, relative to the largest one."""

_START = """
import json, sys
sys.modules["nlbench"] = None
import torch
path, reference = sys.argv[1:]
saved = torch.load(reference)
torch.set_num_threads(saved["threads"])
torch.set_grad_enabled(False)
inputs, facts = saved["inputs"], {}
"""

_RELOAD_PRETRAINED = """
import transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
model, loading = getattr(transformers, config.architectures[0]).from_pretrained(
    path, dtype="auto", output_loading_info=True, local_files_only=True)
outputs = model.eval()(inputs)[0]
facts["agrees"] = True
if model.can_generate():
    new = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False,
           "pad_token_id": 0, "attention_mask": torch.ones_like(inputs[:1])}
    cached, plain = (model.generate(inputs[:1], use_cache=c, **new) for c in (True, False))
    facts["generates"] = cached.shape[1] == inputs.shape[1] + 4
    facts["agrees"] = torch.equal(cached, plain)
    facts["use_cache"] = model.config.use_cache
facts["missing"] = sorted(loading["missing_keys"])
facts["unexpected"] = sorted(loading["unexpected_keys"])
"""

_RELOAD_PROGRAM = """
outputs = torch.export.load(path).module()(inputs)
"""

_END = """
facts["difference"] = float((outputs - saved["outputs"]).float().abs().max())
print(json.dumps(facts))
"""


def export_spans(
    network: nn.Module, removed: Sequence[SpanResult], folder: Path, model: str, test: Subject
) -> str:
    """Export a network without some spans: for transformers, or for PyTorch if it has none.

    See `export_pretrained` and `export_program`.

    Raises
    ------
    nlbench.RequestError
        If a map of the stream stands in a model of transformers: none of its layers can hold it.
    """
    if pretrained_model(network) is None:
        export_program(network, folder, test.inputs[:8])
        return "reloaded by PyTorch alone"
    for span in removed:
        if span.chosen == "affine":
            costs = span.costs
            fold = costs.get("fold")
            advice = f"--map fold costs {fold} nats" if fold else "fold isn't possible there"
            raise RequestError(
                f"--export: the affine map at {span.name} costs {costs['affine']} nats, but no "
                "layer of the network can hold it, since the residual stream passes every layer; "
                f"{advice}, and --map skip {costs['skip']}"
            )
    source = model_folder(model.removeprefix("hf/")) if model.startswith("hf/") else None
    return export_pretrained(network, folder, test.inputs, source)


def export_pretrained(
    network: nn.Module, folder: Path, inputs: Tensor, source: Path | None = None
) -> str:
    """Write a model to a new folder that transformers loads without nlbench.

    Parameters
    ----------
    network : torch.nn.Module
        A model of transformers, or a module that contains one.
    folder : Path
        It appears only when everything is written and checked in another process.
    inputs : tensor of shape (n, ...)
        Tokens or images for the check.
    source : Path, optional
        Folder of the original, for its type of numbers, tokenizer and other settings.

    Returns
    -------
    str
        Type of numbers, largest differences of outputs, and what the source lacks.

    Raises
    ------
    nlbench.RequestError
        If the network isn't such a model, or the folder isn't empty, or the check fails.
    """
    model = pretrained_model(network)
    name = type(network if model is None else model).__name__
    if model is None or getattr(importlib.import_module("transformers"), name, None) is None:
        raise RequestError(f"--export: transformers has no model {name}")
    settings = read_json(source / "config.json") if source else {}
    dtype = getattr(torch, str(settings.get("dtype") or settings.get("torch_dtype") or "float32"))
    plain, absent = _rebuild(model, dtype)
    inputs = inputs[:2].cpu()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs[:, :32]
    with torch.no_grad():
        outputs = plain(inputs)[0]
        exact = inputs.float() if inputs.is_floating_point() else inputs
        full = _rebuild(model, torch.float32)[0](exact)[0]
    with new_folder(folder) as part:
        with quiet():
            plain.save_pretrained(part)
        missing = _copy_files(source, part, model)
        for file in part.iterdir():
            file.chmod(0o644)
        facts = _reload(_RELOAD_PRETRAINED, part, inputs, outputs)
        facts["missing"] = [name for name in facts["missing"] if name not in absent]
        _check(facts, outputs, torch.finfo(dtype).eps)
    name = str(dtype).removeprefix("torch.")
    what = "logits" if model.can_generate() else "outputs"
    text = f"{name}, reloaded by transformers alone: {what} differ by {facts['difference']:.2g}"
    if rounding := float((outputs - full).abs().max()):
        text += f"; rounding to {name} changes {what} by up to {rounding:.2g}"
    if not facts["agrees"]:
        # Ties of rounded logits may differ.
        text += "; generation differs with and without cache, by rounding"
    if absent:
        modules = sorted({name.partition(".")[0] for name in absent})
        text += f"; transformers adds a random {', '.join(modules)}, which the network lacks"
    if missing:
        text += f"; without {' and '.join(missing)}, which the source lacks"
    return text


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets its name at the end, unless an error occurs.

    Raises
    ------
    nlbench.RequestError
        If the folder exists and isn't empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(f"--export: {folder} exists and isn't empty")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        part = Path(temporary, "part")
        part.mkdir()
        yield part
        if folder.exists():
            folder.rmdir()
        part.rename(folder)


UNEXPORTED_SETTINGS = (
    *("quantization_config", "dtype", "torch_dtype", "_attn_implementation"),
    # Of backbones; they follow from the number of blocks.
    *("stage_names", "out_features", "out_indices"),
)


def _rebuild(model: Any, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """Build the model anew from its configuration, and name the weights that it lacks."""
    settings = model.config.to_dict()
    for name in UNEXPORTED_SETTINGS:
        settings.pop(name, None)
    if model.can_generate():
        settings["use_cache"] = True
    with quiet():
        config = type(model.config)(**settings)
        config.architectures = [type(model).__name__]
        # Tables of rotary embeddings stay in float32, as when transformers loads a folder.
        plain = type(model)._from_config(config, dtype=dtype)
    names = set(plain.state_dict())
    # A pooler, for example, is optional.
    present = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for path, module in list(plain.named_modules()):
        for name in [name for name, _ in module.named_children()]:
            if f"{path}.{name}".removeprefix(".") not in present:
                setattr(module, name, None)
    plain.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    return plain.eval(), sorted(names - set(plain.state_dict()))


def _copy_files(source: Path | None, part: Path, model: Any) -> list[str]:
    """Copy the tokenizer and other settings of a model, and return what is missing."""
    wanted: dict[str, Sequence[str]] = {"tokenizer": TOKENIZER_FILES}
    if model.main_input_name == "pixel_values":
        wanted = {"image settings": [IMAGES]}
    if model.can_generate():
        wanted["generation config"] = ["generation_config.json"]
    missing = []
    for what, names in wanted.items():
        files = [source / name for name in names if source and (source / name).is_file()]
        for file in files:
            shutil.copyfile(file, part / file.name)
        if not files:
            missing.append(what)
    return missing


def _reload(script: str, path: Path, inputs: Tensor, outputs: Tensor) -> dict[str, Any]:
    """Run a script on an export in a process without nlbench, and return its facts."""
    with tempfile.TemporaryDirectory() as temporary:
        reference = Path(temporary, "reference.pt")
        threads = torch.get_num_threads()
        torch.save({"inputs": inputs, "outputs": outputs, "threads": threads}, reference)
        process = subprocess.run(
            [sys.executable, "-c", f"{_START}{script}{_END}", str(path), str(reference)],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise RequestError(f"--export: another process can't load the network: {lines[-1]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def _check(facts: dict[str, Any], outputs: Tensor, tolerance: float = 0.0) -> None:
    """Raise if the network in the other process isn't the exported one."""
    faults = []
    for key in ("missing", "unexpected"):
        if names := facts.get(key):
            faults.append(f"{key} weights {', '.join(names[:3])}")
    scale = float(outputs.abs().max())
    if not facts["difference"] <= max(RELOAD_TOLERANCE, tolerance) * scale:
        faults.append(f"outputs that differ by {facts['difference']:.2g} of {scale:.2g}")
    if not (facts.get("use_cache", True) and facts.get("generates", True)):
        faults.append("no generation with a cache")
    if faults:
        raise RequestError(f"--export: the reloaded network has {'; '.join(faults)}")


def export_calls(network: nn.Module, folder: Path, inputs: Tensor) -> str:
    """Export a network without some calls, with maps folded, and return a description."""
    inputs = inputs.to(next(network.parameters(), inputs).device)
    folded_network, folded, maps = fold_activations(network, inputs)
    export_program(folded_network, folder, inputs)
    before = sum(p.numel() for p in network.parameters())
    after = sum(p.numel() for p in folded_network.parameters())
    return (
        f"{folded} of {maps} maps folded into their neighbours, {before:,} → {after:,} parameters"
    )


def export_program(network: nn.Module, folder: Path, inputs: Tensor) -> float:
    """Write a network to a new folder, as a program and a state dict that PyTorch loads alone.

    Parameters
    ----------
    network : torch.nn.Module
        In evaluation mode.
    folder : Path
        For ``network.pt2``, which `torch.export.load` reads and which takes batches of any size,
        and ``network.safetensors``. It appears only when another process has loaded the program.
    inputs : tensor of shape (n, ...)

    Returns
    -------
    float
        Largest difference of outputs between this process and the other one.

    Raises
    ------
    nlbench.RequestError
        If `torch.export` can't trace the network, or the other process can't load it.
    """
    network = network.cpu()
    inputs = inputs[:3].cpu()
    shapes = ({0: torch.export.Dim("batch")},)
    try:
        program = torch.export.export(network, (inputs[:2].clone(),), dynamic_shapes=shapes)
    except Exception as error:
        # torch.export raises errors of many types.
        raise RequestError(f"--export: torch.export: {first_line(error)}") from error
    with torch.no_grad():
        outputs = network(inputs.clone())
    with new_folder(folder) as part:
        torch.export.save(program, part / "network.pt2")
        save_weights(part / "network.safetensors", network, {})
        facts = _reload(_RELOAD_PROGRAM, part / "network.pt2", inputs, outputs)
        _check(facts, outputs)
    return float(facts["difference"])
