"""What a linearising consists of: one network for each ω and seed, and how each is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.options import OptionValue
from nlbench.plan import content_key
from nlbench.subject import SubjectSpec, choose_weights
from nlbench.training import TrainingRequest, recipe_of

__all__ = ["Grid", "Item", "LinearisingRequest"]

Kind = Literal["reference", "linearised", "random"]


@dataclass(frozen=True)
class LinearisingRequest:
    """What is to be linearised, and how.

    Parameters
    ----------
    model, data : str
        Registered names.
    mode : str
        The registered recipe that is followed. It has the fields ``omega``, ``layerwise``,
        ``random_share`` and ``starts_trained``. If it has a method ``check(model, dataset)``,
        that refuses a network before the first training, or gives a remark.
    base_recipe : str
        The registered recipe of networks that have to be trained first.
    measure : str
        The registered measure that is taken of each network beside accuracy and linear units.
    omegas : tuple of float
        Weights of the penalty.
    seeds : tuple of int
    weights : str
        Of a recipe that starts from trained weights: ``trained``, a checkpoint's path, or
        ``auto``: trained where weights ship, else trained first, once a seed.
    control : bool
        Beside each network one of which as many units, drawn at random, are linear.
    layerwise : bool
        One slope a layer in place of one a channel.
    changes : mapping of str to value
        Fields of the recipe that are to be otherwise.
    options : tuple of (str, value)
        Of the dataset.
    device : str

    Raises
    ------
    nlbench.RequestError
        If it can't be carried out.
    """

    model: str
    data: str
    mode: str
    base_recipe: str
    measure: str
    omegas: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    weights: str = "auto"
    control: bool = False
    layerwise: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, OptionValue | str], ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        for omega in self.omegas:
            if not (math.isfinite(omega) and omega >= 0):
                raise RequestError(f"omega is {omega}, expected a number of at least 0")
        if self.control and self.layerwise:
            raise RequestError("the random control needs a slope a channel, not one a layer")
        if self.control and not self.starts_trained:
            raise RequestError("the random control goes with --post-training")
        if self.weights == "init":
            raise RequestError("--weights init: initial weights are linearised by --from-start")
        if self.weights != "auto" and not self.starts_trained:
            raise RequestError(
                f"--weights {self.weights}: --from-start begins with initial weights"
            )

    @property
    def starts_trained(self) -> bool:
        """Whether the recipe starts from trained weights."""
        return bool(getattr(registry.load("recipes", self.mode), "starts_trained", False))

    @property
    def trains_first(self) -> bool:
        """Whether networks have to be trained before they are linearised."""
        if not self.starts_trained or self.weights != "auto":
            return False
        return choose_weights(self.spec("auto")).file is None

    @property
    def start(self) -> str:
        """Weights that all seeds start from, where they are not trained first."""
        if not self.starts_trained:
            return "init"
        return "trained" if self.weights == "auto" else self.weights

    @property
    def deciding(self) -> dict[str, Any]:
        """What all networks of a folder have in common."""
        shared = asdict(self)
        for name in ("omegas", "seeds", "control", "device"):
            del shared[name]
        return shared

    def spec(self, weights: str, seed: int = 0) -> SubjectSpec:
        """One of the networks as a subject."""
        return SubjectSpec(self.model, weights, self.data, seed, options=self.options)


@dataclass(frozen=True)
class Item:
    """One network of the grid.

    Parameters
    ----------
    kind : {"reference", "linearised", "random"}
    omega : float or None
        None of a reference.
    seed : int
    """

    kind: Kind
    omega: float | None
    seed: int


@dataclass(frozen=True)
class Grid:
    """The networks of a request, and where each comes from.

    Parameters
    ----------
    request : LinearisingRequest
    folder : Path
        The run's.
    """

    request: LinearisingRequest
    folder: Path

    def __iter__(self) -> Iterator[Item]:
        """Give the networks, each after those that it depends on."""
        request = self.request
        if request.starts_trained:
            yield from (Item("reference", None, seed) for seed in request.seeds)
        for omega in request.omegas:
            for seed in request.seeds:
                yield Item("linearised", omega, seed)
                if request.control:
                    yield Item("random", omega, seed)

    def label(self, item: Item) -> str:
        """What a network's weights are called."""
        if item.omega is None:
            return f"reference-seed{item.seed}"
        start = "" if self.request.starts_trained else "start-"
        prefix = "random-" if item.kind == "random" else start
        # All its digits: two values of ω never share a name.
        return f"{prefix}omega{str(item.omega).removesuffix('.0')}-seed{item.seed}"

    def facts(self, item: Item) -> dict[str, Any]:
        """What tells a network of the grid from the others."""
        mode = self.request.mode if item.kind == "linearised" else item.kind
        return {"weights": self.label(item), "mode": mode, "omega": item.omega}

    def key(self, item: Item, measure: str, settings: Mapping[str, OptionValue | str]) -> str:
        """Hash of all that decides a number, but for the machine."""
        content = {
            "request": self.request.deciding,
            "start": self._start,
            "item": asdict(item),
            "recipe": asdict(recipe_of(self.training(item))) if self.own_file(item) else "",
            "measure": measure,
            "settings": dict(settings),
        }
        return content_key(json.loads(json.dumps(content, default=str)))

    @cached_property
    def _start(self) -> str:
        """Identity of the weights that all seeds start from."""
        if self.request.trains_first:
            return ""
        return choose_weights(self.request.spec(self.request.start)).identity

    def own_file(self, item: Item) -> Path | None:
        """Checkpoint that is made for a network; None for weights that were given."""
        if item.omega is None and not self.request.trains_first:
            return None
        return self.folder / "checkpoints" / f"{self.label(item)}.safetensors"

    def file(self, item: Item) -> Path:
        """Checkpoint of a network."""
        own = self.own_file(item)
        if own is not None:
            return own
        choice = choose_weights(self.request.spec(self.request.start))
        assert choice.file is not None
        return choice.file

    def training(self, item: Item, share: float | None = None) -> TrainingRequest:
        """How a network is trained; of a control with the share of units that are linear."""
        request = self.request
        if item.omega is None:
            return self._request(request.base_recipe, item.seed, "init", {})
        changes = {**request.changes, "omega": item.omega, "layerwise": request.layerwise}
        if share is not None:
            changes["random_share"] = share
        weights = request.start
        if request.trains_first:
            weights = str(self.file(Item("reference", None, item.seed)))
        return self._request(request.mode, item.seed, weights, changes)

    def epochs(self, item: Item) -> int:
        """Epochs that its training takes at most."""
        return 0 if self.own_file(item) is None else int(recipe_of(self.training(item)).epochs)

    def _request(
        self, recipe: str, seed: int, weights: str, changes: Mapping[str, Any]
    ) -> TrainingRequest:
        request = self.request
        return TrainingRequest(
            request.model,
            request.data,
            recipe,
            seed,
            weights,
            changes=changes,
            options=request.options,
            device=request.device,
        )
