"""Probe ``sites``: the input and output of every activation call.

What the probe keeps of an activation is its reduction to (n, d), taken before the call, so
that an in-place call can't overwrite it; `nlbench.probes.sites.intercept` catches the calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.background import Background, overlap_pays, rng_state, threads_beside
from nlbench.introspection.memory import Fitting, Found, halving, part_sizes, refuse_mixing
from nlbench.introspection.model_state import (
    attributes_kept,
    evaluation_mode,
    refuse_unobservable,
    without_fast_path,
)
from nlbench.introspection.precision import exact_by_default
from nlbench.probes import Listener, OnStep, ProbeOptions, Resources, Samples

from .intercept import Kept, SiteCall, Watch
from .reduce import Function, Side, Unreduced, joined
from .select import Picker, Selection
from .shared import Borrowed, Pair, Shared

__all__ = [
    "Site",
    "SiteBatch",
    "list_sites",
    "observe",
    "observe_sites",
    "remark_on_channels",
]


Made = TypeVar("Made")

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
        one for the shape was taken; see `nlbench.introspection.axes.Layouts.of`.
    role : {"activation", "gate", "attention", "softcap"}
        ``gate``: a sigmoid whose output multiplies another tensor and does nothing else, or
        a gated linear unit. ``attention``: a softmax over more than a row of logits, or a call
        on the logits that go into one. ``softcap``: c tanh(x / c).
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
        and the whole output. To get the result of a function that raised raises its error.
    borrowed : Borrowed, optional
        In a pass: the measure's access to what `shared` gives.
    """

    site: Site
    batch: int
    x: Tensor
    y: Tensor
    unreduced: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    borrowed: Borrowed | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> str:
        """The site's name."""
        return self.site.name

    @property
    def borrowed_seconds(self) -> float:
        """What other measures have spent on what this one has got of `shared`."""
        return 0.0 if self.borrowed is None else self.borrowed.seconds

    def shared(self, function: Callable[[Pair], Made]) -> Made:
        """What a function makes of x and y: in a pass once for all measures of a package.

        Parameters
        ----------
        function : callable
            Of an object with x, y and `shared`. It draws no random numbers and makes the same of
            the same; one that is defined at the top of a module, or a method of an object that
            does not change: a lambda is another function each time.

        Returns
        -------
        object
            What the function gives; measures of the same package are given the same, so it is not
            to be written into.

        Raises
        ------
        Exception
            What the function raises, for each measure that asks.

        Examples
        --------
        >>> def change(batch):
        ...     return (batch.y - batch.x).abs()
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> batch = SiteBatch(Site("relu", "relu", 0, (1,), 1), 0, x, x.relu())
        >>> batch.shared(change).sum()
        tensor(1.)
        """
        return function(self) if self.borrowed is None else self.borrowed.get(function)


