"""This process and its collective operations with the other processes of a launch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, wait_for_everyone
from torch.distributed import DistError

from runtime.output import exclusive_output

T = TypeVar("T")
MAX_VALUE = 80  # characters in a message


@dataclass(frozen=True)
class Launch:
    """One of the processes of a launch, see `runtime.machine.start_process`.

    All ranks must call the collective methods in the same order.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, state: PartialState) -> "Launch":
        """Create a launch from the state of accelerate."""
        return cls(state.process_index, state.num_processes, state.device or torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True on the first rank."""
        return self.rank == 0

    def print(self, text: str) -> None:
        """Print on the first rank only."""
        if self.is_main:
            print(text, flush=True)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.world_size > 1:
            wait_for_everyone()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the first rank before the others, even if it fails there."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks: (...) -> (world_size, ...)."""
        # The tensors must have one shape and not be empty: some backends cannot gather others.
        return cast(torch.Tensor, gather(tensor.unsqueeze(0))) if self.world_size > 1 else tensor.unsqueeze(0)

    def gather_items(self, items: list[T]) -> list[T]:
        """Collect the items of all ranks in one list."""
        return gather_object(items) if self.world_size > 1 else items

    def broadcast_from_main(self, decide: Callable[[], T]) -> T:
        """Send a result of the first rank to all; its ValueError or OSError is raised on all ranks."""
        if self.world_size == 1:
            return decide()
        answer: tuple[T | None, Exception | None] = (None, None)
        if self.is_main:
            try:
                answer = (decide(), None)
            except (ValueError, OSError) as error:
                answer = (None, error)
            except Exception as error:  # a bug: the other ranks must not wait
                broadcast_object_list([(None, RuntimeError(f"process 0: {type(error).__name__}: {error}"))])
                raise
        ((decided, error),) = broadcast_object_list([answer])
        if error is not None:
            raise error
        return cast(T, decided)

    def assert_ranks_agree(self, facts: Mapping[str, Any]) -> None:
        """Raise a ValueError on all ranks that names the facts in which they differ."""
        all_facts = self.gather_items([dict(facts)])
        differences = []
        for key in sorted(set().union(*all_facts)):
            values = [of_rank.get(key) for of_rank in all_facts]
            if other := next((i for i, value in enumerate(values) if value != values[0]), 0):
                first, second = (str(value)[:MAX_VALUE] for value in (values[0], values[other]))
                differences.append(f"{key}: {first} in process 0, {second} in process {other}")
        if differences:
            raise ValueError(f"ranks disagree on {'; '.join(differences)}")

    @contextmanager
    def exclusive_output(self, file: Path, others: Sequence[Path], overwrite: bool) -> Iterator[None]:
        """Lock the file of a result on the first rank for all, see `runtime.output.exclusive_output`."""
        with ExitStack() as stack:
            self.broadcast_from_main(lambda: stack.enter_context(exclusive_output(file, others, overwrite)))
            yield


ALONE = Launch()  # one process, on the CPU


def is_peer_failure(error: BaseException) -> bool:
    """True if an error comes from waiting for a process that has ended."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)  # gloo has no error type
