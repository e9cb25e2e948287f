"""The folder beside a checkpoint: what decided its weights, and how training went.

Beside ``NAME.safetensors`` lies the folder ``NAME.training``: ``manifest.json`` says what
decided the weights, ``epochs.csv`` how training went, ``epoch0010.safetensors`` are
checkpoints on the way, and ``state`` is there as long as training is not finished.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nlbench.environment import Machine
from nlbench.errors import RequestError
from nlbench.files import make_folder, remove_parts, write_atomically
from nlbench.manifest import make_manifest, now
from nlbench.weights import file_hash, save_weights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["EpochLike", "Trained", "TrainingLog"]

FORMAT = 1


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Parameters
    ----------
    file : Path
        The checkpoint.
    train_accuracy, test_accuracy : float
    scores : mapping of str to float
        What else was measured at the end.
    is_reached : bool
        Whether the recipe's thresholds were reached.
    epochs : int
    """

    file: Path
    train_accuracy: float
    test_accuracy: float
    scores: Mapping[str, float]
    is_reached: bool
    epochs: int


class EpochLike(Protocol):
    """What a recipe's ``train`` tells of an epoch.

    ``train_accuracy`` is None where it wasn't measured. Another attribute, ``running_accuracy``,
    is optional.
    """

    number: int
    learning_rate: float
    loss: float
    train_accuracy: float | None
    test_accuracy: float
    scores: Mapping[str, float]


