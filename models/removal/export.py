"""Export of networks with calls or blocks removed, for transformers or PyTorch alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line
from nlbench.models.networks.hugging_face import model_folder, quiet, read_json
from nlbench.subjects.subject import Subject
from nlbench.subjects.weights import save_weights

from .folding import fold_activations
from .span_removal import RemovedSpan
from .spans import pretrained_model

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


@dataclass(frozen=True)
class ExportReport:
    """Facts of an exported folder.

    Parameters
    ----------
    rounding : float
        Largest difference of logits by rounding to the folder's type.
    reload : float
        Largest difference of logits between this process and one that loads the folder.
    missing : tuple of str
        What the source lacks: ``tokenizer``, ``generation config``.
    cache_agrees : bool
        True if generation is the same with and without a cache. Ties of rounded logits may differ.
    """

    dtype: str
    rounding: float
    reload: float
    missing: tuple[str, ...]
    cache_agrees: bool

    def __str__(self) -> str:
        """Describe the export in one line."""
        text = f"{self.dtype}, reloaded by transformers alone: logits differ by {self.reload:.2g}"
        if self.rounding:
            text += f"; rounding to {self.dtype} changes logits by up to {self.rounding:.2g}"
        if not self.cache_agrees:
            text += "; generation differs with and without cache, by rounding"
        if self.missing:
            text += f"; without {' and '.join(self.missing)}, which the source lacks"
        return text


def export_spans(
    network: nn.Module, removed: Sequence[RemovedSpan], folder: Path, model: str, test: Subject
) -> ExportReport:
    """Export a decoder without some spans; see `export_decoder`.

    Raises
    ------
    nlbench.RequestError
        If a map of the stream stands in the network: no layer of a decoder can hold it.
    """
    for span in removed:
        if span.map == "affine":
            costs = span.result.costs
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
) -> ExportReport:
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
    return ExportReport(
        dtype, float((logits - full).abs().max()), facts["difference"], missing, facts["agrees"]
    )


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


def _copy_files(source: Path | None, part: Path) -> tuple[str, ...]:
    """Copy the tokenizer and the generation config, and return what is missing."""
    missing = []
    for what, names in (("tokenizer", TOKENIZER_FILES), ("generation config", (GENERATION,))):
        files = [source / name for name in names if source and (source / name).is_file()]
        for file in files:
            shutil.copyfile(file, part / file.name)
        if not files:
            missing.append(what)
    return tuple(missing)


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
