"""Forwards that CUDA records once and replays: hundreds of launches become one."""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn as nn

from routing import Routing


def replay_forward(net: nn.Module) -> None:
    """Have a network replay its forward where it runs without gradients and draws nothing itself."""
    if not isinstance(net.forward, MethodType):  # it is replayed already
        return
    net.forward = _Recorded(net.forward)


class _Recorded:
    """A forward, recorded for each kind of input when it first comes; one pool of memory serves all."""

    def __init__(self, forward: Callable[..., torch.Tensor]):
        self._forward, self._recorded, self._pool = forward, {}, None

    def __call__(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        routing: Routing | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        # A recording repeats what it saw: nothing may be drawn in it, and no gradient is kept.
        repeats = routing is None or (routing.noise is not None and routing.force_keep is None)
        if torch.is_grad_enabled() or generator is not None or not repeats:
            return self._forward(x, c_noise, class_labels, routing=routing, generator=generator)
        labels = () if class_labels is None else (class_labels,)
        inputs = (x, c_noise, *labels, *(() if routing is None else routing.noise))
        kind = (torch.is_autocast_enabled("cuda"), str(routing and routing.selection_ratio))
        kind += tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if kind not in self._recorded:
            self._recorded[kind] = self._record(inputs, len(labels), routing)
        return self._recorded[kind](*inputs).clone()  # the next replay writes over it

    def _record(
        self, inputs: tuple[torch.Tensor, ...], num_labels: int, routing: Routing | None
    ) -> Callable[..., Any]:
        def forward(x: torch.Tensor, c_noise: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            labels, noise = (rest[0] if num_labels else None), list(rest[num_labels:])
            given = None if routing is None else replace(routing, noise=noise)
            return self._forward(x, c_noise, labels, routing=given, generator=None)

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Of its own, since each replay writes its inputs there.
        inputs = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)
        # A recording must not hold weights that autocast has cast and keeps only for a while.
        bf16 = torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
            return torch.cuda.make_graphed_callables(forward, inputs, pool=self._pool)