@exact_by_default()
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
    found: Found | None = None,
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
        Remembers how many samples of a model fit, for the next time.
    on_unseen : callable, optional
        Told of what computes activations that can't be seen: a kernel, such as an LSTM's, or
        operations that are written out inside a larger module.

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
        Where an activation's first axis is not the batch, and it isn't known which is; where
        other activations are called in one batch than in another; where a batch does not fit
        into memory whose samples depend on each other.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    >>> seen = []
    >>> observe_sites(model, [torch.randn(8, 3)], lambda batch: seen.append(batch.place))
    8
    >>> seen
    ['1', '3']
    """
    refuse_unobservable(model)
    seen = _Pass(Selection.parse(select), on_observation)
    kept = Kept(reduction, functions or {}, attention, seen.may_want)
    watch = Watch(model, kept, lambda call: seen.parts.take(call), on_unseen)
    found = {} if found is None else found
    samples = 0
    with evaluation_mode(model), without_fast_path(), watch.hooked():
        for batch in batches:
            seen.begin()
            fits = Fitting(found, model, FOUND, batch, memory)
            _observe_batch(watch, batch, seen, fits)
            seen.end()
            samples += len(batch)
    return samples


class _Pass:
    """Turns the calls of one batch after another into observations of the chosen sites."""

    def __init__(self, selection: Selection, on_observation: Callable[[SiteBatch], None]) -> None:
        self._selection, self._on_observation = selection, on_observation
        self._batch = -1
        # The names chosen in the first batch; before that nobody knows them.
        self._chosen: set[str] | None = None
        self._sites: dict[str, Site] = {}
        self._taken: set[str] = set()
        self._calls: list[_Identity] = []
        # Whether samples were found to be computed each by itself.
        self.is_apart = False

    def may_want(self, name: str, kind: str | None) -> bool:
        """Whether a call's tensors are worth reducing."""
        if self._chosen is not None:
            return name in self._chosen
        return self._selection.may_take(name, kind)

    def begin(self) -> None:
        """Begin the next batch."""
        self._batch += 1
        self._picker = Picker(self._selection)
        self.parts = _Parts(self._see)

    def end(self) -> None:
        """End a batch; after the first it is known which sites there are.

        Raises
        ------
        nlbench.Undefined
            If it has called other activations than the first: those of one name would be
            different functions.
        """
        if self._chosen is None:
            self._selection.check(self._sites.values())
            self._chosen = self._taken if self._selection.choices else None
        if self._batch == 0:
            self._calls = self.parts.calls
        elif self.parts.calls != self._calls:
            raise Undefined(
                f"the network calls other activations in batch {self._batch} than in batch 0"
                f"{_difference(self._calls, self.parts.calls)}, so that what bears one name is not "
                "one site"
            )

    def _see(self, call: SiteCall, index: int, x: Side | None, y: Side | None) -> None:
        begun = call.begun
        site = Site(call.name, call.kind, index, begun.shape, begun.axis, begun.assumed, call.role)
        if self._chosen is None:
            self._sites.setdefault(site.name, site)
            if not self._picker.takes(site):
                return
            self._taken.add(site.name)
        elif site.name not in self._chosen:
            return
        assert x is not None
        assert y is not None
        unreduced = Unreduced(x.numbers, y.numbers)
        self._on_observation(SiteBatch(site, self._batch, x.reduced, y.reduced, unreduced))


# Name and kind of a call, and where in the network's code it is made.
_Identity = tuple[str, str, Hashable]


def _difference(first: Sequence[_Identity], second: Sequence[_Identity]) -> str:
    """Name the first call that differs."""
    for one, other in itertools.zip_longest(first, second):
        if one is None or other is None:
            return f" ({(one or other)[0]} in one of them only)"
        if one != other:
            return f" ({other[0]} for {one[0]})" if one[0] != other[0] else f" (another {one[0]})"
    return ""


class _Parts:
    """Puts the parts of one batch together, site by site.

    Parameters
    ----------
    on_call : callable
        Told of each call of the whole batch, with its place in the order of calls, its input
        and its output. A batch in one part is told as it goes; one in several as its last
        part goes. After memory has run out what was told is not told again.
    """

    def __init__(self, on_call: Callable[[SiteCall, int, Side | None, Side | None], None]) -> None:
        self._on_call = on_call
        self._told: set[str] = set()
        self.calls: list[_Identity] = []

    def of(self, batch: Tensor, most: int) -> Iterator[Tensor]:
        """Give the parts of a batch, one after the other."""
        self._sizes = part_sizes(len(batch), most)
        # What the parts have shown of each site so far: its input and its output.
        self._pieces: dict[str, list[tuple[Side, Side]]] = {}
        first: list[_Identity] | None = None
        for number, part in enumerate(torch.split(batch, self._sizes)):
            self._number, self.calls = number, []
            yield part
            first = self.calls if first is None else first
            if self.calls != first:
                raise Undefined(
                    "the network calls other activations for some samples than for others, so a "
                    "batch that does not fit into memory can't be put together"
                )

    def take(self, call: SiteCall) -> None:
        """Take in a call of the part at hand."""
        index = len(self.calls)
        self.calls.append((call.name, call.kind, call.site.origin))
        pieces = self._pieces.setdefault(call.name, [])
        if call.begun.side is not None and call.y is not None:
            pieces.append((call.begun.side, call.y))
        if self._number == len(self._sizes) - 1:
            del self._pieces[call.name]
            if call.name not in self._told:
                self._told.add(call.name)
                self._on_call(call, index, *self._whole(call, pieces))

    def _whole(
        self, call: SiteCall, pieces: Sequence[tuple[Side, Side]]
    ) -> tuple[Side | None, Side | None]:
        if not pieces:
            return None, None
        rows = [len(x.reduced) for x, _ in pieces]
        if len(self._sizes) == 1 or (not call.begun.sampled and set(rows) == {1}):
            # A table that does not come from the input is one row, not one a part.
            return pieces[0]
        a_sample = {own / size for own, size in zip(rows, self._sizes, strict=False)}
        # A single sample's rows may as well be the tokens of a sample that is elsewhere.
        are_unsure = max(self._sizes) == 1 and a_sample != {1.0}
        if len(rows) != len(self._sizes) or len(a_sample) > 1 or are_unsure:
            raise Undefined(
                f"{call.name}: which axis holds the samples is not known, and the batch does not "
                "fit into memory as a whole"
            )
        return joined([x for x, _ in pieces]), joined([y for _, y in pieces])


