"""Networks of public code, written from their papers; the project's networks must agree with them."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEADS, PATCH, CHANNELS, SIDE, CLASSES = 384, 6, 2, 4, 8, 10
SWITCHES = ("RoPE", "SwiGLU", "RMSNorm")  # of LightningDiT


def linear_after_silu(width, size):
    return nn.Sequential(nn.SiLU(), nn.Linear(width, size))


class PublicNetwork(nn.Module):
    """What the networks share, with the names of public checkpoints.

    Args:
        switches: options of the blocks of LightningDiT, and QKNorm of SPRINT.
        num_rows: of the table of labels; the last is the null class, where it was trained.
    """

    def __init__(self, out, switches=(), num_rows=CLASSES + 1, width=WIDTH, heads=HEADS):
        super().__init__()
        D, self.heads, self.switches = width, heads, switches
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(num_rows, D)})
        last = {"norm_final": nn.RMSNorm(D)} if "RMSNorm" in switches else {}
        last |= {"linear": nn.Linear(D, PATCH**2 * out), "adaLN_modulation": linear_after_silu(D, 2 * D)}
        self.final_layer = nn.ModuleDict(last)

    def stack(self, depth, D):
        return nn.ModuleList(self.block(D) for _ in range(depth))

    def block(self, D):
        attn = {"qkv": nn.Linear(D, 3 * D), "proj": nn.Linear(D, D)}
        if "QKNorm" in self.switches:
            attn |= {name: nn.RMSNorm(D // self.heads) for name in ("q_norm", "k_norm")}
        mlp = {"fc1": nn.Linear(D, 4 * D), "fc2": nn.Linear(4 * D, D)}
        if "SwiGLU" in self.switches:
            mlp = {"w12": nn.Linear(D, 2 * (8 * D // 3)), "w3": nn.Linear(8 * D // 3, D)}
        norms = {name: nn.RMSNorm(D) for name in ("norm1", "norm2") if "RMSNorm" in self.switches}
        parts = {"attn": nn.ModuleDict(attn), "mlp": nn.ModuleDict(mlp)}
        return nn.ModuleDict({**parts, **norms, "adaLN_modulation": linear_after_silu(D, 6 * D)})

    @staticmethod
    def angles(ids, side, d):  # (..., d / 2): half of the pairs of a head by the row, half by the column
        speed = 10000.0 ** -torch.arange(0, 1, 4 / d)
        return torch.cat([(ids // side)[..., None] * speed, (ids % side)[..., None] * speed], dim=-1)

    def turned(self, q, ids, side):  # (N, L, H, d), pair by pair
        pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
        angles = self.angles(ids, side, q.shape[-1])[..., None, :]
        return torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)).flatten(-2)

    def mlp(self, mlp, h):
        if "SwiGLU" not in self.switches:
            return mlp["fc2"](F.gelu(mlp["fc1"](h), approximate="tanh"))
        gated, value = mlp["w12"](h).chunk(2, dim=-1)
        return mlp["w3"](F.silu(gated) * value)

    @staticmethod
    def rms(h, weight):
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def norm(self, parts, name, h):
        if "RMSNorm" in self.switches:
            return self.rms(h, parts[name].weight)
        return F.layer_norm(h, h.shape[-1:], eps=1e-6)

    def condition(self, t, y):
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
        c = self.t_embedder["mlp"](torch.cat([angles.cos(), angles.sin()], dim=1))
        return c + self.y_embedder["embedding_table"](y)

    def run(self, blocks, h, c, ids, side):
        """Blocks on tokens at `ids` (L,) or (N, L) of a square of `side`."""
        N, L, D = h.shape
        for block in blocks:
            a, b, gate, e, f, gate2 = block["adaLN_modulation"](c)[:, None].chunk(6, dim=2)
            attn, inner = block["attn"], self.norm(block, "norm1", h) * (1 + b) + a
            q, k, v = attn["qkv"](inner).view(N, L, 3, self.heads, -1).unbind(2)
            if "QKNorm" in self.switches:
                q, k = self.rms(q, attn["q_norm"].weight), self.rms(k, attn["k_norm"].weight)
            if "RoPE" in self.switches:
                q, k = self.turned(q, ids, side), self.turned(k, ids, side)
            weights = torch.einsum("nqhd,nkhd->nhqk", q, k).div(math.sqrt(D // self.heads)).softmax(-1)
            h = h + gate * attn["proj"](torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(2))
            h = h + gate2 * self.mlp(block["mlp"], self.norm(block, "norm2", h) * (1 + f) + e)
        return h

    def last(self, h, c):
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=2)
        return self.final_layer["linear"](self.norm(self.final_layer, "norm_final", h) * (1 + scale) + shift)


class PublicDiT(PublicNetwork):
    """A DiT, or a LightningDiT with its switches."""

    def __init__(
        self, learn_sigma=False, switches=(), depth=7, num_rows=CLASSES + 1, width=WIDTH, heads=HEADS
    ):
        super().__init__(CHANNELS * (2 if learn_sigma else 1), switches, num_rows, width, heads)
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(CHANNELS, width, PATCH, PATCH)})
        self.ids = torch.arange((SIDE // PATCH) ** 2)
        self.pos_embed = nn.Parameter(torch.randn(1, len(self.ids), width), requires_grad=False)
        if "RoPE" in switches:
            angles = self.angles(self.ids, SIDE // PATCH, width // heads).repeat_interleave(2, dim=1)
            self.feat_rope = nn.Module()
            self.feat_rope.register_buffer("freqs_cos", angles.cos())
            self.feat_rope.register_buffer("freqs_sin", angles.sin())
        self.blocks = self.stack(depth, width)

    def forward(self, x, t, y):
        h, c = self.x_embedder["proj"](x).flatten(2).mT + self.pos_embed, self.condition(t, y)
        g, p = SIDE // PATCH, PATCH
        h = self.last(self.run(self.blocks, h, c, self.ids, g), c)
        h = h.view(len(x), g, g, p, p, h.shape[-1] // p**2)
        return torch.einsum("nijpqc->ncipjq", h).reshape(len(x), -1, g * p, g * p)


class PublicSprint(PublicNetwork):
    """SPRINT's network."""

    def __init__(self, depths=(2, 3, 2)):
        super().__init__(CHANNELS, ("RoPE", "QKNorm"))
        self.x_embedder = nn.ModuleDict({"proj": nn.Linear(CHANNELS * PATCH**2, WIDTH)})
        for name, depth in zip(("encoder_blocks", "middle_blocks", "decoder_blocks"), depths, strict=True):
            self.add_module(name, self.stack(depth, WIDTH))
        self.mask_token = nn.Parameter(torch.empty(1, 1, WIDTH), requires_grad=False)
        self.renoise_linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, t, y, kept=None):
        """Velocity at time t, 1 at noise. kept (N, K): tokens in the middle; all if None, none if K = 0."""
        N, side = len(x), x.shape[-1] // PATCH
        ids = torch.arange(side**2).expand(N, -1)
        patches = torch.einsum("ncipjq->nijcpq", x.view(N, CHANNELS, side, PATCH, side, PATCH))
        h, c = self.x_embedder["proj"](patches.reshape(N, side**2, -1)), self.condition(t, y)
        dense = self.run(self.encoder_blocks, h, c, ids, side)
        kept = ids if kept is None else kept
        deep = self.mask_token.expand(N, side**2, -1).clone()
        for i in range(N if kept.shape[1] else 0):
            one, keep = slice(i, i + 1), kept[i]
            deep[one, keep] = self.run(self.middle_blocks, dense[one, keep], c[one], keep, side)
        h = self.renoise_linear(torch.cat([deep, dense], dim=2))
        h = self.last(self.run(self.decoder_blocks, h, c, ids, side), c)
        h = h.view(N, side, side, CHANNELS, PATCH, PATCH)
        return torch.einsum("nijcpq->ncipjq", h).reshape(x.shape)


def public(network=PublicDiT, **options):
    torch.manual_seed(0)
    net = network(**options)
    for name, parameter in net.named_parameters():
        # Large queries and keys, or attention would be a mean, and positions would not matter.
        parameter.data = torch.randn_like(parameter) * (0.1 if "qkv.weight" in name else 0.05)
        parameter.data += 1.0 if "norm" in name else 0.0
    return net.eval()
