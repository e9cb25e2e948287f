"""Models of Hugging Face's transformers, from a folder or its cache."""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.citation import Source
from nlbench.errors import RequestError, one_line
from nlbench.parsers import unique
from nlbench.registry import Family, find_version
from nlbench.serialization.files import parse_json, read_text
from nlbench.serialization.hashing import content_key, file_hash
from nlbench.subjects.data import Preprocessing
from nlbench.subjects.model import ANY_DATA, model
from nlbench.subjects.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weight files in transformers' order of preference."""

VOCABULARIES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)

IMAGE_SETTINGS = "preprocessor_config.json"

INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Names of Pillow's interpolation modes, keyed by number."""

_LOCAL_ONLY: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Without it, transformers asks on the terminal whether to run a folder's code."""

INSTALL = "pip install 'nlbench[transformers]'"


class HuggingFace(Family):
    """Models by the path of their folder, or by their name in the local cache."""

    description = "hf/PATH: a transformers folder, or a model in its cache; never downloaded"

    def names(self) -> Sequence[str]:
        """Return the models in the cache."""
        folders = sorted(_cache_folder().glob("models--*/snapshots/*/config.json"))
        return tuple(unique(path.parts[-4][8:].replace("--", "/") for path in folders))

    def matches(self, pattern: str) -> Sequence[str]:
        """Return the folders that a glob names."""
        # Path.glob doesn't accept absolute patterns.
        folders = sorted(glob.glob(os.path.expanduser(pattern)))  # noqa: PTH111, PTH207
        return tuple(folder for folder in folders if Path(folder, "config.json").is_file())

    def describe(self, name: str) -> str:
        """Return a one-line description."""
        return f"transformers' model {name}"

    def providers(self) -> tuple[str, ...]:
        """Return the version of transformers, if it is installed."""
        version = find_version("transformers")
        return (f"transformers {version}",) if version else ()

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a model."""
        folder = model_folder(name)
        config = _read_config(folder)
        takes_text = "vocab_size" in config

        def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
            _check_data(config, input_shape, num_classes)
            with quiet():
                return _network(folder, config)

        def read(path: Path) -> tuple[Mapping[str, Tensor], dict[str, str]]:
            with quiet():
                return _trained_state(folder, config)

        def fingerprint() -> str:
            files = sorted(p for p in folder.iterdir() if p.is_file() and _affects_results(p))
            return content_key({path.name: file_hash(path) for path in files})

        weights = [folder / file for file in WEIGHTS]
        declaration: dict[str, Any] = {"read": read, "fingerprint": fingerprint}
        if any((folder / file).is_file() for file in VOCABULARIES):
            declaration["tokenizer"] = lambda: _tokenizer(folder, config)
        if (folder / IMAGE_SETTINGS).is_file():
            declaration["preprocessing"] = lambda _: _preprocessing(folder)
        build.__name__ = name
        build.__doc__ = f"Build {_architecture(config) or 'a model'} of transformers from {folder}."
        return model(
            trained={ANY_DATA: next((p for p in weights if p.is_file()), weights[0])},
            source=Source(f"transformers {find_version('transformers')}, {_architecture(config)}"),
            obtain="use --weights init, or put them there",
            data="text/python" if takes_text else "photographs",
            **declaration,
        )(build)


def model_folder(name: str) -> Path:
    """Find the folder of a model: a path, or a name such as ``org/model`` in the cache."""
    _transformers()
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises for unknown users
    if folder.is_dir():
        return folder
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except Exception as error:
        # The type of the error varies, for example for invalid repository names.
        raise RequestError(
            f"hf/{name}: no such folder, and no such model in {_cache_folder()}; nlbench downloads "
            f"no models, so run hf download {name} first"
        ) from error


@cache
def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise RequestError(f"the models hf/* need transformers ({error}): {INSTALL}") from error


def _cache_folder() -> Path:
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")  # noqa: PTH111
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object."""
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise RequestError(f"{path}: expected a JSON object")
    return content


def _read_config(folder: Path) -> dict[str, Any]:
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter and not (folder / "config.json").is_file():
        raise RequestError(
            f"hf/{folder} is an adapter, which needs its base model; merge the two "
            "(merge_and_unload) and save the whole model"
        )
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise RequestError(f"hf/{folder}: config.json has no model_type, which transformers writes")
    if config.get("is_encoder_decoder"):
        raise RequestError(
            f"hf/{folder} is an encoder-decoder, which needs two inputs; pass the model and a "
            "loader of mappings to nlbench.evaluate"
        )
    if "quantization_config" in config:
        raise RequestError(f"hf/{folder} is quantised; expected weights in floating point")
    return config