def _observe_batch(watch: Watch, batch: Tensor, seen: _Pass, fits: Fitting) -> None:
    """Show one batch, in smaller parts each time that memory runs out.

    A forward pass in parts gives every sample what it gives in a whole, but for rounding: a
    convolution or matrix product may be summed in another order for another number of samples.
    """

    def attempt(most: int) -> None:
        if most < len(batch) and not seen.is_apart:
            refuse_mixing(partial(_rows, watch, seen), batch, most)
            seen.is_apart = True
        for part in seen.parts.of(batch, most):
            # A copy: a first layer that works in place would change the caller's data.
            watch.run(part.clone())

    tried = min(fits.most or len(batch), len(batch))
    _, size = halving(attempt, tried, batch.device)
    if size < tried:
        fits.remember(size)


def _rows(watch: Watch, seen: _Pass, pair: Tensor) -> dict[str, Tensor]:
    """What the activations of some samples are, at the sites that are wanted."""
    found: dict[str, Tensor] = {}

    def take(call: SiteCall) -> None:
        for name, side in (("", call.begun.side), (" (output)", call.y)):
            if side is not None:
                norm = side.numbers["norm"]
                both = [side.reduced, norm[:, None]] if isinstance(norm, Tensor) else [side.reduced]
                found[call.name + name] = torch.cat(both, 1)

    kept = Kept("spatial", {"norm": _norm}, watch.kept.attention, seen.may_want)
    beside = Watch(watch.model, kept, take)
    with attributes_kept(watch.model), beside.hooked():
        beside.run(pair.clone())
    return found


