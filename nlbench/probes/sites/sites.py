"""Probe ``sites``: the input and output of every activation call.

What the probe keeps of an activation is its reduction to (n, d), taken before the call, so
that an in-place call can't overwrite it; see `nlbench.probes.sites.intercept` for how calls are caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.probes.background import Background, overlap_pays, state_of_chance
from nlbench.probes.budget import bytes_a_sample
from nlbench.probes.model_state import evaluation_mode, refuse_unobservable, without_fast_path
from nlbench.probes.ops import ACTIVATION_MODULES
from nlbench.probes.passes import Listener, ProbeSettings, Resources, Step
from nlbench.subjects.load import Subject
from nlbench.subjects.samples import Batches, batch_sizes, rebatched

from .calls import Call, Kept
from .intercept import Watch
from .microbatches import Collector, is_out_of_memory
from .reduce import Function, Side, Unreduced
from .select import Picker, Selection

__all__ = [
    "ACTIVATION_MODULES",
    "Site",
    "SiteBatch",
    "evaluation_mode",
    "list_sites",
    "observe_sites",
    "refuse_unobservable",
    "remark_on_channels",
    "show",
    "steps",
]


# What the size of a part is called among the sizes that were found to fit.
FOUND = "samples of a forward pass"


@dataclass(frozen=True)
class Site:
    """One call of one activation function in one forward pass.

    Parameters
    ----------
    name : str
        ``layer1.0.relu``, its second call ``layer1.0.relu:1``, a functional call
        ``Mixed_5b.branch1x1/relu``.
    kind : str
        ``relu``, ``gelu``, …; of a module that writes its activation out in several
        operations the class name in lower case.
    index : int
        Position in the order of calls, from 0.
    shape : tuple of int
        Of one sample's activation, without the batch.
    channel_axis : int
        Counted from 0 with the batch axis, which is put first where it wasn't.
    assumed : bool
        True where nothing on the way said which axis holds the channels, and the usual
        one for the shape was taken; see `nlbench.probes.sites.axis_tracking.Layouts.of`.
    role : {"activation", "gate", "attention"}
        ``gate``: a sigmoid whose output multiplies another tensor and does nothing else, or
        a gated linear unit. ``attention``: a softmax over more than a row of logits.
    """

    name: str
    kind: str
    index: int
    shape: tuple[int, ...]
    channel_axis: int
    assumed: bool = False
    role: str = "activation"


@dataclass(frozen=True)
class SiteBatch:
    """One batch of one site, as measures get it.

    Parameters
    ----------
    site : Site
    batch : int
        Number of the batch, from 0.
    x, y : tensor of shape (n, d)
        The activation's input and output after reduction, in the model's dtype (at
        least float32) and on its device. n is the batch's number of samples, or a multiple
        of it where a network folds windows or tokens into the first axis. Of a gated linear
        unit x is the half that is gated.
    unreduced : mapping of str to pair of tensors of shape (n,)
        What the functions that a measure declares as ``unreduced`` make of the whole input
        and the whole output. Result the result of a function that raised raises its error.
    """

    site: Site
    batch: int
    x: Tensor
    y: Tensor
    unreduced: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The site's name."""
        return self.site.name


