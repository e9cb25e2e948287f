"""Checks that the samples in a batch are computed independently of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.signals import raise_interruption

from .memory import halve_on_oom, is_out_of_memory
from .random_state import rng_state

# Between batches of equal size, a sample's results differ only by the order of summation; any real
# dependence on other samples is larger. Larger batches may use different kernels, whose rounding
# errors differ more, and deep networks amplify the difference.
PAIR_TOLERANCE_EPS = 2**10
GROUP_TOLERANCE_EPS = 2**16
MAX_GROUP_SIZE = 5
MAX_COMPARED_SAMPLES = 32
CHANGES = "the network's output for one input changes from call to call"
DEPENDS_ON_BATCH = "a sample's results depend on the other samples of its batch"


def equal_but_for_rounding(values: Tensor, expected: Tensor, tolerance: Tensor) -> Tensor:
    """Return True elementwise for values that are equal, both NaN or within a finite tolerance.

    Examples
    --------
    >>> values, expected = torch.tensor([1.0, torch.inf, 2.0]), torch.tensor([1.1, torch.inf, 3.0])
    >>> equal_but_for_rounding(values, expected, torch.tensor(0.5)).tolist()
    [True, True, False]
    """
    equal = (values == expected) | (values.isnan() & expected.isnan())
    return equal | ((values - expected).abs() <= tolerance) & tolerance.isfinite()


def describe_dependence(
    rows: Callable[[Tensor], Tensor],
    samples: Tensor,
    limit: int | None = None,
    compared: int = MAX_COMPARED_SAMPLES,
) -> str:
    """Describe why results are no function of their own sample.

    Return "" if they are. At most `limit` samples are run at a time. They are run twice as they
    are, and `compared` of them together with a copy of themselves only. This finds noise, and
    networks that take a decision for the batch as a whole, such as an early exit.

    Examples
    --------
    >>> x = torch.arange(3.0)[:, None]
    >>> describe_dependence(torch.square, x), describe_dependence(lambda x: x - x.mean(), x)
    ('', "a sample's results depend on the other samples of its batch")
    """
    if not len(samples):
        return ""

    def attempt(size: int) -> list[Tensor]:
        parts = torch.split(samples, size)
        return [torch.cat([rows(part) for part in parts]) for _ in range(2)]

    first = len(samples) if limit is None else min(limit, len(samples))
    (together, again), size = halve_on_oom(attempt, first, samples.device)
    if together.shape != again.shape or not equal_rows(again, together, PAIR_TOLERANCE_EPS):
        return CHANGES
    if limit is not None and size < 2:
        return ""
    for index in range(0, len(samples), -(-len(samples) // compared)):
        twins = rows(samples[[index, index]])
        expected = together[index : index + 1].expand_as(twins)
        if not equal_rows(twins, expected, GROUP_TOLERANCE_EPS):
            return DEPENDS_ON_BATCH
    return ""


def describe_outputs(
    rows: Callable[[Tensor], Tensor], samples: Tensor, together: Tensor | None = None
) -> str:
    """Describe why a model's outputs are no function of their own sample.

    Return "" if they are. A pair of samples is run in both orders, in the same memory, and the
    first and the last sample alone. Only where a result differs from that in the whole batch,
    `together` if it is known, `check_memory` and `describe_dependence` look for the reason. `rows`
    may modify the samples.

    Examples
    --------
    >>> x = torch.arange(3.0)[:, None]
    >>> describe_outputs(torch.square, x), describe_outputs(lambda x: x - x.mean(), x)
    ('', "a sample's results depend on the other samples of its batch")
    """
    together = rows(samples.clone()).clone() if together is None else together
    pair = torch.cat([samples[:1], other_samples(samples)[0]])
    if _agree_in_small_batches(rows, samples, pair, together):
        return ""
    if dependence := check_memory(rows, samples):
        return dependence
    again = rows(samples.clone())
    if together.shape != again.shape or not equal_rows(again, together, PAIR_TOLERANCE_EPS):
        return CHANGES
    return describe_dependence(lambda samples: rows(samples.clone()), samples, compared=2)


def _agree_in_small_batches(
    rows: Callable[[Tensor], Tensor], samples: Tensor, pair: Tensor, together: Tensor
) -> bool:
    """Return True if the results of a pair and of single samples are those in the whole batch.

    Three sizes of batches, since a model may know the results of one from an earlier call.
    """
    buffer = pair.clone()

    def run(samples: Tensor) -> Tensor:
        return rows(buffer[: len(samples)].copy_(samples)).clone()

    try:
        first = run(pair)
        swapped = run(pair.flip(0))
        alone = [run(samples[index : index + 1]) for index in (0, len(samples) - 1)]
        columns = {result.shape[1:] for result in (together, first, swapped, *alone)}
        return (
            len(columns) == 1
            and equal_rows(swapped, first.flip(0), PAIR_TOLERANCE_EPS)
            and equal_rows(first[:1], together[:1], GROUP_TOLERANCE_EPS)
            and equal_rows(alone[0], together[:1], GROUP_TOLERANCE_EPS)
            and equal_rows(alone[1], together[-1:], GROUP_TOLERANCE_EPS)
        )
    except Exception:  # A network may accept no single samples.
        return False


class DependsOnOrder(Undefined):
    """A model only runs on all samples at once, and its results depend on their order."""

    def __init__(self) -> None:
        super().__init__(
            "the network only runs on all samples at once, and its results depend on their order, "
            "which is kept for one batch of nlbench.evaluate, such as nlbench.Arguments"
        )


def depends_on_order(
    rows: Callable[[Tensor], Tensor], few: Tensor, read: Callable[[], Tensor]
) -> bool:
    """Return True if a model that refuses few samples gives all other results in another order.

    It knows how all samples, which `read` returns, are related, for example from the edges of a
    graph. `rows` may modify the samples, and leaves no mark.

    Examples
    --------
    >>> x = torch.arange(6.0)[:, None]
    >>> depends_on_order(lambda x: torch.ones(6, 6).triu() @ x, x[:4], lambda: x)
    True
    >>> depends_on_order(torch.square, x[:4], lambda: x)
    False
    """
    try:
        rows(few.clone())
        return False
    except BaseException as error:  # A model may refuse its inputs in any way.
        raise_interruption(error)
    samples = read()
    try:
        first, again = (rows(samples.clone()).clone() for _ in range(2))
        reversed_rows = rows(samples.flip(0)).flip(0)
    except BaseException as error:
        raise_interruption(error)
        return False
    is_repeatable = equal_rows(again, first, PAIR_TOLERANCE_EPS)
    return is_repeatable and not equal_rows(reversed_rows, first, GROUP_TOLERANCE_EPS)


def spread(samples: Tensor) -> Tensor:
    """Return up to four samples: the first, the last and two between them."""
    count = len(samples)
    return samples[sorted({0, count // 3, 2 * count // 3, count - 1})]


class RemembersOutputs(Undefined):
    """A model's results depend on what it computed before."""

    def __init__(self) -> None:
        super().__init__(
            "the network's output for an input depends on the inputs before it: it keeps what it "
            "computed for another input"
        )


