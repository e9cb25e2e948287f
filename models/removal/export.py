"""Export of networks with calls or blocks removed, for transformers or PyTorch alone."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Tolerance for outputs in float64 after a fold, relative to the largest one."""


def fold_activations(network: nn.Module, inputs: Tensor) -> tuple[nn.Module, int, int]:
    """Copy a network, with maps of activations folded into the layers before them.

    A map folds into a convolution, a linear layer or a batch norm if nothing else reads that
    layer's output. Each fold is checked in float64, and undone if it changes the outputs. A folded
    map becomes an `torch.nn.Identity`.

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
    >>> fold_activations(model, torch.zeros(2, 2))[0][1]
    Identity()
    """
    twin = rebound_copy(network).eval().double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    layers = [module for module in twin.modules() if isinstance(module, AffineActivation)]
    folded = 0
    with torch.no_grad(), evaluation_mode(twin), without_fast_path():
        expected = _outputs(twin, inputs)
        for layer, producer in _find_producers(twin, inputs).items():
            before = [copy.deepcopy(module.state_dict()) for module in (layer, producer)]
            had_bias = producer.bias is not None
            _absorb(producer, layer)
            if _are_equal(_outputs(twin, inputs), expected):
                replace_module(twin, layer, nn.Identity())
                folded += 1
                continue
            if not had_bias:
                producer.bias = None
            for module, state in zip((layer, producer), before, strict=True):
                module.load_state_dict(state)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return twin.to(dtype), folded, len(layers)


def _find_producers(network: nn.Module, inputs: Tensor) -> dict[AffineActivation, Any]:
    """Return the layer whose output each map reads, for layers and maps that are called once."""
    outputs: list[tuple[Tensor, nn.Module]] = []
    reads: list[tuple[AffineActivation, Tensor]] = []

    def note_read(layer: Any, args: Any) -> None:
        reads.append((layer, args[0]))

    def note_output(layer: nn.Module, args: Any, output: Any) -> None:
        outputs.append((output, layer))

    handles = []
    for module in network.modules():
        if isinstance(module, AffineActivation):
            handles.append(module.register_forward_pre_hook(note_read))
        elif _can_absorb(module):
            handles.append(module.register_forward_hook(note_output))
    try:
        network(inputs.clone())
    finally:
        for handle in handles:
            handle.remove()
    producers: dict[AffineActivation, Any] = {}
    callers = [module for _, module in outputs]
    readers = [layer for layer, _ in reads]
    for layer, x in reads:
        source = next((module for output, module in outputs if output is x), None)
        if source is None or callers.count(source) > 1 or readers.count(layer) > 1:
            continue
        axis = x.ndim - 1 if isinstance(source, nn.Linear) else 1
        if layer.axis % x.ndim == axis and x.shape[axis] == len(layer.weight):
            producers[layer] = source
    return producers


def _can_absorb(module: nn.Module) -> bool:
    """Return True for layers whose output channels are rows of a weight."""
    if parametrize.is_parametrized(module) or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return module.affine and module.track_running_stats
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _absorb(producer: Any, layer: AffineActivation) -> None:
    """Fold a map into the layer before it, in place, and make the map an identity."""
    slope = layer.weight.clone()
    intercept = layer.bias.clone()
    producer.weight.mul_(slope.view(-1, *[1] * (producer.weight.ndim - 1)))
    if producer.bias is None:
        producer.bias = nn.Parameter(torch.zeros_like(intercept))
    producer.bias.mul_(slope).add_(intercept)
    layer.weight.fill_(1)
    layer.bias.zero_()


def _outputs(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    return list(tensors_in((network(inputs.clone()),)))


def _are_equal(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        float((a - b).abs().max()) <= FOLDING_TOLERANCE * max(1e-300, float(b.abs().max()))
        for a, b in zip(outputs, expected, strict=True)
    )


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
)
GENERATION = "generation_config.json"

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