def observe_sites(
    model: nn.Module,
    batches: Iterable[Tensor],
    on_observation: Callable[[SiteBatch], None],
    *,
    reduction: str = "spatial",
    select: str = "*",
    attention: bool = False,
    functions: Mapping[str, Function] | None = None,
    memory: int | None = None,
    found: MutableMapping[str, int] | None = None,
    on_unseen: Callable[[str], None] = lambda what: None,
) -> int:
    """Run a model over batches and show every activation call to a listener.

    The model is run in evaluation mode, once a batch, and left as it was found, also
    after an error. No full activation is kept. Its output is bit for bit what it is without
    the probe (of transformer layers: without PyTorch's fused fast path), as long as the
    batch fits into memory. Where it does not it is run in parts, and each site is shown as a
    whole all the same.

    Parameters
    ----------
    model : torch.nn.Module
    batches : iterable of tensor
        Inputs of the model, on its device.
    on_observation : callable
        Called with a `SiteBatch` for each batch of each site, in order of call.
    reduction : {"spatial", "flatten", "published"}
        See `nlbench.probes.sites.reduce.reduce_site`.
    select : str
        Which sites to show; see `nlbench.probes.sites.select.Selection.parse`.
    attention : bool
        Whether softmaxes are sites too.
    functions : mapping of str to callable, optional
        Functions of an activation's tensor (n, ...) to one number a sample (n,); they may be
        given some of the samples at a time. The results are in ``SiteBatch.unreduced``.
    memory : int, optional
        Bytes that a forward pass may take. Two samples are run beforehand to see how many fit.
    found : mutable mapping, optional
        Remembers how many samples fit, for the next time.
    on_unseen : callable, optional
        Told of each kernel that computes activations which can't be seen, such as an LSTM's.

    Returns
    -------
    int
        Number of samples seen.

    Raises
    ------
    nlbench.RequestError
        For a compiled or scripted model, whose activations can't be observed; for a selection
        that matches no site.
    nlbench.Undefined
        Where an activation's first axis is not the batch, and it isn't known which is.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    >>> seen = []
    >>> observe_sites(model, [torch.randn(8, 3)], lambda look: seen.append(observation.place))
    8
    >>> seen
    ['1', '3']
    """
    refuse_unobservable(model)
    selection = Selection.parse(select)
    looking = _Looking(selection, on_observation)
    kept = Kept(reduction, functions or {}, attention, looking.may_want)
    watch = Watch(model, kept, looking.take, on_unseen)
    found = {} if found is None else found
    samples = 0
    with evaluation_mode(model), without_fast_path(), watch.hooked():
        for batch in batches:
            if memory is not None and FOUND not in found:
                found[FOUND] = max(1, memory // bytes_a_sample(model, batch[:2]))
            looking.begin()
            _look_once(watch, batch, looking, found)
            looking.end()
            samples += len(batch)
    return samples


class _Looking:
    """Turns the calls of one batch after another into looks at the chosen sites."""

    def __init__(self, selection: Selection, on_observation: Callable[[SiteBatch], None]) -> None:
        self._selection, self._on_look = selection, on_observation
        self._batch = -1
        # The names chosen in the first batch; before that nobody knows them.
        self._chosen: set[str] | None = None
        self._sites: dict[str, Site] = {}
        self._taken: set[str] = set()

    def may_want(self, name: str, kind: str | None) -> bool:
        """Whether a call's tensors are worth reducing."""
        if self._chosen is not None:
            return name in self._chosen
        return self._selection.may_take(name, kind)

    def begin(self) -> None:
        """Begin the next batch."""
        self._batch += 1
        self._picker = Picker(self._selection)
        self.collector = Collector(self._see)

    def take(self, call: Call) -> None:
        """Take in a call of the forward pass at hand."""
        self.collector.take(call)

    def end(self) -> None:
        """End a batch; after the first it is known which sites there are."""
        if self._chosen is None:
            self._selection.check(self._sites.values())
            self._chosen = self._taken if self._selection.choices else None

    def _see(self, call: Call, index: int, x: Side | None, y: Side | None) -> None:
        begun = call.begun
        site = Site(call.name, call.kind, index, begun.shape, begun.axis, begun.assumed, call.role)
        if self._chosen is None:
            self._sites.setdefault(site.name, site)
            if not self._picker.takes(site):
                return
            self._taken.add(site.name)
        elif site.name not in self._chosen:
            return
        if x is None or y is None:
            raise RuntimeError(f"{site.name} is chosen, but nothing was kept of it")
        unreduced = Unreduced(x.numbers, y.numbers)
        self._on_look(SiteBatch(site, self._batch, x.reduced, y.reduced, unreduced))


def _look_once(
    watch: Watch, batch: Tensor, looking: _Looking, found: MutableMapping[str, int]
) -> None:
    """Show one batch, in smaller parts each time that memory runs out."""
    while True:
        most = min(found.get(FOUND, len(batch)), len(batch))
        try:
            for part in looking.collector.passes(batch, most):
                # A copy: a first layer that works in place would change the caller's data.
                watch.run(part.clone(), is_part=len(part) < len(batch))
            return
        except (MemoryError, RuntimeError) as error:
            if most <= 1 or not is_out_of_memory(error):
                raise
        # Only here is the error gone, and with it the tensors that its traceback held.
        found[FOUND] = max(1, most // 2)
        if batch.device.type == "cuda":
            torch.cuda.empty_cache()


def list_sites(model: nn.Module, example: Tensor, *, attention: bool = False) -> list[Site]:
    """All sites of a model, in order of call.

    Parameters
    ----------
    model : torch.nn.Module
    example : tensor
        A batch of inputs.
    attention : bool
        Whether softmaxes are sites too.

    Examples
    --------
    >>> [site.kind for site in list_sites(nn.Sequential(nn.Linear(2, 2), nn.GELU()),
    ...                                   torch.zeros(1, 2))]
    ['gelu']
    """
    found: list[Site] = []
    observe_sites(
        model, [example], lambda observation: found.append(observation.site), attention=attention
    )
    return found


def remark_on_channels(sites: Iterable[Site]) -> str:
    """Say at which sites the channel axis is assumed; nothing if it is known at all.

    Parameters
    ----------
    sites : iterable of Site

    Examples
    --------
    >>> model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU())
    >>> remark_on_channels(list_sites(model, torch.zeros(2, 3, 5, 5)))
    'channel axis not known, assumed: 0 (axis 1)'
    """
    assumed = [f"{site.name} (axis {site.channel_axis})" for site in sites if site.assumed]
    return f"channel axis not known, assumed: {', '.join(assumed)}" if assumed else ""


# Bytes of looks that may wait for the measures.
WAITING = 2**28


def steps(size: int, settings: ProbeSettings) -> int:
    """How many batches that many samples make.

    Raises
    ------
    nlbench.RequestError
        If the choice of sites can't be read.
    """
    Selection.parse(str(settings["select"]))
    return -(-size // int(settings["batch"]))


def show(
    subject: Subject,
    listeners: Sequence[Listener],
    settings: ProbeSettings,
    resources: Resources,
    step: Step,
    shown: dict[str, Any],
) -> None:
    """Show every activation call of a subject, batch by batch.

    The measures work in a thread of their own, on one look while the network goes on to the
    next; they get the same looks in the same order whether they do so beside or in turn. In the
    first batch they take turns: if the network, or what yields the samples, draws from the
    global random generators, as measures may, they do so to the end.
    """
    sites: dict[str, Site] = {}
    unseen: dict[str, None] = {}
    functions, names = _functions(listeners)

    def tell(observation: SiteBatch) -> None:
        for listener, wanted in zip(listeners, names, strict=True):
            listener.update(_with(observation, wanted))

    def batches(given: Iterable[Tensor], background: Background[SiteBatch]) -> Iterator[Tensor]:
        before = state_of_chance(resources.device)
        for number, batch in enumerate(given):
            is_quiet = number == 1 and state_of_chance(resources.device) == before
            if is_quiet and overlap_pays(resources.device):
                background.let_wait(WAITING)
            yield batch.to(resources.device)
            step()

    with Background(tell, _bytes, 0, resources.device) as background:

        def on_observation(observation: SiteBatch) -> None:
            sites.setdefault(observation.place, observation.site)
            background.put(observation)

        shown["samples"] = observe_sites(
            subject.model,
            batches(_batches(subject, int(settings["batch"])), background),
            on_observation,
            reduction=str(settings["reduction"]),
            select=str(settings["select"]),
            attention=bool(settings["attention"]),
            functions=functions,
            memory=resources.memory,
            found=resources.found,
            on_unseen=unseen.setdefault,
        )
    shown["sites"] = len(sites)
    shown["kinds"] = {name: site.kind for name, site in sites.items()}
    if unseen:
        shown["unseen"] = list(unseen)
    remarks = {name: remark_on_channels([site]) for name, site in sites.items() if site.assumed}
    if remarks and settings["reduction"] == "spatial":
        shown["remarks"] = remarks
    if not sites:
        inside = f", but for those inside {', '.join(unseen)}" if unseen else ""
        raise Undefined(f"the model calls no activation function that is known as one{inside}")


def _batches(subject: Subject, most: int) -> Iterable[Tensor]:
    stream = getattr(subject, "stream", None)
    if isinstance(stream, Batches):
        return rebatched(stream, most, stream.known_length)
    return torch.split(subject.inputs, list(batch_sizes(len(subject.inputs), most)))


def _functions(
    listeners: Sequence[Listener],
) -> tuple[Mapping[str, Function], Sequence[Mapping[str, str]]]:
    """Gather what the measures want of whole tensors, each function once.

    Returns the functions by key, and for each listener the keys by its own names.
    """
    keys: dict[Function, str] = {}
    names = []
    for listener in listeners:
        declared: Mapping[str, Function] = getattr(listener, "unreduced", {})
        names.append({name: keys.setdefault(f, str(len(keys))) for name, f in declared.items()})
    return {key: function for function, key in keys.items()}, names


def _with(observation: SiteBatch, names: Mapping[str, str]) -> SiteBatch:
    """Give a look with what a listener declared, by its own names."""
    if not isinstance(observation.unreduced, Unreduced):
        return observation
    return replace(observation, unreduced=observation.unreduced.renamed(names))


def _bytes(observation: SiteBatch) -> int:
    return observation.x.nbytes + observation.y.nbytes
