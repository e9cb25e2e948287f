"""Probe ``sites``: the input and output of every activation call.

Activations are caught where they are called, through PyTorch's function
override, so that a module, a function, a tensor method, an in-place call and
the second call of a reused module are all seen, once each, and no module is
ever called again. What the probe keeps of an activation is its reduction to
(n, d), taken before the call, so that an in-place call can't overwrite it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from nlbench.errors import RequestError, Undefined
from nlbench.probes.layout import Layouts
from nlbench.probes.reduction import reduce_site

__all__ = [
    "Site",
    "SiteLook",
    "evaluation_mode",
    "list_sites",
    "look_at_sites",
    "refuse_unobservable",
    "remark_on_channels",
]

# Name of a function, without a trailing underscore, to the kind of activation.
ACTIVATIONS = {
    "_threshold": "threshold",
    "celu": "celu",
    "elu": "elu",
    "gelu": "gelu",
    "hardshrink": "hardshrink",
    "hardsigmoid": "hardsigmoid",
    "hardswish": "hardswish",
    "hardtanh": "hardtanh",
    "leaky_relu": "leaky_relu",
    "log_sigmoid": "logsigmoid",
    "logsigmoid": "logsigmoid",
    "mish": "mish",
    "prelu": "prelu",
    "relu": "relu",
    "relu6": "relu6",
    "rrelu": "rrelu",
    "selu": "selu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "softplus": "softplus",
    "softshrink": "softshrink",
    "softsign": "softsign",
    "special_expit": "sigmoid",
    "tanh": "tanh",
    "tanhshrink": "tanhshrink",
    "threshold": "threshold",
}
# Modules that are one activation and nothing else: their site bears their own name.
ACTIVATION_MODULES: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.RReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)


@dataclass(frozen=True)
class Site:
    """One call of one activation function in one forward pass.

    Parameters
    ----------
    name : str
        ``layer1.0.relu``, its second call ``layer1.0.relu:1``, a functional call
        ``Mixed_5b.branch1x1/relu``.
    kind : str
        ``relu``, ``gelu``, ….
    index : int
        Position in the order of calls, from 0.
    shape : tuple of int
        Of one sample's activation, without the batch.
    channel_axis : int
        Counted from 0 with the batch axis, which is put first where it wasn't.
    assumed : bool
        True where nothing on the way said which axis holds the channels, and the usual
        one for the shape was taken; see `nlbench.probes.layout.Layouts.of`.
    """

    name: str
    kind: str
    index: int
    shape: tuple[int, ...]
    channel_axis: int
    assumed: bool = False


@dataclass(frozen=True)
class SiteLook:
    """One batch of one site, as measures get it.

    Parameters
    ----------
    site : Site
    batch : int
        Number of the batch, from 0.
    x, y : tensor of shape (n, d)
        The activation's input and output after reduction, in the model's dtype (at
        least float32) and on its device. n is the batch's number of samples, or a multiple
        of it where a network folds windows or tokens into the first axis.
    """

    site: Site
    batch: int
    x: Tensor
    y: Tensor

    @property
    def place(self) -> str:
        """The site's name."""
        return self.site.name


class _Watch(TorchFunctionMode):
    """Sees every PyTorch function while one forward pass runs."""

    def __init__(
        self,
        names: dict[nn.Module, str],
        stack: list[nn.Module],
        on_call: Callable[[Site, Tensor, Tensor], None],
        reduction: str,
        given: Tensor,
    ) -> None:
        super().__init__()
        self.names, self.stack = names, stack
        self.on_call, self.reduction = on_call, reduction
        self.calls: Counter[str] = Counter()
        self.layouts = Layouts(len(given))
        self.layouts.begin(given)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        kind = ACTIVATIONS.get(name) or ACTIVATIONS.get(name.removesuffix("_"))
        if kind is None:
            output = func(*args, **kwargs)
            self.layouts.follow(_property(func) or name, args, kwargs, output)
            return output
        given = args[0] if args else kwargs["input"]
        count = sum(self.calls.values())
        label, kind = self._label(kind)
        try:
            batch, axis, assumed = self.layouts.of(given)
        except Undefined as error:
            raise Undefined(f"{label}: {error}") from None
        moved = _batch_first(given, batch)
        axis = axis + 1 if axis < batch else axis
        shape = tuple(moved.shape[1:])
        x = reduce_site(moved, axis, self.reduction)
        output = func(*args, **kwargs)
        self.layouts.follow(name, args, kwargs, output)
        y = reduce_site(_batch_first(output, batch), axis, self.reduction)
        self.on_call(Site(label, kind, count, shape, axis, assumed), x, y)
        return output

    def _label(self, kind: str) -> tuple[str, str]:
        module = self.stack[-1] if self.stack else None
        path = self.names.get(module, "") if module is not None else ""
        if type(module) in ACTIVATION_MODULES:
            kind = "relu6" if isinstance(module, nn.ReLU6) else kind
            label = path or kind
        else:
            label = f"{path}/{kind}" if path else kind
        count = self.calls[label]
        self.calls[label] += 1
        return (f"{label}:{count}" if count else label), kind