_RELOAD_DECODER = """
import transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model, loading = transformers.AutoModelForCausalLM.from_pretrained(
    path, dtype="auto", output_loading_info=True, local_files_only=True)
outputs = model.eval()(inputs).logits
new = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False,
       "pad_token_id": 0, "attention_mask": torch.ones_like(inputs[:1])}
cached, plain = (model.generate(inputs[:1], use_cache=c, **new) for c in (True, False))
facts["generates"] = cached.shape[1] == inputs.shape[1] + 4
facts["agrees"] = torch.equal(cached, plain)
facts["missing"] = sorted(loading["missing_keys"])
facts["unexpected"] = sorted(loading["unexpected_keys"])
facts["use_cache"] = model.config.use_cache
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
    """Export a decoder without some spans.

    See `export_decoder`.

    Raises
    ------
    nlbench.RequestError
        If a map of the stream stands in the network: no layer of a decoder can hold it.
    """
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
    return export_decoder(network, folder, test.inputs, source)


def export_decoder(
    network: nn.Module, folder: Path, tokens: Tensor, source: Path | None = None
) -> str:
    """Write a decoder to a new folder that transformers loads without nlbench.

    Parameters
    ----------
    network : torch.nn.Module
        A causal language model of transformers, or a module that contains one.
    folder : Path
        It appears only when everything is written and checked in another process.
    tokens : integer tensor of shape (n, t)
        Inputs for the check.
    source : Path, optional
        Folder of the original, for its type of numbers, tokenizer and generation config.

    Returns
    -------
    str
        Type of numbers, largest differences of logits, and what the source lacks.

    Raises
    ------
    nlbench.RequestError
        If the network isn't such a model, or the folder isn't empty, or the check fails.
    """
    model = pretrained_model(network)
    if model is None or not model.can_generate():
        raise RequestError(
            "--export of spans takes language models of transformers that generate text; the "
            f"network is a {type(network).__name__}"
        )
    settings = read_json(source / "config.json") if source else {}
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    plain = _rebuild(model, getattr(torch, dtype))
    tokens = tokens[:2, :32].cpu()
    with torch.no_grad():
        logits = plain(tokens).logits
        full = _rebuild(model, torch.float32)(tokens).logits
    with new_folder(folder) as part:
        with quiet():
            plain.save_pretrained(part)
        missing = _copy_files(source, part)
        for file in part.iterdir():
            file.chmod(0o644)
        facts = _reload(_RELOAD_DECODER, part, tokens, logits)
        _check(facts, logits, torch.finfo(plain.dtype).eps)
    text = f"{dtype}, reloaded by transformers alone: logits differ by {facts['difference']:.2g}"
    if rounding := float((logits - full).abs().max()):
        text += f"; rounding to {dtype} changes logits by up to {rounding:.2g}"
    if not facts["agrees"]:
        # Ties of rounded logits may differ.
        text += "; generation differs with and without cache, by rounding"
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


def _rebuild(model: Any, dtype: torch.dtype) -> Any:
    """Build the model anew from its configuration, with all its weights."""
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("quantization_config", "dtype", "torch_dtype", "_attn_implementation")
    }
    config = type(model.config)(**{**settings, "use_cache": True})
    config.architectures = [type(model).__name__]
    # Tables of rotary embeddings stay in float32, as when transformers loads a folder.
    plain = type(model)._from_config(config, dtype=dtype)
    # Every weight of the rebuilt model is in the state dict, and the other way round.
    plain.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    return plain.eval()


def _copy_files(source: Path | None, part: Path) -> list[str]:
    """Copy the tokenizer and the generation config, and return what is missing."""
    missing = []
    for what, names in (("tokenizer", TOKENIZER_FILES), ("generation config", (GENERATION,))):
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
    facts: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return facts


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
    return f"{folded} of {maps} maps folded into the layers before them"


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
