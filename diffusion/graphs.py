"""Forwards that CUDA records once and replays: hundreds of launches become one."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn as nn

from routing import Routing

NUM_WARM_UPS = 3
Forward = Callable[..., torch.Tensor]


def replay_forward(net: nn.Module, recorder: Callable[[], Callable[[Forward, Any], Forward]]) -> None:
    """Make a network replay its forward where it needs no gradients and draws nothing itself."""
    if isinstance(net.forward, MethodType):  # else it already replays
        net.forward = _Replayed(net, recorder())


class _Replayed:
    """A forward, recorded at the first input of each kind.

    The network is referenced weakly: recordings hold memory of a GPU.
    """

    def __init__(self, net: nn.Module, record: Callable[[Forward, Any], Forward]):
        self._net, self._function = weakref.ref(net), type(net).forward
        self._record, self._recorded = record, {}

    def __call__(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        routing: Routing | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        net = self._net()
        # A recording repeats the recorded draws and keeps no gradient.
        repeats = routing is None or (routing.noise is not None and routing.force_keep is None)
        if torch.is_grad_enabled() or generator is not None or not repeats:
            return self._function(net, x, c_noise, class_labels, routing=routing, generator=generator)
        labels = () if class_labels is None else (class_labels,)
        inputs = (x, c_noise, *labels, *((routing and routing.noise) or ()))
        kind = (torch.is_autocast_enabled(x.device.type), str(routing and routing.selection_ratio))
        kind += tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if kind not in self._recorded:

            def forward(x: torch.Tensor, c_noise: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
                given = routing and replace(routing, noise=list(rest[len(labels) :]))
                return self._function(self._net(), x, c_noise, rest[0] if labels else None, routing=given)

            self._recorded[kind] = self._record(forward, inputs)
        return self._recorded[kind](*inputs)


class CudaRecorder:
    """Record forwards as CUDA graphs, in one pool of memory, on one stream."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, forward: Forward, inputs: tuple[torch.Tensor, ...]) -> Forward:
        """Return a function that copies its inputs to the recorded ones, replays, and copies the output."""
        inputs = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)
        graph, bf16 = torch.cuda.CUDAGraph(), torch.is_autocast_enabled("cuda")
        # A recording must not hold cast weights, which the cache of autocast frees.
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # compiles, and lets libraries plan
                for _ in range(NUM_WARM_UPS):
                    forward(*inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            # Other threads continue to decode or to read data.
            options = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, self._pool, **options):
                output = forward(*inputs)

        def replay(*given: torch.Tensor) -> torch.Tensor:
            for recorded, tensor in zip(inputs, given, strict=True):
                recorded.copy_(tensor)
            graph.replay()
            return output.clone()  # the next replay overwrites it

        return replay