def check_memory(rows: Callable[[Tensor], Tensor], samples: Tensor) -> str:
    """Raise if a model's results depend on what it computed before, and describe other dependences.

    Up to four samples are run in two orders, in the same memory, since a model may keep its outputs
    by the shape, the address or a summary of its input, such as the mean. The last sample is also
    run in batches of copies of it, whose sizes such a model doesn't know. `rows` may modify the
    samples. Two samples would not show a shift by two.

    Examples
    --------
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> check_memory(torch.square, x), check_memory(lambda x: x - x[:1], x)
    ('', "a sample's results depend on the other samples of its batch")
    >>> memory = {}
    >>> check_memory(lambda x: memory.setdefault(x.shape, x.square()), x)
    Traceback (most recent call last):
        ...
    nlbench.introspection.batch_independence.RemembersOutputs: the network's output ...
    """
    few = spread(samples) if len(samples) > 1 else samples[[0, 0]]
    buffer = few.clone()

    def run(samples: Tensor) -> Tensor:
        return _rows_anywhere(rows, buffer.copy_(samples)).clone()

    size = len(few)
    sample = few[-1:]
    more = _rows_anywhere(rows, sample[[0] * (size + 1)]).clone()
    first = run(few)
    shifted = run(few.roll(1, 0))
    if not first.shape == shifted.shape == (size, *more.shape[1:]):
        return ""
    follows = equal_rows(shifted, first.roll(1, 0), GROUP_TOLERANCE_EPS)
    if follows and equal_rows(shifted[:1], more[:1], GROUP_TOLERANCE_EPS):
        return ""
    if not equal_rows(run(few.roll(1, 0)), shifted, PAIR_TOLERANCE_EPS):
        return CHANGES
    run(few[[0] * size])
    copies = run(sample[[0] * size])
    most = rows(sample[[0] * (size + 3)])
    is_known = equal_rows(more[:1], most[:1], GROUP_TOLERANCE_EPS)
    is_stale = is_known and not equal_rows(copies[:1], more[:1], GROUP_TOLERANCE_EPS)
    if is_stale or (torch.equal(first, shifted) and not follows):
        raise RemembersOutputs
    # It follows its sample, but is another one among copies of it.
    return DEPENDS_ON_BATCH


