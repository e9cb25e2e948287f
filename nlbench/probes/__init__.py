"""The shared instrumentation: what a probe is, and what all probes share.

A probe is one way of looking at a model. Those that ship with nlbench are the packages
beside this file; a plugin adds its own through the entry-point group ``nlbench.probes``.
Importing this package does not import torch.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nlbench.options import Option, OptionValue

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nlbench.introspection.memory import Found

__all__ = [
    "LazyProbe",
    "Listener",
    "OnStep",
    "Probe",
    "ProbeOptions",
    "Resources",
    "Samples",
]

ProbeOptions = Mapping[str, OptionValue]

OnStep = Callable[[], None]
"""Called after each batch or segment, for progress."""


class Listener(Protocol):
    """A measure, as a probe sees it: what it raises is kept from the probe."""

    def update(self, observation: Any, order: tuple[int, ...] | None = None) -> None:
        """Take in one observation.

        Parameters
        ----------
        observation : object
        order : tuple of int, optional
            Given where others may be taken in meanwhile, by other threads: its place among them.
            Only a measure that declares `Measure.independent_sites` is asked to.
        """


class Samples(Protocol):
    """What a model is looked at with.

    Attributes
    ----------
    inputs : tensor of shape (n, ...)
        What the model is given; of a stream that is too long to be held, the first samples.
    images : tensor or None
        The inputs before normalisation, where they are images.
    """

    @property
    def inputs(self) -> Tensor:
        """What the model is given."""

    @property
    def images(self) -> Tensor | None:
        """The inputs before normalisation."""

    @property
    def normalize(self) -> Callable[[Tensor], Tensor]:
        """From images to inputs."""

    def batches(self, most: int) -> Iterable[Tensor]:
        """Give all samples in their order, in batches of nearly equal size."""

    def labelled(self, most: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Give all samples in their order with their labels.

        Raises
        ------
        nlbench.Undefined
            If they have none.
        """

    def shuffled(self, most: int) -> Iterable[Tensor]:
        """Give them in a random order, the same at each call."""


@dataclass(frozen=True)
class Resources:
    """What a probe may use; none of it changes a number.

    Parameters
    ----------
    device : torch.device
    memory : int or None
        Bytes that may be used beside the model; None: a sensible share of what is free.
    found : mutable mapping
        Sizes that were found to fit, by model and by what they are of; kept for the next passes
        of the run, as long as the model is.
    threads : int, optional
        How many the measures may share, those that can; by default what suits the device.
    """

    device: torch.device
    memory: int | None = None
    found: Found = field(default_factory=weakref.WeakKeyDictionary)
    threads: int | None = None


class Probe(ABC):
    """One way of looking at a model: it shows each measure that declares it its observations.

    Attributes
    ----------
    name : str
        The registered name.
    description : str
        One line.
    options : mapping of str to Option
        What can be set, as ``--set NAME.OPTION=VALUE``; all its measures share it.
    shows_on_cpu : bool
        Whether what it shows is on the CPU, whatever device the model is on.

    Examples
    --------
    >>> class Parameters(Probe):
    ...     '''Shows each parameter once.'''
    ...     name, description = "parameters", "the parameters, one by one"
    ...     def observe(self, model, samples, options, listeners, *, resources, step, facts):
    ...         for parameter in model.named_parameters():
    ...             for listener in listeners:
    ...                 listener.update(parameter)
    ...         step()
    >>> Parameters().steps(512, {})
    1
    """

    name: ClassVar[str]
    description: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {}
    shows_on_cpu: ClassVar[bool] = False

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Say how many steps an observation of that many samples will count."""
        return 1

    def check(self, samples: int | None, options: ProbeOptions) -> None:  # noqa: B027
        """Refuse options, before anything is loaded, that can't be carried out.

        Parameters
        ----------
        samples : int or None
            How many there are; None if that isn't known yet.
        options : mapping of str to value

        Raises
        ------
        nlbench.RequestError
            Naming the option.
        """

    def held(self, options: ProbeOptions) -> int:
        """Say how many samples of a stream have to be held; more are not used.

        One that goes through `Samples.batches` needs no more than one of them held.
        """
        return 512

    def defaults(self, inputs: Tensor) -> ProbeOptions:
        """Give options that suit inputs which somebody brings along, where they differ."""
        return {}

    def forecast(
        self, model: nn.Module, samples: Samples, options: ProbeOptions, *, resources: Resources
    ) -> str:
        """Predict in one line what `observe` will cost; empty where nothing tells beforehand.

        A dry run asks for it. Only for a probe that has a method of its own is the subject
        loaded. It costs little beside an observation and raises what `observe` raises.
        """
        return ""

    @abstractmethod
    def observe(
        self,
        model: nn.Module,
        samples: Samples,
        options: ProbeOptions,
        listeners: Sequence[Listener],
        *,
        resources: Resources,
        step: OnStep,
        facts: dict[str, Any],
    ) -> None:
        """Observe once, and tell every listener each observation.

        Parameters
        ----------
        model : torch.nn.Module
            In evaluation mode, on `resources`' device; left as it is found.
        samples : Samples
        options : mapping of str to value
            All of `options`, resolved.
        listeners : sequence of Listener
        resources : Resources
        step : callable
            Called as often as `steps` says.
        facts : dict
            Takes what was looked at, for the record: ``samples`` or ``segments``, their number;
            ``remarks``, by place, and ``remark``, on the whole, which stand beside the numbers;
            whatever a reader of the number has to know.

        Raises
        ------
        nlbench.Undefined
            If there is nothing to observe; the reason is every measure's.
        """


class LazyProbe(Probe):
    """A probe whose options are read without PyTorch: what observes is a module of its own.

    Attributes
    ----------
    home : str
        The module with the function ``observe``, which takes what `Probe.observe` takes. It is
        imported when it is called.
    """

    home: ClassVar[str]

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """See `Probe.observe`."""
        # Imported here: a plan is made without PyTorch.
        from nlbench.introspection.precision import exact_by_default

        home = import_module(self.home)
        with exact_by_default():
            home.observe(*args, **kwargs)