def _property(func: Callable[..., Any]) -> str:
    """Name of the property that ``func`` reads, such as ``mT``; empty if it reads none."""
    if getattr(func, "__name__", "") != "__get__":
        return ""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _batch_first(tensor: Tensor, batch: int) -> Tensor:
    return tensor.movedim(batch, 0) if batch else tensor


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients; put every module back after.

    Buffers that the forward pass changes, such as a counter of calls, get their values back.
    One that it replaces by another shape is a cache that has grown, and stays.
    """
    was_training = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, flag in was_training.items():
            module.training = flag
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                _put_back(module, name, buffer, before)


def _put_back(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    now = module._buffers.get(name)
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return
    if buffer.shape == before.shape and not torch.equal(buffer, before):
        buffer.copy_(before)
    # A model moved to another device meanwhile keeps its new buffers.
    if now.device == buffer.device:
        module._buffers[name] = buffer


@contextmanager
def _module_stack(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Keep the list of modules whose forward is running, outermost first."""
    stack: list[nn.Module] = []
    handles: list[RemovableHandle] = []

    def enter(module: nn.Module, args: object) -> None:
        stack.append(module)

    def leave(module: nn.Module, args: object, output: object) -> None:
        stack.pop()

    try:
        for module in model.modules():
            # The last hook before and the first after forward, so that a user's own hooks
            # count as called from outside.
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def look_at_sites(
    model: nn.Module,
    batches: Iterable[Tensor],
    on_look: Callable[[SiteLook], None],
    *,
    reduction: str = "spatial",
) -> int:
    """Run a model over batches and show every activation call to a listener.

    The model is run in evaluation mode, once a batch, and left as it was found, also
    after an error. No full activation is kept.

    Parameters
    ----------
    model : torch.nn.Module
    batches : iterable of tensor
        Inputs of the model, on its device.
    on_look : callable
        Called with a `SiteLook` for each batch of each site, in order of call.
    reduction : {"spatial", "flatten", "published"}
        See `nlbench.probes.reduction.reduce_site`.

    Returns
    -------
    int
        Number of samples seen.

    Raises
    ------
    nlbench.RequestError
        For a compiled or scripted model, whose activations can't be observed.
    nlbench.Undefined
        Where an activation's first axis is not the batch, and it isn't known which is.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    >>> seen = []
    >>> look_at_sites(model, [torch.randn(8, 3)], lambda look: seen.append(look.place))
    8
    >>> seen
    ['1', '3']
    """
    refuse_unobservable(model)
    names = {module: name for name, module in model.named_modules()}
    samples = 0
    with evaluation_mode(model), _module_stack(model) as stack:
        for number, batch in enumerate(batches):

            def on_call(site: Site, x: Tensor, y: Tensor, number: int = number) -> None:
                on_look(SiteLook(site, number, x, y))

            # A copy: a first layer that works in place would change the caller's data.
            given = batch.clone()
            with _Watch(names, stack, on_call, reduction, given):
                model(given)
            samples += len(batch)
    return samples


def list_sites(model: nn.Module, example: Tensor) -> list[Site]:
    """All sites of a model, in order of call.

    Parameters
    ----------
    model : torch.nn.Module
    example : tensor
        A batch of inputs.

    Examples
    --------
    >>> [site.kind for site in list_sites(nn.Sequential(nn.Linear(2, 2), nn.GELU()),
    ...                                   torch.zeros(1, 2))]
    ['gelu']
    """
    found: list[Site] = []
    look_at_sites(model, [example], lambda look: found.append(look.site))
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


def refuse_unobservable(model: nn.Module) -> None:
    """Refuse a model of which a part is compiled or scripted.

    Raises
    ------
    nlbench.RequestError
        Naming the part.
    """
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule"
        if isinstance(module, torch.jit.ScriptModule) or is_compiled:
            what = "compiled" if is_compiled else "scripted"
            raise RequestError(
                f"{name or 'the model'} is {what}, so its activations can't be observed; "
                "pass the module it was made from"
            )
