"""Export of networks with calls or blocks removed, for transformers or PyTorch alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line
from nlbench.models.networks.hugging_face import quiet
from nlbench.subjects.weights import save_weights

from .spans import pretrained_model

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
)
GENERATION = "generation_config.json"

RELOAD_TOLERANCE = 1e-5
"""Least tolerance for logits in another process, relative to the largest one."""

_RELOAD = """
import json, sys
sys.modules["nlbench"] = None
import torch, transformers
folder, reference = sys.argv[1:]
saved = torch.load(reference)
torch.set_num_threads(saved["threads"])
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model, loading = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype="auto", output_loading_info=True, local_files_only=True)
model.eval()
tokens, facts = saved["tokens"], {}
with torch.no_grad():
    logits = model(tokens).logits
    facts["difference"] = float((logits - saved["logits"]).float().abs().max())
    new = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False,
           "pad_token_id": 0, "attention_mask": torch.ones_like(tokens[:1])}
    cached, plain = (model.generate(tokens[:1], use_cache=c, **new) for c in (True, False))
facts["generates"] = cached.shape[1] == tokens.shape[1] + 4
facts["agrees"] = torch.equal(cached, plain)
facts["missing"] = sorted(loading["missing_keys"])
facts["unexpected"] = sorted(loading["unexpected_keys"])
facts["use_cache"] = model.config.use_cache
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
    settings = _read_json(source / "config.json") if source else {}
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    plain = _rebuild(model, getattr(torch, dtype))
    tokens = tokens[:2, :32].cpu()
    with torch.no_grad():
        logits = plain(tokens).logits
        full = _rebuild(model, torch.float32)(tokens).logits
    with new_folder(folder) as part, tempfile.TemporaryDirectory() as temporary:
        with quiet():
            plain.save_pretrained(part)
        missing = _copy_files(source, part)
        for file in part.iterdir():
            file.chmod(0o644)
        reference = {"tokens": tokens, "logits": logits, "threads": torch.get_num_threads()}
        torch.save(reference, Path(temporary, "reference.pt"))
        facts = _reload(_RELOAD, part, Path(temporary, "reference.pt"))
        tolerance = max(RELOAD_TOLERANCE, torch.finfo(plain.dtype).eps)
        _check(facts, float(logits.abs().max()), tolerance)
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
    copied = []
    for name in (*TOKENIZER_FILES, GENERATION):
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, part / name)
            copied.append(name)
    missing = []
    if not set(copied) & set(TOKENIZER_FILES):
        missing.append("tokenizer")
    if GENERATION not in copied:
        missing.append("generation config")
    return tuple(missing)


def _reload(script: str, path: Path, reference: Path) -> dict[str, Any]:
    """Run a script on an export in a process without nlbench, and return its facts."""
    process = subprocess.run(
        [sys.executable, "-c", script, str(path), str(reference)],
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


def _check(facts: dict[str, Any], scale: float, tolerance: float) -> None:
    faults = []
    for key in ("missing", "unexpected"):
        if facts[key]:
            faults.append(f"{key} weights {', '.join(facts[key][:3])}")
    if not facts["difference"] <= tolerance * scale:
        faults.append(f"logits that differ by {facts['difference']:.2g} of {scale:.2g}")
    if not (facts["use_cache"] and facts["generates"]):
        faults.append("no generation with a cache")
    if faults:
        raise RequestError(f"--export: the reloaded folder has {'; '.join(faults)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {first_line(error)}") from error
    return dict(content)


_LOAD_PROGRAM = """
import json, sys
sys.modules["nlbench"] = None
import torch
program, reference = sys.argv[1:]
saved = torch.load(reference)
torch.set_num_threads(saved["threads"])
with torch.no_grad():
    output = torch.export.load(program).module()(saved["inputs"])
print(json.dumps({"difference": float((output - saved["outputs"]).abs().max())}))
"""


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
        reference = {"inputs": inputs, "outputs": outputs, "threads": torch.get_num_threads()}
        with tempfile.TemporaryDirectory() as temporary:
            torch.save(reference, Path(temporary, "reference.pt"))
            facts = _reload(_LOAD_PROGRAM, part / "network.pt2", Path(temporary, "reference.pt"))
        if not facts["difference"] <= RELOAD_TOLERANCE * float(outputs.abs().max()):
            raise RequestError(
                f"--export: outputs of the reloaded program differ by {facts['difference']:.2g}"
            )
    return float(facts["difference"])
