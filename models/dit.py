"""Diffusion transformer [DiT] whose tokens may bypass windows of blocks while it trains [TREAD].

Module names are as in the public DiT, SiT and TREAD checkpoints, which load by name. Two things differ on
purpose: in `eval()` mode the network routes only if it is given a `routing`, and the label table always has a
row for the null class.

Shapes: N samples, C channels, H = W = input_size, T tokens of the image, P prefix tokens, L = P + T, K tokens
kept by a route, D channels of a token, S tokens of a caption.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from timm.layers import PatchEmbed
from torch.utils.checkpoint import checkpoint

from models.backbone import Backbone, Flops
from models.blocks import DiTBlock, FinalLayer
from models.layers import (
    Attention,
    LabelEmbedder,
    TimestepEmbedder,
    drop_labels,
    linear_flops,
    sincos_position_table,
)
from models.rejoin import Bypass
from models.text import TextAttention, TextEmbedder, TextShape, mean_token
from models.wide_head import WideHead
from routing import (
    Route,
    Router,
    Routing,
    end_route,
    gather_tokens,
    num_tokens_kept,
    other_tokens,
    random_router,
    resolve_routes,
    start_route,
    with_prefix,
)
from runtime.errors import check_choice, check_index, check_not_negative, check_positive

MAX_DEPTH = 1000  # so that a configuration from outside cannot take all memory
Inputs = tuple[Any, ...]  # arguments of a block after x: c, positions, then bias and text of a caption


class _Sequence(NamedTuple):
    """Tokens that pass blocks together."""

    x: torch.Tensor  # (N, K, D)
    ids: torch.Tensor | None  # (N, K) their positions; None: all tokens
    inputs: Inputs


def _merge(sequences: Sequence[_Sequence], original: torch.Tensor) -> torch.Tensor:
    """Put the tokens of sequences into the sequence before the window, `original` (N, L, D)."""
    for x, ids, _ in sequences:
        original = x if ids is None else end_route(x, ids, original)
    return original


def _processed(sequences: Sequence[_Sequence], original: torch.Tensor) -> torch.Tensor | None:
    """Return a bool mask (N, L) of the tokens that a block processes; None: all."""
    processed = torch.zeros(original.shape[:2], device=original.device)
    for _, ids, _ in sequences:
        if ids is None or len(sequences) > 1:
            return None
        processed = processed.scatter(1, ids, 1.0)
    return processed.bool()


class DiT(Backbone):
    """Diffusion transformer with optional token routes.

    Args:
        input_size: height and width of the latent.
        num_classes: number of classes; 0: an unconditional network.
        class_dropout_prob: probability that training replaces a label by the null class, or a caption by
            the empty one.
        conditioning: `class`: the embedding of the class is added to the noise level's, which modulates the
            blocks. `prefix`: the tokens of a caption come before the image's and never bypass. `cross`: image
            tokens attend to them in each block.
        text: shape of the captions, for `prefix` and `cross`.
        pool_text: also add the mean of a caption's tokens to the embedding of the noise level [SD3].
        learn_sigma: output 2C channels, as public DiT and SiT checkpoints do.
        init: `adaln_zero`: every block starts as the identity and the output at zero [DiT]; `xavier`: the
            initialisation of the public TREAD code, which overwrites these zeros.
        block: class of the blocks, see `models/blocks.py`.
        attention: attention backend, see `models.layers.Attention`.
        num_prefix_tokens: number of learned tokens before the image tokens; they take part in attention and
            never bypass.
        routes: windows of blocks that some of the tokens bypass; (): a plain DiT.
        router: selects the kept tokens, see `routing/routers`.
        rejoin: rejoin(pos_embed) builds the module that puts the tokens back, see `models/rejoin`.
        window: what happens to bypassing tokens. `bypass`: they leave the window. `context`, an ablation:
            they stay in it as context, and get their earlier state back at its end, so that the step is not
            cheaper. `separate`, an ablation: they pass it as a second sequence, and the two cannot see each
            other, so that only attention is cheaper.
        fp32_after_route: run the block after each route outside autocast, as the public TREAD code does.
        gradient_checkpointing: recompute each block in the backward pass: less memory, one more forward.
        inner_head: index of a block after which a second final layer predicts F_x, too, for
            `guidance=internal`. None: no second prediction.
        head_width, head_depth, head_num_heads: a wide head between the blocks and the final layer, see
            `models/wide_head.py`; head_width=None: none.

    Raises:
        ValueError: if sizes do not divide, a choice is unknown, or a route is invalid.
    """

    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        class_dropout_prob: float = 0.1,
        conditioning: str = "class",
        text: TextShape | None = None,
        pool_text: bool = False,
        learn_sigma: bool = False,
        init: str = "adaln_zero",
        block: type[DiTBlock] = DiTBlock,
        attention: str = "auto",
        num_prefix_tokens: int = 0,
        routes: Sequence[Route] = (),
        router: Router = random_router,
        rejoin: Callable[[torch.Tensor], nn.Module] = Bypass,
        window: str = "bypass",
        fp32_after_route: bool = False,
        gradient_checkpointing: bool = False,
        inner_head: int | None = None,
        head_width: int | None = None,
        head_depth: int = 2,
        head_num_heads: int = 16,
    ):
        super().__init__()
        sizes = {"input_size": input_size, "patch_size": patch_size, "in_channels": in_channels}
        sizes |= {"hidden_size": hidden_size, "depth": depth, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
        sizes |= {"head_depth": head_depth, "head_num_heads": head_num_heads}
        for name, size in sizes.items():
            check_positive(f"model.{name}", size)
            if name.endswith("depth") and size > MAX_DEPTH:
                raise ValueError(f"model.{name}={size} must be at most {MAX_DEPTH}")
        check_not_negative("model.num_classes", num_classes)
        check_not_negative("model.num_prefix_tokens", num_prefix_tokens)
        if input_size % patch_size:
            raise ValueError(f"model.patch_size={patch_size} must divide model.input_size={input_size}")
        if hidden_size % num_heads:
            raise ValueError(f"model.num_heads={num_heads} must divide model.hidden_size={hidden_size}")
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"model.class_dropout_prob={class_dropout_prob} must be in [0, 1)")
        check_choice("model.init", init, ("adaln_zero", "xavier"))
        check_choice("model.attention", attention, ("auto", "sdpa", "explicit"))
        check_choice("model.window", window, ("bypass", "context", "separate"))
        check_choice("model.conditioning", conditioning, ("class", "prefix", "cross"))
        if conditioning != "class" and text is None:
            raise ValueError(f"model/conditioning={conditioning} needs data with captions (data/README.md)")
        text = None if conditioning == "class" else text
        text_embedder = None if text is None else TextEmbedder(text, hidden_size)
        num_text_tokens = 0 if text_embedder is None else text_embedder.num_tokens
        num_learned = num_prefix_tokens
        num_prefix_tokens += num_text_tokens if conditioning == "prefix" else 0
        if num_prefix_tokens and (window == "separate" or not block.allows_prefix):
            rule = "must be 0, and model/conditioning not prefix, with model.window=separate or "
            raise ValueError(f"model.num_prefix_tokens={num_prefix_tokens} {rule}model/block=self_logit")
        if window == "separate" and rejoin is not Bypass:
            raise ValueError("model.window=separate must have model/rejoin=bypass")
        if inner_head is not None:
            check_index("model.inner_head", inner_head, depth)
        if head_width is not None and (head_width <= 0 or head_width % head_num_heads):
            rule = f"a multiple of model.head_num_heads={head_num_heads}, or null"
            raise ValueError(f"model.head_width={head_width} must be {rule}")
        self.inner_head, self.projector_block, self.projector = inner_head, None, None
        self.patch_size, self.in_channels = patch_size, in_channels
        self.latent_shape = (in_channels, input_size, input_size)
        self.num_classes, self.text, self.pool_text = num_classes, text, pool_text
        self.class_dropout_prob = class_dropout_prob
        self.num_prefix_tokens = num_prefix_tokens
        self.routes, self.router, self.window = resolve_routes(routes, depth), router, window
        self.fp32_after_route, self.gradient_checkpointing = fp32_after_route, gradient_checkpointing

        out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid_size = input_size // patch_size
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size)
        self.num_tokens = T = self.x_embedder.num_patches
        for route in self.routes:
            ratio = route.selection_ratio
            if ratio and num_tokens_kept(T, ratio) == T:
                raise ValueError(f"selection_ratio={ratio} lets none of {T} tokens bypass: raise it")
        self.t_embedder = TimestepEmbedder(hidden_size)
        has_labels = num_classes and text is None
        self.y_embedder = LabelEmbedder(num_classes, hidden_size) if has_labels else None
        self.text_embedder, self.text_is_prefix = text_embedder, conditioning == "prefix"
        self.prefix = nn.Parameter(torch.empty(1, num_learned, hidden_size)) if num_learned else None
        pos_embed = positions = None
        if block.has_position_table:
            pos_embed = nn.Buffer(sincos_position_table(hidden_size, self.grid_size)[None])  # (1, T, D)
        if block.positions is not None:
            positions = block.positions(hidden_size // num_heads, self.grid_size, num_prefix_tokens)
            positions = nn.Buffer(positions.unsqueeze(0), persistent=False)  # (1, L, ...)
        self.pos_embed, self.positions = pos_embed, positions
        self.blocks: Sequence[DiTBlock] = nn.ModuleList(  # pyright: ignore (torch cannot type its items)
            block(hidden_size, num_heads, mlp_ratio, attention, self.num_tokens) for _ in range(depth)
        )
        if conditioning == "prefix" and not isinstance(self.blocks[0].attn, Attention):
            raise ValueError("model/conditioning=prefix needs a block with attention, which can mask padding")
        if conditioning == "cross":
            for layer in self.blocks:
                layer.cross = TextAttention(hidden_size, num_heads, attention, num_text_tokens)
        added = torch.zeros(1, num_prefix_tokens + self.num_tokens, hidden_size)  # (1, L, D)
        if pos_embed is not None:
            added[:, num_prefix_tokens:] = pos_embed
        self.rejoins = nn.ModuleList(rejoin(added) for _ in self.routes)
        self.hidden_size, width, self.head = hidden_size, head_width or hidden_size, None
        if head_width is not None:
            sizes = (hidden_size, head_width, head_depth, head_num_heads, mlp_ratio, attention)
            self.head = WideHead(block, *sizes, input_size, patch_size, in_channels)
        final = partial(FinalLayer, patch_size=patch_size, out_channels=out_channels)
        self.final_layer = final(block.final_norm(width), width)
        self.inner_layer = None if inner_head is None else final(block.final_norm(hidden_size), hidden_size)
        self._initialize_weights(zero=init == "adaln_zero")

    def _initialize_weights(self, zero: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.get_parameter("bias"))
        for part in (self, self.head) if self.head is not None else (self,):
            # The patch projection is a linear map per patch, so it is initialised as one.
            projection = part.x_embedder.proj
            nn.init.xavier_uniform_(projection.weight.view(projection.weight.shape[0], -1))
            nn.init.zeros_(projection.get_parameter("bias"))
        if self.y_embedder is not None:
            nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)
        for block in self.blocks:
            if block.cross is not None:
                nn.init.zeros_(block.cross.proj.weight)
        nn.init.normal_(self.t_embedder.mlp.get_parameter("0.weight"), std=0.02)
        nn.init.normal_(self.t_embedder.mlp.get_parameter("2.weight"), std=0.02)
        if zero:
            # Every block starts as the identity, and the network starts at F_x = 0.
            finals = [layer for layer in (self.final_layer, self.inner_layer) if layer is not None]
            for part in (*self.units, *finals):
                nn.init.zeros_(part.get_parameter("adaLN_modulation.1.weight"))
            for layer in finals:
                nn.init.zeros_(layer.linear.weight)

    @property
    def units(self) -> Sequence[nn.Module]:
        return (*self.blocks, *(() if self.head is None else self.head.blocks))

    def add_projector(self, build: Callable[[int], nn.Module], block: int, target_flops: int = 0) -> None:
        """See `Backbone`. Tokens that bypass the block are read as they entered the window."""
        self.projector, self.projector_block = build(self.hidden_size), block
        self.target_flops = target_flops

    def forward(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        routing: Routing | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return F_x (N, C or 2C, H, W); with `inner_head`, return F_x and the inner prediction.

        Args:
            x: (N, C, H, W) scaled noisy latents.
            c_noise: noise conditioning, (N,), or (N, L) if it differs from token to token.
            class_labels: (N,) int64 in [0, num_classes], where num_classes is the null class, or captions,
                see `TextShape`; None if and only if the network is unconditional.
            routing: None: each route's `selection_ratio` in `train()` mode, dense in `eval()` mode.
            generator: used for class dropout, then for each route's tokens and the draws of its rejoin.
        """
        routing = Routing() if routing is None else routing
        ratios = routing.ratios(self.routes, active=self.training)
        starts = {route.start_layer_idx: i for i, route in enumerate(self.routes)}
        ends = {route.end_layer_idx: i for i, route in enumerate(self.routes)}
        P = self.num_prefix_tokens

        labels = self._labels(class_labels, generator)
        text, bias = (None, None) if self.text_embedder is None else self.text_embedder(labels)  # (N, S, D)
        latents, x = x, self._embed(x, text)  # (N, L, D)
        t = self.t_embedder(c_noise)  # (N, D) or (N, L, D)
        t = t.unsqueeze(1) if t.dim() == 2 else t  # (N, 1 or L, D)
        c = t if self.y_embedder is None else t + self.y_embedder(labels).unsqueeze(1)  # (N, 1 or L, D)
        if self.pool_text and text is not None and bias is not None:
            c = t + mean_token(text, bias)  # (N, 1 or L, D)
        caption = () if bias is None else (bias,) if self.text_is_prefix else (bias, text)
        inputs = (c, self.positions, *caption)
        # One sequence outside windows; in a window also two (window=separate), or none if it is skipped.
        sequences, original, ids_keep = [_Sequence(x, None, inputs)], x, None
        after_route, inner, self.projected = False, None, None
        for idx, block in enumerate(self.blocks):
            if (i := starts.get(idx)) is not None:
                original, ids_keep = sequences[0].x, None
                if 0 < ratios[i] < 1:
                    ids_keep = routing.ids_keep(i, ratios[i], original[:, P:], self.router, generator)
                    ids_keep = with_prefix(ids_keep, P)  # (N, P + K)
                sequences = [] if ratios[i] == 1 else self._split(original, ids_keep, inputs)
            fp32 = after_route and self.fp32_after_route
            sequences = [s._replace(x=self._run(block, s.x, *s.inputs, fp32=fp32)) for s in sequences]
            after_route = False
            if idx in (self.inner_head, self.projector_block):
                tokens = _merge(sequences, original)[:, P:]  # (N, T, D)
                inner = tokens if idx == self.inner_head else inner
                if self.training and self.projector is not None and idx == self.projector_block:
                    processed = _processed(sequences, original)
                    self.projected = self.projector(tokens), None if processed is None else processed[:, P:]
            if (i := ends.get(idx)) is not None:
                after_route, routed = ids_keep is not None, sequences[0].x if sequences else None
                if self.window == "context" and ids_keep is not None:
                    routed = start_route(sequences[0].x, ids_keep)  # (N, P + K, D)
                original = _merge(sequences[1:], original)  # (N, L, D)
                x = self.rejoins[i](routed, ids_keep, original, generator)  # (N, L, D)
                sequences = [_Sequence(x, None, inputs)]
        x = sequences[0].x
        x, c, t = x[:, P:], *(z[:, P:] if z.shape[1] > 1 else z for z in (c, t))
        last = (x, c) if self.head is None else self.head(latents, x, t, partial(self._run, fp32=False))
        F_x = self._unpatchify(self.final_layer(*last))  # (N, C or 2C, H, W)
        if inner is None or self.inner_layer is None:
            return F_x
        return F_x, self._unpatchify(self.inner_layer(inner, c))

    def flops(self, num_kept: Sequence[int]) -> Flops:
        T, P = self.num_tokens, self.num_prefix_tokens
        lengths = [[P + T]] * len(self.blocks)  # of the sequences of each block
        for route, kept in zip(self.routes, num_kept, strict=True):
            sequences = [P + kept, *([T - kept] if self.window == "separate" and kept < T else [])]
            for idx in range(route.start_layer_idx, route.end_layer_idx + 1):
                if self.window != "context" or kept == 0:  # 0: the window is skipped
                    lengths[idx] = sequences if kept else []
        blocks = [sum(map(block.flops, sizes)) for block, sizes in zip(self.blocks, lengths, strict=True)]
        rejoins = (P + T) * linear_flops(self.rejoins)
        first = 2 * T * self.x_embedder.proj.weight.numel() + linear_flops(self.t_embedder.mlp[0])
        last = 0
        for layer in (self.final_layer, self.inner_layer):
            if layer is not None:
                modulations = T if self.head is not None and layer is self.final_layer else 1
                last += T * linear_flops(layer.linear) + modulations * linear_flops(layer.adaLN_modulation)
        head_flops = 0 if self.head is None else self.head.block_flops(T)
        if self.head is not None:
            last += T * self.head.embedding_flops + head_flops
        text = 0 if self.text_embedder is None else self.text_embedder.flops()
        forward = first + text + linear_flops(self.t_embedder.mlp[2]) + sum(blocks) + rejoins + last
        # Backward: a forward each for gradients of weights and of inputs, which the first layers do not need.
        recomputed = sum(blocks) + head_flops if self.gradient_checkpointing else 0
        training = 3 * forward - first + recomputed
        if self.projector is not None:
            training += 3 * T * linear_flops(self.projector) + self.target_flops
        after = [r.end_layer_idx + 1 for r, kept in zip(self.routes, num_kept, strict=True) if kept < T]
        fp32 = sum(blocks[idx] for idx in after if idx < len(blocks)) if self.fp32_after_route else 0
        return Flops(forward, training, (4 if self.gradient_checkpointing else 3) * fp32)

    def _split(self, x: torch.Tensor, ids_keep: torch.Tensor | None, inputs: Inputs) -> list[_Sequence]:
        """Return the sequences of a window, from x (N, L, D) and the positions that a route keeps."""
        if ids_keep is None or self.window == "context":
            return [_Sequence(x, None, inputs)]
        parts = [ids_keep]
        if self.window == "separate" and ids_keep.shape[1] < x.shape[1]:
            parts.append(other_tokens(ids_keep, x.shape[1]))  # (N, T - K)
        sequences, (c, positions, *caption) = [], inputs
        for ids in parts:
            part_c = c if c.shape[1] == 1 else gather_tokens(c, ids)
            part_positions = None if positions is None else gather_tokens(positions, ids)
            sequences.append(_Sequence(start_route(x, ids), ids, (part_c, part_positions, *caption)))
        return sequences

    def _embed(self, x: torch.Tensor, text: torch.Tensor | None = None) -> torch.Tensor:
        # fp32: autocast must not make the residual stream bf16. Contiguous: the patches are a transposed view
        # that would slow down every dense block.
        x = self.x_embedder(x).to(self.x_embedder.proj.weight.dtype).contiguous()
        if self.pos_embed is not None:
            x = x + self.pos_embed  # (N, T, D)
        if self.prefix is not None:
            x = torch.cat([self.prefix.expand(x.shape[0], -1, -1), x], dim=1)  # (N, L, D)
        if text is not None and self.text_is_prefix:
            x = torch.cat([text, x], dim=1)  # (N, L, D)
        return x

    def _labels(self, labels: torch.Tensor | None, generator: torch.Generator | None) -> torch.Tensor | None:
        """Check the labels, and replace some by the null class, or the empty caption, in `train()` mode."""
        is_unconditional = self.y_embedder is None and self.text is None
        if (labels is None) != is_unconditional:
            rule = "None" if is_unconditional else "given"
            what = f"model.num_classes={self.num_classes}" if self.text is None else "a network with captions"
            raise ValueError(f"class_labels must be {rule} for {what}")
        if labels is None or not self.training or not self.class_dropout_prob:
            return labels
        null_label = self.num_classes if self.text is None else 0
        return drop_labels(labels, null_label, self.class_dropout_prob, generator)

    def _run(
        self,
        block: nn.Module,
        x: torch.Tensor,
        c: torch.Tensor,
        positions: torch.Tensor | None,
        *caption: torch.Tensor,
        fp32: bool,
    ) -> torch.Tensor:
        # PARITY: the public TREAD code turns autocast off in the block after each route and gives no reason.
        with torch.autocast(x.device.type, enabled=False) if fp32 else nullcontext():
            arguments = (*((x.float(), c.float()) if fp32 else (x, c)), positions, *caption)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                # Blocks draw no random numbers: the kept tokens are already selected.
                return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            return block(*arguments)

    def _unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        p, grid = self.patch_size, self.grid_size
        x = x.reshape(x.shape[0], grid, grid, p, p, -1)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, grid * p, grid * p)