def _norm(tensor: Tensor) -> Tensor:
    """Of each sample's numbers: samples that swap some show in it."""
    wide = tensor.flatten(1).to(torch.promote_types(tensor.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(wide, dim=1)
    return norms


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


# Bytes of observations that may wait for the measures.
WAITING = 2**28


def observe(
    model: nn.Module,
    samples: Samples,
    options: ProbeOptions,
    listeners: Sequence[Listener],
    resources: Resources,
    step: OnStep,
    facts: dict[str, Any],
) -> None:
    """Show every activation call of a subject, batch by batch.

    The measures work on the CPU, in a thread of their own, on one observation while the network
    goes on to the next; each gets copies of the same ones in the same order, whether they do so
    beside or in turn. In the first batch they take turns: if the network, or what yields the
    samples, draws from the global random generators, as measures may, they do so to the end.
    Where all measures say that sites are independent for them, several threads may share the
    sites: each gets the same observations of a site in the same order still.
    """
    sites: dict[str, Site] = {}
    unseen: dict[str, None] = {}
    functions, names = _functions(listeners)
    threads = threads_beside(resources.device) if resources.threads is None else resources.threads
    if not all(getattr(listener, "independent_sites", False) for listener in listeners):
        threads = 1

    def tell(item: tuple[SiteBatch, Callable[[], None]]) -> None:
        observation, arrived = item
        arrived()
        clock, order = time.perf_counter, None
        if threads > 1:
            # By a clock a thread's time holds what it waits for the others.
            clock, order = time.thread_time, (observation.batch, observation.site.index)
        packages: dict[object, Shared] = {}
        for listener, wanted in zip(listeners, names, strict=True):
            own = Shared(observation.x, observation.y, clock)
            shared = packages.setdefault(getattr(listener, "package", listener), own)
            shown = _copied(observation, wanted, shared)
            if order is None:
                listener.update(shown)
            else:
                listener.update(shown, order)

    def batches(given: Iterable[Tensor], background: Background[_Item]) -> Iterator[Tensor]:
        before = rng_state(resources.device)
        for number, batch in enumerate(given):
            is_quiet = number == 1 and rng_state(resources.device) == before
            if is_quiet and overlap_pays(resources.device):
                background.let_wait(WAITING)
            yield batch.to(resources.device)
            step()

    def lane(item: _Item) -> str:
        return item[0].place if threads > 1 else ""

    with Background(tell, _bytes, 0, resources.device, lane=lane, threads=threads) as background:

        def on_observation(observation: SiteBatch) -> None:
            sites.setdefault(observation.place, observation.site)
            background.put(_on_host(observation))

        facts["samples"] = observe_sites(
            model,
            batches(samples.batches(int(options["batch"])), background),
            on_observation,
            reduction=str(options["reduction"]),
            select=str(options["select"]),
            attention=bool(options["attention"]),
            functions=functions,
            memory=resources.memory,
            found=resources.found,
            on_unseen=unseen.setdefault,
        )
    facts["sites"] = len(sites)
    facts["kinds"] = {name: site.kind for name, site in sites.items()}
    if unseen:
        facts["unseen"] = list(unseen)
        facts["remark"] = f"activations not seen: {_few(list(unseen))}"
    remarks = {name: remark_on_channels([site]) for name, site in sites.items() if site.assumed}
    if remarks and options["reduction"] == "spatial":
        facts["remarks"] = remarks
    if not sites:
        inside = f", but for those inside {_few(list(unseen))}" if unseen else ""
        raise Undefined(f"the model calls no activation function that is known as one{inside}")


def _few(names: Sequence[str], most: int = 6) -> str:
    """List some of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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


def _copied(observation: SiteBatch, names: Mapping[str, str], shared: Shared) -> SiteBatch:
    """Give what a listener may do with as it likes, with what it declared, by its own names."""
    unreduced = observation.unreduced
    if isinstance(unreduced, Unreduced):
        unreduced = unreduced.renamed(names).mapped(torch.clone)
    return replace(
        observation,
        x=observation.x.clone(),
        y=observation.y.clone(),
        unreduced=unreduced,
        borrowed=Borrowed(shared),
    )


def _bytes(item: _Item) -> int:
    return item[0].x.nbytes + item[0].y.nbytes


# A site's batch, and what waits until its numbers have come from the device.
_Item = tuple[SiteBatch, Callable[[], None]]


def _on_host(observation: SiteBatch) -> _Item:
    """Have what is left of an activation copied to the CPU, where the measures compute.

    It is small, what they do to it is many small steps, and each of these would be a kernel and
    often a wait of the network's own pass; so a GPU has nothing to do but the network.
    """
    device = observation.x.device
    if device.type == "cpu":
        return observation, lambda: None
    # To pinned memory, without waiting. Other devices than CUDA's have no such copies.
    is_cuda = device.type == "cuda"

    def fetched(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=is_cuda)

    unreduced = observation.unreduced
    if isinstance(unreduced, Unreduced):
        unreduced = unreduced.mapped(fetched)
    moved = replace(
        observation, x=fetched(observation.x), y=fetched(observation.y), unreduced=unreduced
    )
    if not is_cuda:
        return moved, lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return moved, event.synchronize
