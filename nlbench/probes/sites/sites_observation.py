"""Observe the activation calls of a model, batch by batch.

Only the reductions of activations to (n, d) are kept. Inputs are reduced before the call, which may
overwrite them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.batch_independence import (
    PAIR_TOLERANCE_EPS,
    check_batch_independence,
    equal_rows,
    other_samples,
    spread,
)
from nlbench.introspection.distinct_rows import DistinctRows, RowNumbers
from nlbench.introspection.memory import FeasibleSizes, SampleLimit, halve_on_oom, microbatch_sizes
from nlbench.introspection.model_state import (
    evaluation_mode,
    preserve_attributes,
    refuse_unobservable,
)
from nlbench.introspection.precision import exact_by_default
from nlbench.introspection.random_state import preserve_rng_state
from nlbench.introspection.wrappers import through_wrappers
from nlbench.parsers import unique

from .intercept import CallInterceptor, CapturePolicy, ModuleInterceptor, SiteCall
from .reduce import Side, UnreducedFunction, join
from .rows import FoldedRows, PositionSelector, UnknownRowOrder
from .site import Site, SiteBatch, UnreducedResults
from .sites_probe import Picker, RowPolicy, Selection

Interceptor = CallInterceptor | ModuleInterceptor
"""Runs a model and reports the calls of its sites."""

CallIdentity = tuple[str, str, Hashable]
"""Name and kind of a call, and its position in the network's code."""


class Microbatches:
    """The microbatches of one batch, joined site by site.

    `on_call` is called with each call, its index, its input and its output on the whole batch:
    immediately if the batch is not split, otherwise during the last microbatch. If a batch is
    restarted because memory ran out, no call is reported twice.
    """

    def __init__(self, on_call: Callable[[SiteCall, int, Side | None, Side | None], None]) -> None:
        self._on_call = on_call
        self._reported: set[str] = set()
        self.calls: list[CallIdentity] = []

    def split(self, batch: Tensor, limit: int) -> Iterator[Tensor]:
        """Yield microbatches of at most `limit` samples."""
        self._sizes = microbatch_sizes(len(batch), limit)
        # Input and output at each site, for every microbatch so far.
        self._sides: dict[str, list[tuple[Side, Side]]] = {}
        first: list[CallIdentity] | None = None
        for index, microbatch in enumerate(torch.split(batch, self._sizes)):
            self._index = index
            self.calls = []
            yield microbatch
            first = self.calls if first is None else first
            if self.calls != first:
                raise Undefined(
                    "the network calls different activations for different samples, so "
                    "the microbatches of a batch that does not fit into memory can't be joined"
                )

    def add(self, call: SiteCall) -> None:
        """Add a call of the current microbatch."""
        index = len(self.calls)
        self.calls.append((call.name, call.kind, call.site.origin))
        sides = self._sides.setdefault(call.name, [])
        if call.x is not None and call.y is not None:
            sides.append((call.x, call.y))
        if self._index == len(self._sizes) - 1:
            del self._sides[call.name]
            if call.name not in self._reported:
                self._reported.add(call.name)
                self._on_call(call, index, *self._join(call, sides))

    def _join(
        self, call: SiteCall, sides: Sequence[tuple[Side, Side]]
    ) -> tuple[Side | None, Side | None]:
        if not sides:
            return None, None
        if call.any_rows:
            return join([x for x, _ in sides]), join([y for _, y in sides])
        if sides[0][0].sample_index is not None and len(sides) == len(self._sizes):
            starts = list(itertools.accumulate(self._sizes, initial=0))
            shifted = []
            for (x, y), start in zip(sides, starts, strict=False):
                shifted.append((_shift(x, start), _shift(y, start)))
            return join([x for x, _ in shifted]), join([y for _, y in shifted])
        rows = [len(x.reduced) for x, _ in sides]
        if len(self._sizes) == 1:
            return sides[0]
        rows_per_sample = {n / size for n, size in zip(rows, self._sizes, strict=False)}
        # The rows of a single sample may be tokens, with the samples on another axis.
        is_ambiguous = max(self._sizes) == 1 and rows_per_sample != {1.0}
        if len(rows) != len(self._sizes) or len(rows_per_sample) > 1 or is_ambiguous:
            call.problem = (
                "the batch axis is unknown, and the batch does not fit into memory as a whole"
            )
            return None, None
        return join([x for x, _ in sides]), join([y for _, y in sides])


