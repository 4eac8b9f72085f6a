"""Adapters describe a transformer to `attach`: its lists of blocks, and the arguments indexed by token.

Shapes: N samples, T tokens that may bypass, P prefix tokens before them (text), S suffix tokens after them
(reference images), K tokens kept by a route, D channels. Prefix and suffix tokens are never routed and do not
count in the ratio.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from routing.tokens import gather_tokens, with_prefix

Arguments = Mapping[str, Any]  # the arguments of a forward call by name, without defaults


@dataclass(frozen=True)
class TokenSelection:
    """The tokens that stay in a window. The methods gather them from tensors that are indexed by token.

    Args:
        ids: (N, K + S) positions in the T + S tokens.
        num_tokens: T + S.
        num_prefix_tokens: P.
    """

    ids: torch.Tensor
    num_tokens: int
    num_prefix_tokens: int

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather each sample's kept tokens: (N or 1, ..., T + S, ...) -> (N, ..., K + S, ...)."""
        return self._gather(x, self.ids, dim, self.num_tokens)

    def gather_joint(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Like `gather`, with a prefix: (N or 1, ..., P + T + S, ...) -> (N, ..., P + K + S, ...)."""
        P = self.num_prefix_tokens
        return self._gather(x, with_prefix(self.ids, P), dim, P + self.num_tokens)

    def gather_between(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Like `gather_joint`, with Q text tokens at the end: (N or 1, ..., P + T + S + Q, ...) ->
        (N, ..., P + K + S + Q, ...).
        """
        P = self.num_prefix_tokens
        others = torch.arange(P + self.num_tokens, x.shape[dim], device=self.ids.device)
        ids = [with_prefix(self.ids, P), others.expand(self.ids.shape[0], -1)]
        return self._gather(x, torch.cat(ids, dim=1), dim, x.shape[dim])

    def _gather(self, x: torch.Tensor, ids: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        if x.shape[dim] != length or x.shape[0] not in (1, ids.shape[0]):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} cannot be gathered by token along dimension {dim}: "
                f"this dimension must have {length} tokens, the first 1 or {ids.shape[0]} samples"
            )
        return gather_tokens(x, ids, dim)


@dataclass(frozen=True)
class BlockList:
    """A list of blocks and the roles of their arguments. Arguments that are not named here must be None.

    Args:
        name: path of the list in the model, such as `blocks` or `encoder.layers`.
        tokens: name of the argument that holds the tokens, (N, T + S, D).
        joint: True if `tokens` contains the prefix: (N, P + T + S, D).
        output: index of the tokens in the tuple that a block returns; None: a block returns a tensor.
        by_token: a function for each argument indexed by token: `lambda mask, kept: kept.gather(mask)`.
        shared: names of arguments that do not depend on the token. Blocks need not take all of them.
        sequence_first: True if blocks take and return the tokens as (T + S, N, D).
        num_suffix_tokens: function that returns S of this list; None: the adapter's.
    """

    name: str
    tokens: str = "hidden_states"
    joint: bool = False
    output: int | None = None
    by_token: Mapping[str, Callable[[Any, TokenSelection], Any]] = field(default_factory=dict)
    shared: Sequence[str] = ()
    sequence_first: bool = False
    num_suffix_tokens: Callable[[Any, Arguments], int] | None = None

    def blocks(self, model: nn.Module) -> Any:
        return model.get_submodule(self.name)

    def batch_first(self, x: torch.Tensor) -> torch.Tensor:
        """Swap the first two dimensions if the list is sequence-first. The function is its own inverse."""
        return x.transpose(0, 1) if self.sequence_first else x

    def tokens_of(self, output: Any) -> torch.Tensor:
        """Return the tokens in the output of a block, samples first."""
        return self.batch_first(output if self.output is None else output[self.output])

    def with_tokens(self, output: Any, x: torch.Tensor) -> Any:
        """Replace the tokens in the output of a block by x, samples first."""
        x = self.batch_first(x)
        return x if self.output is None else (*output[: self.output], x, *output[self.output + 1 :])


def plain_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a class without routes."""
    return getattr(kind, "plain_forward", kind.forward)


def _zero(model: nn.Module, arguments: Arguments) -> int:
    return 0


@dataclass(frozen=True)
class Adapter:
    """Description of a transformer for `attach`. Functions take the model and the arguments of its forward.

    Args:
        block_lists: lists of blocks, in the order in which layers are counted; or a single BlockList.
        accepts: arguments of the model's forward that are supported with routing. All others must keep their
            defaults. List `routing` and `generator` if the model has these arguments itself: `attach` then
            passes the generator on, but not the routing.
        num_prefix_tokens: function that returns P.
        num_suffix_tokens: function that returns S.
        residuals: arguments that hold a sequence of tensors (N or 1, T + S, D), of which the model adds one
            to the tokens after each block (ControlNet). The residual after the last block of a window is
            added to the kept tokens alone, like the ones within the window.
        check: function that raises ValueError for a model or arguments that cannot be routed.
        whole_between_blocks: True if the model cuts the sequence between blocks at positions that it computed
            for all tokens. Bypassing tokens are then put back after every block of a window.
        one_subset: True if samples share positions or modulation. All keep the tokens that the router chooses
            for the first one, and masks and noise are (1, T).
    """

    block_lists: Sequence[BlockList] | Any  # __post_init__ wraps a single BlockList in a tuple
    accepts: Sequence[str] = ()
    num_prefix_tokens: Callable[[Any, Arguments], int] = _zero
    num_suffix_tokens: Callable[[Any, Arguments], int] = _zero
    residuals: Sequence[str] = ()
    check: Callable[[Any, Arguments], None] = lambda model, arguments: None
    whole_between_blocks: bool = False
    one_subset: bool = False

    def __post_init__(self) -> None:
        lists = (self.block_lists,) if isinstance(self.block_lists, BlockList) else self.block_lists
        object.__setattr__(self, "block_lists", lists)
        if self.num_prefix_tokens is _zero and any(spec.joint for spec in lists):
            raise ValueError("joint=True needs num_prefix_tokens, or the prefix would be routed too")

    def num_suffix_tokens_of(self, model: nn.Module, arguments: Arguments) -> dict[str, int]:
        """Return S of each list of blocks, by its name."""
        S = self.num_suffix_tokens(model, arguments)
        counts = {spec.name: spec.num_suffix_tokens for spec in self.block_lists}
        return {name: S if count is None else count(model, arguments) for name, count in counts.items()}
