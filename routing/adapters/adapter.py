"""What `attach` must know of a transformer from elsewhere: its blocks, and what is indexed by token.

Shapes: N samples, T tokens that may bypass, P prefix tokens before them (text), S suffix tokens after them
(reference images), K tokens kept by a route, D channels. P and S tokens are never routed and count in no
ratio.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from routing.tokens import gather_tokens, with_prefix

Arguments = Mapping[str, Any]  # of a forward, by name; those that were not given are missing


@contextmanager
def named(name: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the name of an argument."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class TokenSelection:
    """The tokens that stay in a window; gathers whatever is indexed by token.

    Args:
        ids: (N, K + S) positions among the T + S tokens.
        num_tokens: T + S.
        num_prefix_tokens: P.
    """

    ids: torch.Tensor
    num_tokens: int
    num_prefix_tokens: int

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Take each sample's kept tokens: (N or 1, ..., T + S, ...) -> (N, ..., K + S, ...)."""
        return self._gather(x, self.ids, dim, self.num_tokens)

    def gather_joint(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The same for a prefix and its tokens: (N or 1, ..., P + T + S, ...) -> (N, ..., P + K + S, ...)."""
        P = self.num_prefix_tokens
        return self._gather(x, with_prefix(self.ids, P), dim, P + self.num_tokens)

    def gather_between(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The same for a prefix, its tokens, and others behind them, Q of text: (N or 1, ..., P + T + S + Q,
        ...) -> (N, ..., P + K + S + Q, ...).
        """
        P = self.num_prefix_tokens
        others = torch.arange(P + self.num_tokens, x.shape[dim], device=self.ids.device)
        ids = [with_prefix(self.ids, P), others.expand(self.ids.shape[0], -1)]
        return self._gather(x, torch.cat(ids, dim=1), dim, x.shape[dim])

    def _gather(self, x: torch.Tensor, ids: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        if x.shape[dim] != length or x.shape[0] not in (1, ids.shape[0]):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} cannot be gathered by token along dimension {dim}: "
                f"it must have {length} tokens there, and 1 or {ids.shape[0]} samples first"
            )
        return gather_tokens(x, ids, dim)


@dataclass(frozen=True)
class BlockList:
    """A list of blocks, and what the arguments of each are. An argument that is not named must be None.

    Args:
        name: where the list is: `blocks`, or `encoder.layers`.
        tokens: the argument with the tokens, (N, T + S, D).
        joint: `tokens` has the prefix, too: (N, P + T + S, D).
        output: at which place of a tuple a block returns the tokens; None where it returns a tensor.
        by_token: gathers each argument that is indexed by token: `lambda mask, kept: kept.gather(mask)`.
        shared: arguments that do not depend on the token, if the block takes them.
        sequence_first: blocks take and return the tokens as (T + S, N, D).
        num_suffix_tokens: returns S of this list; None where it is that of the adapter.
    """

    name: str
    tokens: str = "hidden_states"
    joint: bool = False
    output: int | None = None
    by_token: Mapping[str, Callable[[Any, TokenSelection], Any]] = field(default_factory=dict)
    shared: Sequence[str] = ()
    sequence_first: bool = False
    num_suffix_tokens: Callable[[Any, Arguments], int] | None = None

    def of(self, model: nn.Module) -> Any:
        """Return the list of blocks in a model."""
        return model.get_submodule(self.name)

    def batch_first(self, x: torch.Tensor) -> torch.Tensor:
        """Swap samples and tokens of a sequence-first list; its own inverse."""
        return x.transpose(0, 1) if self.sequence_first else x

    def tokens_of(self, output: Any) -> torch.Tensor:
        """Return the tokens in what a block returns, samples first."""
        return self.batch_first(output if self.output is None else output[self.output])

    def with_tokens(self, output: Any, x: torch.Tensor) -> Any:
        """Replace the tokens in the output of a block by x, samples first."""
        x = self.batch_first(x)
        return x if self.output is None else (*output[: self.output], x, *output[self.output + 1 :])

    def gather(self, arguments: Arguments, kept: TokenSelection, block: str) -> dict[str, Any]:
        """Return the arguments of a block, those that are indexed by token for the kept ones.

        Args:
            block: what errors call it.
        """
        given = {key: arguments[key] for key in self.by_token if arguments.get(key) is not None}
        gathered = {}
        for key, value in given.items():
            with named(f"{key} of {block}"):
                gathered[key] = self.by_token[key](value, kept)
        return {**arguments, **gathered}


def plain_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a class as it was before it got routes."""
    return getattr(kind, "plain_forward", kind.forward)


def _zero(model: nn.Module, arguments: Arguments) -> int:
    return 0


@dataclass(frozen=True)
class Adapter:
    """A transformer, as far as routing goes. Functions get the model and the arguments of its forward.

    Args:
        block_lists: in the order in which layers are counted; one alone is a tuple of one.
        accepts: arguments of the model's forward that go together with routing. Any other must keep its
            default. Where `routing` and `generator` are among them, the model knows these words itself: it is
            given the generator, and no routing.
        num_prefix_tokens: returns P.
        num_suffix_tokens: returns S.
        residuals: arguments with a sequence of tensors (N or 1, T + S, D), of which the model adds one to the
            tokens after each block (ControlNet). That of a window's last block reaches the kept tokens alone,
            like those before.
        check: raises ValueError for what cannot be routed.
        whole_between_blocks: the model cuts the sequence between blocks at places that it counted before:
            tokens that bypass are put back after each block of a window.
    """

    block_lists: Sequence[BlockList] | Any  # one alone is no sequence until it is made a tuple
    accepts: Sequence[str] = ()
    num_prefix_tokens: Callable[[Any, Arguments], int] = _zero
    num_suffix_tokens: Callable[[Any, Arguments], int] = _zero
    residuals: Sequence[str] = ()
    check: Callable[[Any, Arguments], None] = lambda model, arguments: None
    whole_between_blocks: bool = False

    def __post_init__(self) -> None:
        lists = (self.block_lists,) if isinstance(self.block_lists, BlockList) else self.block_lists
        object.__setattr__(self, "block_lists", lists)
        if self.num_prefix_tokens is _zero and any(spec.joint for spec in lists):
            raise ValueError("joint=True needs num_prefix_tokens: the prefix would be routed with the image")

    def num_suffix_tokens_of(self, model: nn.Module, arguments: Arguments) -> dict[str, int]:
        """Return S of each list of blocks, by its name."""
        S = self.num_suffix_tokens(model, arguments)
        own = {spec.name: spec.num_suffix_tokens for spec in self.block_lists}
        return {name: S if count is None else count(model, arguments) for name, count in own.items()}