def _shift(side: Side, start: int) -> Side:
    return (
        side if side.sample_index is None else replace(side, sample_index=side.sample_index + start)
    )


def rows_at_sites(
    make_interceptor: Callable[[CapturePolicy, Callable[[SiteCall], None]], Interceptor],
    policy: CapturePolicy,
    samples: Tensor,
) -> dict[str, Tensor]:
    """Return the reduced activations and their norms at the selected sites."""
    rows: dict[str, Tensor] = {}

    def add(call: SiteCall) -> None:
        for suffix, side in (("", call.x), (" (output)", call.y)):
            if side is not None:
                norm = side.function_results["norm"]
                norms = [norm[:, None]] if isinstance(norm, Tensor) else []
                rows[call.name + suffix] = torch.cat([side.reduced, *norms], 1)

    interceptor = make_interceptor(_whole_means(policy, {"norm": _norm}, None), add)
    with preserve_attributes(interceptor.model), interceptor.hooked():
        interceptor.run(samples.clone())
    return rows


def probe_folded_rows(
    make_interceptor: Callable[[CapturePolicy, Callable[[SiteCall], None]], Interceptor],
    policy: CapturePolicy,
    batch: Tensor,
) -> None:
    """Find which rows of a folded first axis belong to which sample, by changing a sample."""
    sample = batch[:1]
    other = other_samples(batch)[0]
    folded = policy.folded
    assert folded is not None
    policy = _whole_means(policy, {}, folded)
    passes: list[dict[str, list[Tensor]]] = []
    folded.samples = 2
    try:
        for pair in ((sample, other), (other, other), (sample, sample)):
            folded.recorded = {}
            interceptor = make_interceptor(policy, lambda call: None)
            with (
                preserve_attributes(interceptor.model),
                preserve_rng_state(batch.device),
                interceptor.hooked(),
            ):
                interceptor.run(torch.cat(pair))
            passes.append(folded.recorded)
    except Exception:  # A network may accept no pairs; its folded places are then undefined.
        passes = []
    finally:
        folded.recorded = None
    folded.conclude(passes if len(passes) == 3 else [])


def places_with_padding(
    make_interceptor: Callable[[CapturePolicy, Callable[[SiteCall], None]], Interceptor],
    policy: CapturePolicy,
    samples: Tensor,
) -> list[str]:
    """Return the places whose rows depend on what stands in the padding of the model's arguments.

    There, positions are not those of the mask, for example if the network reverses them, or the
    network itself lets padding in.
    """
    passes: list[dict[str, Tensor]] = []
    for changes_padding in (False, True):
        rows: dict[str, Tensor] = {}

        def add(call: SiteCall, rows: dict[str, Tensor] = rows) -> None:
            for suffix, side in (("", call.x), (" (output)", call.y)):
                if side is not None:
                    rows[call.name + suffix] = side.reduced

        positions = PositionSelector(policy.positions.policy, changes_padding=changes_padding)
        own = replace(policy, positions=positions, functions={}, on_unmasked=lambda place: None)
        interceptor = make_interceptor(own, add)
        model = interceptor.model
        positions.begin(0, len(samples))
        if own.folded is not None:
            own.folded.samples = len(samples)
        with (
            preserve_attributes(model),
            preserve_rng_state(samples.device),
            interceptor.hooked(),
            positions.hooked(model),
        ):
            interceptor.run(samples.clone())
        passes.append(rows)
    first, second = passes
    changed = [
        name.removesuffix(" (output)")
        for name, values in first.items()
        if name in second
        and values.shape == second[name].shape
        and not equal_rows(second[name], values, PAIR_TOLERANCE_EPS)
    ]
    return unique(changed)