class TrainingLog:
    """What a training leaves on disk.

    Parameters
    ----------
    out : Path
        The checkpoint.
    request : dataclass
        What was asked for, with at least ``model``, ``data``, ``recipe`` and ``seed``.
    recipe : dataclass
        What it was made of.
    command : str
        The command line, for the manifest.
    """

    def __init__(self, out: Path, request: Any, recipe: Any, command: str) -> None:
        self.out = out
        self.folder = out.with_suffix(".training")
        self.state = self.folder / "state"
        self.request = request
        self.recipe = recipe
        self.manifest: dict[str, Any] = {}
        self.command = command
        self.rows: list[EpochLike] = []
        self.kept: dict[str, str] = {}

    def finished(self) -> Trained | None:
        """What an earlier call finished, if it was the same training.

        Raises
        ------
        nlbench.RequestError
            If it was another one, or its checkpoint was changed since.
        """
        old = self._read()
        result = old.get("result")
        if result is None or not self.out.is_file():
            return None
        if not self._is_same(old) or old.get("recipe") != _plain(asdict(self.recipe)):
            raise RequestError(f"{self.out} was trained in another way; choose another --out")
        if file_hash(self.out) != result["file_hash"]:
            raise RequestError(f"{self.out} is not what its training wrote; choose another --out")
        self.state.unlink(missing_ok=True)
        return Trained(
            self.out,
            result["train_accuracy"],
            result["test_accuracy"],
            result["scores"],
            result["is_reached"],
            result["epochs"],
        )

    def check(self, *, resume: bool) -> None:
        """Refuse to overwrite what isn't taken up.

        Raises
        ------
        nlbench.RequestError
            If there is a checkpoint or an interrupted training that is not to be resumed, or
            is another one.
        """
        if self.state.exists() and not resume:
            raise RequestError(
                f"{self.folder} holds an interrupted training; --resume goes on with it, and "
                f"removing {self.state} lets it begin anew"
            )
        old = self._read()
        if self.out.exists() and not (resume and old):
            raise RequestError(f"{self.out} exists; remove it or choose another --out")
        if self.state.exists() and old and not self._is_same(old):
            raise RequestError(
                f"{self.folder} holds an interrupted training of another kind; choose another "
                f"--out, or remove {self.state}"
            )

    def open(self, device: torch.device) -> None:
        """Make the folder, or take up an old one."""
        make_folder(self.folder)
        remove_parts(self.folder)
        old = self._read() if self.state.exists() else {}
        calls = [*old.get("calls", []), {"started": now(), "command": self.command}]
        self.manifest = {
            **make_manifest(
                asdict(self.request),
                Machine.at(device),
                command=self.command,
                created=old.get("created"),
            ),
            "threads": torch.get_num_threads(),
            "recipe": asdict(self.recipe),
            "seeds": [self.request.seed],
            "calls": calls,
        }
        self.kept = dict(old.get("checkpoints", {}))
        self._write()

    def abandon(self) -> None:
        """Remove the folder of a training that was refused before its first epoch."""
        manifest = self.folder / "manifest.json"
        if [entry.name for entry in self.folder.iterdir()] == [manifest.name]:
            manifest.unlink()
            self.folder.rmdir()

    def keep(self, epoch: EpochLike, model: nn.Module, metadata: Mapping[str, str]) -> None:
        """Keep a checkpoint of an epoch."""
        file = self.folder / f"epoch{epoch.number:04d}.safetensors"
        save_weights(file, model, {**self._header(epoch), **metadata})
        self.kept[file.name] = file_hash(file)
        self._write()

    def note(self, epoch: EpochLike) -> None:
        """Write a line of the log."""
        self.rows.append(epoch)
        write_atomically(self.folder / "epochs.csv", _table(self.rows))

    def close(self, result: Any) -> Trained:
        """Write the checkpoint, the manifest that says it is finished, and forget the state.

        In this order a process that is killed in between leaves what can be resumed.
        """
        last = result.history[-1]
        header = {**self._header(last), **dict(getattr(result, "metadata", {}))}
        save_weights(self.out, result.model, header)
        trained = Trained(
            self.out,
            result.train_accuracy,
            result.test_accuracy,
            dict(getattr(result, "scores", {})),
            bool(getattr(result, "is_reached", True)),
            last.number,
        )
        self.manifest["result"] = {
            **_plain({k: v for k, v in asdict(trained).items() if k != "file"}),
            "file": self.out.name,
            "file_hash": file_hash(self.out),
        }
        self._write()
        self.state.unlink(missing_ok=True)
        return trained

    def _header(self, epoch: EpochLike) -> dict[str, str]:
        noise = getattr(self.recipe, "label_noise", 0.0)
        names = ("train_accuracy", "test_accuracy", "running_accuracy")
        shares = {name: getattr(epoch, name, None) for name in names}
        return {
            "nlbench": self.manifest["nlbench"],
            "model": self.request.model,
            "data": self.request.data,
            "recipe": self.request.recipe,
            "epochs": str(epoch.number),
            "seed": str(self.request.seed),
            "label_noise": str(float(noise)),
            **{name: f"{share:.4f}" for name, share in shares.items() if share is not None},
            "command": self.command,
        }

    def _is_same(self, old: Mapping[str, Any]) -> bool:
        """Whether an earlier call asked for the same, on whatever device."""
        mine, theirs = ({**_plain(r)} for r in (asdict(self.request), old.get("request", {})))
        return {**mine, "device": ""} == {**theirs, "device": ""}

    def _read(self) -> dict[str, Any]:
        file = self.folder / "manifest.json"
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(f"can't read {file}: {error}") from error
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        content = {"format": FORMAT, **self.manifest, "checkpoints": self.kept}
        text = json.dumps(_plain(content), indent=1)
        write_atomically(self.folder / "manifest.json", text + "\n")


def _plain(content: Any) -> Any:
    """The same after a round trip through JSON."""
    return json.loads(json.dumps(content, default=str))


def _table(epochs: Sequence[EpochLike]) -> str:
    columns = ("learning_rate", "loss", "running_accuracy", "train_accuracy", "test_accuracy")
    extra = list(dict.fromkeys(name for epoch in epochs for name in epoch.scores))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["epoch", *columns, *extra])
    for epoch in epochs:
        numbers = [getattr(epoch, name, None) for name in columns]
        writer.writerow([epoch.number, *numbers, *(epoch.scores.get(name, "") for name in extra)])
    return buffer.getvalue()