def _rows_anywhere(rows: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    """Run samples, and raise RemembersOutputs if they only run at other addresses.

    What a model keeps by the address of its input may be for another number of samples.
    """
    try:
        return rows(samples)
    except Exception as error:
        # All alive at once, so that no two have the same address.
        elsewhere = [samples.clone() for _ in range(4)]
        if any(_accepts(rows, copied) for copied in elsewhere):
            raise RemembersOutputs from error
        raise


def _accepts(rows: Callable[[Tensor], Tensor], samples: Tensor) -> bool:
    try:
        rows(samples)
    except Exception:  # A network may refuse few samples in any way.
        return False
    return True


def is_finite_among(others: Tensor, rows: Callable[[Tensor], Tensor], samples: Tensor) -> bool:
    """Return True if results that aren't finite are finite among other samples.

    Of few samples, an activation may be zero for all, so that its standard deviation is zero.
    `rows` may modify the samples.

    Examples
    --------
    >>> x = torch.tensor([[1.0], [1.0], [2.0]])
    >>> is_finite_among(x, lambda x: x / x.std(0), x[:2]), is_finite_among(x, torch.log, -x[:2])
    (True, False)
    """
    few = rows(samples.clone()).isfinite()
    more = rows(torch.cat([samples, others]))[: len(samples)].isfinite()
    return more.shape == few.shape and bool((more & ~few).any())


def row_order(rows: Tensor, first_changed: Tensor, second_changed: Tensor) -> str:
    """Return how the rows of two samples are arranged on a first axis that holds both.

    The rows (2 k, d) are those of the pair, and after a change of the first or the second sample.
    The order is ``contiguous``, also if no row changes, or ``interleaved``; empty if a row depends
    on both samples, or if it can't be told which of the two holds.

    Examples
    --------
    >>> rows = torch.arange(4.0)[:, None]
    >>> row_order(rows, rows + torch.tensor([[1.0], [0], [1], [0]]), rows)
    'interleaved'
    """
    orders: list[str] = []
    for tolerance_eps in (0, PAIR_TOLERANCE_EPS):
        moved = []
        for changed in (first_changed, second_changed):
            pairs = zip(changed, rows, strict=True)
            moved.append([not equal_rows(new, old, tolerance_eps) for new, old in pairs])
        if not any(map(any, moved)):
            return "contiguous"
        half = len(rows) // 2
        sample_orders = {
            "contiguous": [row // half for row in range(2 * half)],
            "interleaved": [row % 2 for row in range(2 * half)],
        }
        orders = [
            order
            for order, of in sample_orders.items()
            if not any(moved[1 - sample][row] for row, sample in enumerate(of))
        ]
        if orders:
            break
    return orders[0] if len(orders) == 1 else ""


def other_samples(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return two distinct samples to pair with the first sample."""
    sample = batch[:1]
    for index in range(1, len(batch)):
        if not torch.equal(batch[index : index + 1], sample):
            return batch[index : index + 1], sample
    return sample, sample


def check_batch_independence(
    rows: Callable[[Tensor], Mapping[str, Tensor]],
    batch: Tensor,
    limit: int,
    *,
    because: str = "the batch does not fit into memory as a whole",
    allow_random: bool = False,
) -> None:
    """Raise if the result for a sample depends on the other samples in its batch.

    A sample is run together with each of two others, as the first and as the last of a pair, and
    together with four others if `limit` allows; its results must not differ. The check works for
    any operation that mixes or counts the samples. It misses effects that require more samples,
    such as a network that routes the rarest of many samples elsewhere. `rows` maps samples (m, ...)
    to results (m k, d) by name, the k rows of each sample contiguous or interleaved. `because` ends
    the message. Networks that draw random numbers raise, or with `allow_random` are not checked.

    Examples
    --------
    >>> check_batch_independence(lambda pair: {"square": pair**2}, torch.randn(8, 3), 4)
    """
    sample = batch[:1]
    others = other_samples(batch)
    before = rng_state(batch.device)
    pairs = [torch.cat(pair) for other in others for pair in ((sample, other), (other, sample))]
    try:
        results = [dict(rows(pair)) for pair in pairs]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        results = []
    if not results:
        rows(sample)  # Raises if not even one sample fits.
        raise Undefined(
            "only one sample at a time fits into memory, so the independence of the samples in a "
            "batch can't be checked"
        )
    if rng_state(batch.device) != before:
        if allow_random:
            return
        raise Undefined(
            f"the network draws random numbers, which depend on how a batch is split, and {because}"
        )
    _check_equal_results(results[0], results[2], 0, 2, PAIR_TOLERANCE_EPS, because)
    _check_equal_results(results[1], results[3], 1, 2, PAIR_TOLERANCE_EPS, because)
    if limit > 2:
        group = torch.cat([sample, *[others[0]] * (min(limit, MAX_GROUP_SIZE) - 1)])
        grouped = dict(rows(group))
        _check_equal_results(results[0], grouped, 0, len(group), GROUP_TOLERANCE_EPS, because)


def _check_equal_results(
    pair: Mapping[str, Tensor],
    group: Mapping[str, Tensor],
    position: int,
    size: int,
    tolerance_eps: int,
    because: str,
) -> None:
    """Raise if a sample's results differ between a pair and a group of `size` samples."""
    if list(pair) != list(group):
        raise Undefined(
            "what the network computes for a sample depends on the other samples of its batch, "
            f"and {because}"
        )
    for name, values in pair.items():
        if not _same_rows(values, group[name], position, size, tolerance_eps):
            raise Undefined(
                f"{name}: a sample's results depend on the other samples of its batch, or "
                f"the batch axis is unknown, and {because}"
            )


def _same_rows(pair: Tensor, group: Tensor, position: int, size: int, tolerance_eps: int) -> bool:
    """Return True if the rows of the sample at a position are the same in both batches."""
    if len(pair) == 1 or len(group) == 1:
        return pair.shape == group.shape  # Independent of the input: positional embeddings.
    rows_per_sample = len(pair) // 2
    if pair.shape[1:] != group.shape[1:] or len(group) != size * rows_per_sample or len(pair) % 2:
        return False
    contiguous = slice(position * rows_per_sample, (position + 1) * rows_per_sample)
    interleaved = slice(position, None, 2), slice(position, None, size)
    return any(
        equal_rows(pair[in_pair], group[in_group], tolerance_eps)
        for in_pair, in_group in ((contiguous, contiguous), interleaved)
    )


def equal_rows(values: Tensor, expected: Tensor, tolerance_eps: int) -> bool:
    """Return True for equal rows, but for a multiple of the rounding of their largest entries."""
    if values.device.type == "mps":  # MPS has no double precision.
        values = values.cpu()
        expected = expected.cpu()
    scale = torch.where(values.isfinite(), values.abs(), 0.0).amax(-1, keepdim=True).double()
    tolerance = tolerance_eps * torch.finfo(values.dtype).eps * scale
    return bool(equal_but_for_rounding(values, expected, tolerance).all())
