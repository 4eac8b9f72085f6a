"""What the processes of one launch must have in common, and what one of them decides for all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import DistError

from runtime.output import claimed

T = TypeVar("T")
LONGEST_VALUE = 80


def check_same(state: PartialState, facts: Mapping[str, Any]) -> None:
    """Refuse, in all processes together, to start with facts that are not the same in all of them.

    Raises:
        ValueError: naming each fact that differs, with the values and the processes.
    """
    of_processes = gather_object([dict(facts)])
    keys = sorted({key for of_one in of_processes for key in of_one})
    differing = [key for key in keys if any(of_one.get(key) != of_processes[0].get(key) for of_one in of_processes)]
    if not differing:
        return
    described = []
    for key in differing:
        other = next(i for i, of_one in enumerate(of_processes) if of_one.get(key) != of_processes[0].get(key))
        values = [str(of_processes[i].get(key))[:LONGEST_VALUE] for i in (0, other)]
        described.append(f"{key} is {values[0]} in process 0, {values[1]} in process {other}")
    raise ValueError(f"the processes of this launch must start alike: {'; '.join(described)}")


def decided_by_first(state: PartialState, decide: Callable[[], T]) -> T:
    """Return, in all processes, what the first one decides; if it raises, all raise the same.

    Raises:
        ValueError, OSError: as the first process did.
    """
    answer: tuple[T | None, Exception | None] = (None, None)
    if state.is_main_process:
        try:
            answer = (decide(), None)
        except (ValueError, OSError) as error:
            answer = (None, error)
        except Exception as error:  # no mistake of the user's: but the others must not wait for an answer
            broadcast_object_list([(None, RuntimeError(f"process 0: {type(error).__name__}: {error}"))])
            raise
    ((decided, error),) = broadcast_object_list([answer])
    if error is not None:
        raise error
    return decided


@contextmanager
def claimed_by_first(state: PartialState, key: str, file: Path, beside: Sequence[Path], overwrite: bool) -> Iterator[None]:
    """Let the first process keep the place of a result for all, see `runtime.output.claimed`.

    Raises:
        OSError: in all processes, as the first did.
    """
    with ExitStack() as held:

        def claim() -> None:
            held.enter_context(claimed(key, file, beside, overwrite))

        decided_by_first(state, claim)
        yield


def lost_another(error: BaseException) -> bool:
    """Say whether an error is that of waiting for a process that is gone."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)  # gloo has no type for it


def say_nothing(what: object) -> None:
    """Stand where others show a message."""