def _whole_means(
    policy: CapturePolicy, functions: Mapping[str, UnreducedFunction], folded: FoldedRows | None
) -> CapturePolicy:
    """Return a policy for the same calls, with the mean over all positions of a sample."""
    positions = PositionSelector(RowPolicy())
    return replace(
        policy, reduction="spatial", functions=functions, positions=positions, folded=folded
    )


def _norm(tensor: Tensor) -> Tensor:
    """Compute the norm of each sample (n,), which changes if samples exchange entries."""
    wide = tensor.flatten(1).to(torch.promote_types(tensor.dtype, torch.float32))
    return torch.linalg.vector_norm(wide, dim=1)


@through_wrappers
@exact_by_default()
def observe_sites(
    model: nn.Module,
    batches: Iterable[Tensor],
    on_observation: Callable[[SiteBatch], None],
    *,
    of: str = "activations",
    rows: str = "auto",
    skip: int = 0,
    reduction: str = "spatial",
    select: str = "*",
    attention: bool = False,
    functions: Mapping[str, UnreducedFunction] | None = None,
    memory: int | None = None,
    feasible_sizes: FeasibleSizes | None = None,
    on_unseen: Callable[[str], None] = lambda description: None,
    on_undefined: Callable[[str, str], object] = lambda place, reason: None,
    on_site: Callable[[Site], object] = lambda site: None,
    on_unmasked: Callable[[str], object] = lambda place: None,
    on_unread: Callable[[str], object] = lambda argument: None,
) -> int:
    """Run a model over batches and report every activation call.

    The model runs in evaluation mode, once per batch, and is restored afterwards, even after an
    error. No full activation is kept. The output equals that of an unobserved forward pass bit for
    bit (for transformer layers, without PyTorch's fused fast path), if the batch fits into memory.
    A batch that doesn't fit is run in microbatches, and each site is still reported once.

    Parameters
    ----------
    batches : iterable of tensor
        Inputs for the model, on its device.
    on_observation : callable
        Called with a `SiteBatch` for each batch at each site, in call order.
    of : str
        ``activations``, or other places; see `nlbench.probes.sites.modules.find_places`.
    rows : str
        See `nlbench.probes.sites.sites_probe.RowPolicy.parse`.
    skip : int
        Number of leading positions to omit from each sample.
    reduction : {"spatial", "flatten", "published"}
        See `nlbench.probes.sites.reduce.reduce_site`.
    select : str
        Sites to observe; see `nlbench.probes.sites.sites_probe.Selection.parse`.
    attention : bool
        Include softmaxes.
    functions : mapping of str to callable, optional
        Functions that reduce an activation (n, ...) to one number per sample (n,). They may be
        called on some of the samples. Their results are ``SiteBatch.unreduced``.
    memory : int, optional
        Memory limit for a forward pass in bytes. Two samples are run first to see how many fit.
    feasible_sizes : mutable mapping, optional
        Cache for the number of samples that fit into memory, used by later calls. If it is given,
        large batches on the CPU are split, too, unless their samples depend on each other.
    on_unseen : callable, optional
        Called with a description of each activation that can't be intercepted: hidden in a fused
        kernel, such as an LSTM's, or written as elementary operations inside a larger module.
    on_undefined : callable, optional
        Called with the site's name and the reason for each batch that can't be measured.
    on_site : callable, optional
        Called with each selected site in the first batch, also if it can't be measured.
    on_unmasked : callable, optional
        Called with the name of each place to whose positions a padding mask doesn't apply.
    on_unread : callable, optional
        Called with the name of each argument that may be a padding mask and was not applied.

    Returns
    -------
    int
        Number of samples.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, so that its activations can't be observed, or if
        the selection matches no site.
    nlbench.Undefined
        If batches call different activations, or if the samples of a batch that does not fit into
        memory depend on each other.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    >>> places = []
    >>> observe_sites(model, [torch.randn(8, 3)], lambda batch: places.append(batch.place))
    8
    >>> places
    ['1', '3']
    """
    refuse_unobservable(model)
    positions = PositionSelector(RowPolicy.parse(rows, skip, of))
    folded = None if positions.policy.nodes else FoldedRows()
    site_pass = _SitePass(Selection.parse(select), on_observation, on_undefined, on_site, folded)
    policy = CapturePolicy(
        reduction, functions or {}, attention, site_pass.may_select, positions, folded, on_unmasked
    )

    def make_interceptor(policy: CapturePolicy, on_call: Callable[[SiteCall], None]) -> Interceptor:
        if of == "activations":
            return CallInterceptor(model, policy, on_call, on_unseen)
        return ModuleInterceptor(model, of, policy, on_call)

    interceptor = make_interceptor(policy, lambda call: site_pass.microbatches.add(call))
    check = partial(rows_at_sites, make_interceptor, policy)
    samples = 0
    distinct = DistinctRows()
    padded: Tensor | None = None
    with evaluation_mode(model), without_fast_path():
        with interceptor.hooked(), positions.hooked(model):
            for batch in batches:
                # Tensors without values, on the meta device, can't be compared.
                numbers = None if batch.is_meta else distinct.add(batch)
                site_pass.begin_batch(samples, len(batch), numbers)
                limit = SampleLimit(
                    feasible_sizes, model, "samples of a forward pass", batch, memory
                )
                try:
                    _observe_batch(interceptor, batch, site_pass, limit, check)
                except UnknownRowOrder:
                    probe_folded_rows(make_interceptor, policy, batch)
                    _observe_batch(interceptor, batch, site_pass, limit, check)
                site_pass.end_batch()
                if padded is None and positions.of_model is not None:
                    padded = spread(batch)
                samples += len(batch)
        if padded is not None:
            with contextlib.suppress(Exception):  # A network may refuse few samples in any way.
                for place in places_with_padding(make_interceptor, policy, padded):
                    on_unmasked(place)
    for name in positions.unread:
        on_unread(name)
    return samples


