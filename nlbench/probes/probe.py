"""The interface between probes and measures: observations, samples and resources."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict

from nlbench import registry
from nlbench.errors import PluginError, Undefined
from nlbench.options import Option, OptionValue

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nlbench.introspection.memory import FeasibleSizes
    from nlbench.subjects.subject import Subject

ProbeOptions = Mapping[str, OptionValue]

OnStep = Callable[[], None]
"""Called after each batch or segment, for progress."""


class Listener(Protocol):
    """The interface through which probes update a measure. Its errors don't reach the probe."""

    def update(self, observation: Any, order: tuple[int, ...] | None = None) -> None:
        """Add one observation.

        Parameters
        ----------
        observation : object
        order : tuple of int, optional
            Position of the observation, if several threads update the same listener.
            Passed only to measures that declare `Measure.independent_sites`.
        """


@dataclass(frozen=True)
class Resources:
    """Resources for a probe, which don't affect its observations."""

    device: torch.device
    # Bytes that may be used in addition to the model; None for half of the free memory.
    memory: int | None = None
    # Batch sizes known to fit into memory, by model and purpose; shared within a run.
    feasible_sizes: FeasibleSizes = field(default_factory=weakref.WeakKeyDictionary)
    # Number of threads for measures that can use several; by default it depends on the device.
    threads: int | None = None


@dataclass(frozen=True)
class ProbePass:
    """One observation of a model by a probe."""

    model: nn.Module  # in evaluation mode, on the device in `resources`; must be left unchanged
    samples: Subject  # see `nlbench.subjects.subject.Subject`
    options: ProbeOptions  # values for all of `Probe.options`
    listeners: Sequence[Listener]
    resources: Resources
    step: OnStep = lambda: None  # to be called `Probe.steps` times
    # Checks that the model's outputs are a function of their own sample, given a few samples and
    # the output for them, or None if it is unknown. Called before `Probe.observe`, unless the probe
    # declares `Probe.checks_samples`.
    check_samples: Callable[[Tensor, object], None] = lambda samples, output: None

    def show(self, observation: object) -> None:
        """Pass an observation to every listener."""
        for listener in self.listeners:
            listener.update(observation)


class DrawnBreakpoints(TypedDict, total=False):
    """The part of `PathDrawing` that only traced paths have."""

    crossings: int
    sites: Sequence[str]
    breakpoints: Sequence[str]


class PathDrawing(DrawnBreakpoints):
    """Data for plotting a path; see `nlbench.probes.lines.drawing.make_drawing`."""

    place: str
    method: str
    lengths: Sequence[float]
    logits: Sequence[int]
    curves: Sequence[Sequence[str]]


class ProbeFacts(TypedDict, total=False):
    """Facts about a pass, which are recorded with its results. Plugins may add other keys.

    The number of ``samples`` or ``segments`` is the ``n`` of each result. Remarks and reasons are
    printed next to the results: ``remarks`` and ``undefined`` are keyed by place.
    """

    samples: int
    segments: int
    remark: str
    remarks: Mapping[str, str]
    undefined: Mapping[str, str]
    # of places
    sites: int
    kinds: Mapping[str, str]
    where: Mapping[str, str]
    unseen: Sequence[str]
    gated: Sequence[str]
    row_policy: str
    rows: Mapping[str, int]
    precision: str
    unresolved: Sequence[str]
    not_compared_with_float64: str
    is_prefix_shared: bool
    # of paths
    paths: str
    number: int
    paths_hash: str
    drawing: PathDrawing
    # of the channel graph
    nodes: int
    activation_calls: int


class NothingObserved(Undefined):
    """A pass without any observation, whose facts are recorded nevertheless."""

    def __init__(self, reason: str, facts: ProbeFacts) -> None:
        super().__init__(reason)
        self.facts = facts


class Probe(ABC):
    """A way to observe a model, which passes observations to the measures that declare it.

    Attributes
    ----------
    name : str
        The registered name.
    description : str
        One-line description.
    options : mapping of str to Option
        Options, set as ``--set NAME.OPTION=VALUE`` and shared by all its measures.
    follows : mapping of str to str
        Options that default to the value set for another probe's option.
    shows_on_cpu : bool
        True if observations are always on the CPU.
    needs_function : bool
        True if the probe raises where the network is no function of each sample; for any other
        probe, results have a remark.
    needs_one_type : bool
        True if the probe raises where some arguments are floats and others are integers.
    runs_samples : bool
        False if the network is not run on samples, so that noise in it changes nothing.
    checks_samples : bool
        True if the probe calls `ProbePass.check_samples`, with an output that it needs anyway.

    Examples
    --------
    >>> class Parameters(Probe):
    ...     '''Shows each parameter once.'''
    ...     name, description = "parameters", "the parameters, one at a time"
    ...     def observe(self, probe_pass):
    ...         for parameter in probe_pass.model.named_parameters():
    ...             probe_pass.show(parameter)
    ...         probe_pass.step()
    ...         return {}
    >>> Parameters().steps(512, {})
    1
    """

    name: ClassVar[str]
    description: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {}
    follows: ClassVar[Mapping[str, str]] = {}
    shows_on_cpu: ClassVar[bool] = False
    needs_function: ClassVar[bool] = False
    needs_one_type: ClassVar[bool] = False
    runs_samples: ClassVar[bool] = True
    checks_samples: ClassVar[bool] = False

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of steps of an observation, for progress."""
        return 1

    def check(self, samples: int | None, options: ProbeOptions) -> None:  # noqa: B027
        """Validate options before anything is loaded.

        Parameters
        ----------
        samples : int or None
            Number of samples; None if not yet known.
        options : mapping of str to value

        Raises
        ------
        nlbench.RequestError
            If an option is invalid; the message names it.
        """

    def stored_samples(self, options: ProbeOptions) -> int:
        """Return the number of samples from a stream to keep in memory as `Subject.inputs`.

        A probe that uses `Subject.batches` requires only one.
        """
        return 512

    def resolve(self, options: ProbeOptions, inputs: Tensor) -> ProbeOptions:
        """Return the options with the values that defaults such as ``auto`` have for inputs."""
        return options

    @abstractmethod
    def observe(self, probe_pass: ProbePass) -> ProbeFacts:
        """Observe the model once, and pass each observation to every listener.

        Raises
        ------
        nlbench.Undefined
            If there is nothing to observe; the reason is recorded for every measure.
        """


class LazyProbe(Probe):
    """A probe that imports PyTorch only when it observes."""

    home: ClassVar[str]  # module whose function observe has the parameter of `Probe.observe`

    def observe(self, probe_pass: ProbePass) -> ProbeFacts:
        """See `Probe.observe`."""
        # Imported here, since planning a run must not import PyTorch.
        from nlbench.introspection.precision import exact_by_default

        home = import_module(self.home)
        with exact_by_default():
            facts: ProbeFacts = home.observe(probe_pass)
        return facts


def load_probe(name: str) -> Probe:
    """Load a registered probe."""
    probe = registry.load("probes", name)
    if not isinstance(probe, Probe):
        raise PluginError(f"probe '{name}' is {probe!r}, expected an nlbench.probes.Probe")
    if probe.name != name:
        raise PluginError(
            f"probe '{name}' has the name '{probe.name}'; an entry point and its probe must have "
            "the same name"
        )
    return probe
