"""The ranks of a launch, as one of them sees it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, wait_for_everyone
from torch.distributed import DistError

from runtime.output import claimed

T = TypeVar("T")
MAX_VALUE = 80  # characters in a message


@dataclass(frozen=True)
class Launch:
    """This process among those of its launch, as `runtime.machine.start_process` returns it.

    All ranks must call the same collective methods in the same order.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, state: PartialState) -> "Launch":
        """Return the launch that accelerate describes."""
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def is_main(self) -> bool:
        """True on the first rank."""
        return self.rank == 0

    def print(self, text: str) -> None:
        """Print on the first rank only."""
        if self.is_main:
            print(text, flush=True)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            wait_for_everyone()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the first rank through the block before the others, even if it fails there."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked: (...) -> (world_size, ...)."""
        # All of one shape and not empty: some backends cannot gather anything else.
        return gather(tensor.unsqueeze(0)) if self.world_size > 1 else tensor.unsqueeze(0)

    def gather_items(self, items: list[T]) -> list[T]:
        """Return the items of all ranks in one list."""
        return gather_object(items) if self.world_size > 1 else items

    def broadcast_from_main(self, decide: Callable[[], T]) -> T:
        """Return, on all ranks, what the first one decides; its ValueError or OSError is raised on all."""
        if self.world_size == 1:
            return decide()
        answer: tuple[T | None, Exception | None] = (None, None)
        if self.is_main:
            try:
                answer = (decide(), None)
            except (ValueError, OSError) as error:
                answer = (None, error)
            except Exception as error:  # a bug: but the others must not wait for an answer
                broadcast_object_list([(None, RuntimeError(f"process 0: {type(error).__name__}: {error}"))])
                raise
        ((decided, error),) = broadcast_object_list([answer])
        if error is not None:
            raise error
        return decided

    def assert_ranks_agree(self, facts: Mapping[str, Any]) -> None:
        """Raise a ValueError, on all ranks, that names the facts that are not the same on all of them."""
        of_ranks = self.gather_items([dict(facts)])
        keys = sorted({key for of_one in of_ranks for key in of_one})
        described = []
        for key in keys:
            others = [i for i, of_one in enumerate(of_ranks) if of_one.get(key) != of_ranks[0].get(key)]
            if others:
                values = [str(of_ranks[i].get(key))[:MAX_VALUE] for i in (0, others[0])]
                described.append(f"{key}: {values[0]} in process 0, {values[1]} in process {others[0]}")
        if described:
            raise ValueError(f"ranks disagree on {'; '.join(described)}")

    @contextmanager
    def claimed_by_main(
        self, key: str, file: Path, beside: Sequence[Path], overwrite: bool
    ) -> Iterator[None]:
        """Let the first rank claim the place of a result for all, see `runtime.output.claimed`."""
        with ExitStack() as held:

            def claim() -> None:
                held.enter_context(claimed(key, file, beside, overwrite))

            self.broadcast_from_main(claim)
            yield


ALONE = Launch()  # one process, on the CPU


def is_peer_failure(error: BaseException) -> bool:
    """Return whether an error comes from waiting for a process that is gone."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)  # gloo has no type for it