class _SitePass:
    """Turns the calls of a pass over all batches into observations of the selected sites."""

    def __init__(
        self,
        selection: Selection,
        on_observation: Callable[[SiteBatch], None],
        on_undefined: Callable[[str, str], object],
        on_site: Callable[[Site], object],
        folded: FoldedRows | None,
    ) -> None:
        self._selection = selection
        self._folded = folded
        self._on_site = on_site
        self._on_observation = on_observation
        self._on_undefined = on_undefined
        self._batch = -1
        # Number of samples before the current batch, and in the current batch.
        self.first = self.samples = 0
        # Names selected in the first batch; None until it ends.
        self._selected: set[str] | None = None
        self._sites: dict[str, Site] = {}
        self._picked: set[str] = set()
        self._calls: list[CallIdentity] = []
        # True once a check has shown that samples don't depend on each other.
        self.is_independent = False

    def may_select(self, name: str, kind: str | None) -> bool:
        """Return True if the site of a call may be selected."""
        if self._selected is not None:
            return name in self._selected
        return self._selection.may_take(name, kind)

    def begin_batch(self, first: int, samples: int, sources: RowNumbers | None) -> None:
        """Begin the next batch, given its first sample's index, its size and samples' numbers."""
        self._batch += 1
        self._sources = sources
        self.first = first
        self.samples = samples
        self._picker = Picker(self._selection)
        self.microbatches = Microbatches(self._report)

    def end_batch(self) -> None:
        """End a batch. The first one determines the sites."""
        calls = self.microbatches.calls
        if self._selected is None:
            self._selection.check(self._sites.values())
            self._selected = self._picked if self._selection.choices else None
        if self._batch == 0:
            self._calls = calls
        elif calls != self._calls:
            raise Undefined(
                f"the network calls different activations in batch {self._batch} than in batch 0"
                f"{_difference(self._calls, calls)}, so one name may stand for several sites"
            )

    def _report(self, call: SiteCall, index: int, x: Side | None, y: Side | None) -> None:
        site = Site(
            call.name,
            call.kind,
            index,
            call.shape,
            call.axis,
            call.assumed,
            call.role,
            call.site.where,
        )
        if self._selected is None:
            self._sites.setdefault(site.name, site)
            if not self._picker.takes(site):
                return
            self._picked.add(site.name)
        elif site.name not in self._selected:
            return
        problem = call.problem
        if not problem:
            assert x is not None
            assert y is not None
            problem = x.problem or y.problem
        if self._batch == 0:
            self._on_site(replace(site, problem=problem))
        if problem:
            self._on_undefined(site.name, problem)
            return
        assert x is not None
        assert y is not None
        sources = self._sources
        if sources is not None and x.sample_index is not None:
            sources = sources.select_rows(x.sample_index)
        elif len(x.reduced) != self.samples or call.any_rows:
            sources = None
        row_order = self._folded.order(call.label) if self._folded else ""
        row_order = row_order if call.order is None else "reordered"
        pairs = ((n, (before, y.function_results[n])) for n, before in x.function_results.items())
        self._on_observation(
            SiteBatch(
                site,
                self._batch,
                x.reduced,
                y.reduced,
                UnreducedResults(pairs),  # type: ignore[arg-type]
                x.sample_index,
                self.samples,
                (x.rounding, y.rounding),
                sources,
                call.call,
                call.last,
                call.argument,
                call.result,
                call.batch,
                row_order,
            )
        )