def _check_data(config: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> None:
    """Raise `RequestError` unless the model fits the input shape and the number of classes."""
    if "vocab_size" in config:
        vocabulary = int(config["vocab_size"])
        if len(shape) != 1 or classes > vocabulary:
            raise RequestError(
                f"it takes rows of tokens from a vocabulary of {vocabulary}, not inputs of shape "
                f"{shape} with {classes} classes; use text/python or text/PATH"
            )
        return
    channels = config.get("num_channels")
    side = config.get("image_size")
    expected = (channels, side, side)
    if isinstance(channels, int) and isinstance(side, int) and shape != expected:
        raise RequestError(f"it takes images of shape {expected}, not {shape}")
    names = config.get("id2label")
    is_classifier = _architecture(config).endswith("ForImageClassification")
    if is_classifier and names and len(names) != classes:
        raise RequestError(f"it has {len(names)} classes, the data {classes}")


def _preprocessing(folder: Path) -> Preprocessing:
    """Return a folder's preprocessing: a resize, a central crop and a per-channel normalisation."""
    path = folder / IMAGE_SETTINGS
    settings = read_json(path)
    size = settings.get("size")
    crop = settings.get("crop_size")
    size = {"shortest_edge": size} if isinstance(size, int) else size or {}
    side = size.get("shortest_edge") or size.get("height")
    square = (crop or {}).get("height") if isinstance(crop, dict) else crop
    cropped = square if settings.get("do_center_crop", False) else side
    if not isinstance(side, int) or not isinstance(cropped, int) or "image_mean" not in settings:
        raise RequestError(f"{path}: expected a square size, image_mean and image_std")
    return Preprocessing(
        cropped,
        side,
        tuple(settings["image_mean"]),
        tuple(settings["image_std"]),
        INTERPOLATIONS.get(settings.get("resample", 2), "bilinear"),
        squash="height" in size,
        origin=folder.name,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _affects_results(path: Path) -> bool:
    """Return True if a file other than the weights affects the results."""
    is_shard = path.suffix in (".safetensors", ".bin") and "-of-" in path.name
    return is_shard or path.suffix in (".json", ".txt", ".model")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers, and convert its errors to one-line `RequestError`."""
    import torch

    logging = _transformers().utils.logging
    verbosity = logging.get_verbosity()
    has_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RequestError(f"transformers can't load it: {one_line(str(error), 200)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _class_and_config(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class of the model and its configuration. Code in the folder isn't run."""
    transformers = _transformers()
    name = _architecture(config)
    # Eager attention exposes its softmax as an activation.
    parsed = transformers.AutoConfig.from_pretrained(
        folder, **_LOCAL_ONLY, attn_implementation="eager"
    )
    parsed.use_cache = False
    kind = getattr(transformers, name, None) if name else transformers.MODEL_MAPPING[type(parsed)]
    if kind is None:
        raise RequestError(
            f"transformers {transformers.__version__} has no {name}, and code in a model's folder "
            "isn't run; pass the model to nlbench.evaluate"
        )
    return kind, parsed


def _network(folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """Build the model in float32, freshly initialised."""
    import torch

    kind, parsed = _class_and_config(folder, config)
    return kind._from_config(parsed, dtype=torch.float32)


def _trained_state(
    folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the weights in float32 with transformers, which handles old names and shards."""
    import torch

    kind, parsed = _class_and_config(folder, config)
    network, loading = kind.from_pretrained(
        folder, config=parsed, **_LOCAL_ONLY, dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise RequestError(
            f"its weights don't fit {kind.__name__}: {len(missing)} tensors are missing or have "
            f"another shape, such as '{missing[0]}'"
        )
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    remark = {} if stored == "float32" else {"remark": f"weights of {stored}, widened to float32"}
    return dict(network.state_dict()), remark


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Load a model's tokenizer, with the special tokens that it adds around a text."""
    with quiet():
        tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, **_LOCAL_ONLY)
    # Special tokens are those that the tokenizer adds around any text.
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    complete = tokenizer("a", add_special_tokens=True)["input_ids"]
    start = next(i for i in range(len(complete)) if complete[i : i + len(plain)] == plain)
    end = tuple(complete[start + len(plain) :])
    separator = end or tuple(t for t in [tokenizer.eos_token_id] if t is not None)
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])

    return Tokenizer(
        type(tokenizer).__name__,
        encode,
        len(tokenizer),
        tuple(complete[:start]),
        end,
        separator,
        predicts_next=_architecture(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    )