def _difference(first: Sequence[CallIdentity], second: Sequence[CallIdentity]) -> str:
    """Describe the first call that differs."""
    for before, after in itertools.zip_longest(first, second):
        if before is None or after is None:
            return f" ({(before or after)[0]} in only one of them)"
        if before != after:
            name = before[0]
            other = after[0]
            return f" ({other} for {name})" if name != other else f" (a different {name})"
    return ""


def _observe_batch(
    interceptor: Interceptor,
    batch: Tensor,
    site_pass: _SitePass,
    limit: SampleLimit,
    check: Callable[[Tensor], Mapping[str, Tensor]],
) -> None:
    """Run a batch, using smaller microbatches whenever memory runs out.

    Microbatches change a sample's results only by rounding: a convolution or a matrix product may
    sum in a different order for a different number of samples.
    """

    def attempt(size: int) -> None:
        if size < len(batch) and not site_pass.is_independent:
            check_batch_independence(check, batch, size)
            site_pass.is_independent = True
        first = site_pass.first
        for microbatch in site_pass.microbatches.split(batch, size):
            interceptor.policy.positions.begin(first, len(microbatch))
            if interceptor.policy.folded is not None:
                interceptor.policy.folded.samples = len(microbatch)
            first += len(microbatch)
            # A copy, since a first layer that works in place would modify the caller's data.
            interceptor.run(microbatch.clone())

    first_size = min(limit.limit or len(batch), len(batch))
    if first_size < len(batch) and not (limit.is_required or site_pass.is_independent):
        try:
            check_batch_independence(check, batch, first_size)
            site_pass.is_independent = True
        except Exception:  # It may also fail, for example if it reshapes pairs of samples.
            first_size = len(batch)
            limit.remember(first_size)
    _, size = halve_on_oom(attempt, first_size, batch.device)
    if size < first_size:
        limit.remember(size)


def refuse_undefined(place: str, reason: str) -> None:
    """Raise `nlbench.Undefined`, for measures that need every site."""
    raise Undefined(f"{place}: {reason}")


def list_sites(
    model: nn.Module, example: Tensor, *, attention: bool = False, of: str = "activations"
) -> list[Site]:
    """List the sites in a model, in call order, including softmaxes with `attention`.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    >>> [site.kind for site in list_sites(model, torch.zeros(1, 2))]
    ['gelu']
    """
    sites: list[Site] = []
    observe_sites(
        model, [example], lambda batch: None, attention=attention, of=of, on_site=sites.append
    )
    return sites


def channel_note(sites: Iterable[Site]) -> str:
    """Describe the sites whose channel axis is assumed. Return "" if there are none.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU())
    >>> channel_note(list_sites(model, torch.zeros(2, 3, 5, 5)))
    'channel axis unknown, assumed: 0 (axis 1)'
    """
    assumed = [f"{site.name} (axis {site.channel_axis})" for site in sites if site.assumed]
    return f"channel axis unknown, assumed: {', '.join(assumed)}" if assumed else ""
