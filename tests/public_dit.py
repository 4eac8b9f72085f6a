"""Networks of public code, written from their papers: what the project's own must agree with."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEADS, PATCH, CHANNELS, SIDE, CLASSES = 384, 6, 2, 4, 8, 10
SWITCHES = ("RoPE", "SwiGLU", "RMSNorm")  # of LightningDiT


class PublicDiT(nn.Module):
    """A DiT written from the papers alone, with the names of public checkpoints.

    Args:
        switches: of LightningDiT's block.
        num_rows: of the table of labels; the last is the null class, where it was trained.
    """

    def __init__(
        self, learn_sigma=False, switches=(), depth=7, num_rows=CLASSES + 1, width=WIDTH, heads=HEADS
    ):
        super().__init__()
        D, out, self.heads, self.switches = width, CHANNELS * (2 if learn_sigma else 1), heads, switches
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(CHANNELS, D, PATCH, PATCH)})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(num_rows, D)})
        self.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, D), requires_grad=False)
        if "RoPE" in switches:
            self.feat_rope = nn.Module()
            for name, function in (("freqs_cos", torch.cos), ("freqs_sin", torch.sin)):
                self.feat_rope.register_buffer(name, function(self.angles()).repeat_interleave(2, dim=1))
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            block = {"attn": nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "proj": nn.Linear(D, D)})}
            mlp = {"fc1": nn.Linear(D, 4 * D), "fc2": nn.Linear(4 * D, D)}
            if "SwiGLU" in switches:
                mlp = {"w12": nn.Linear(D, 2 * (8 * D // 3)), "w3": nn.Linear(8 * D // 3, D)}
            if "RMSNorm" in switches:
                block |= {"norm1": nn.RMSNorm(D), "norm2": nn.RMSNorm(D)}
            ada = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))
            self.blocks.append(nn.ModuleDict({**block, "mlp": nn.ModuleDict(mlp), "adaLN_modulation": ada}))
        last = {"norm_final": nn.RMSNorm(D)} if "RMSNorm" in switches else {}
        last |= {"linear": nn.Linear(D, PATCH**2 * out)}
        last["adaLN_modulation"] = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))
        self.final_layer = nn.ModuleDict(last)

    def angles(self):  # (T, d / 2): half of the pairs of a head by the row, half by the column
        side, d = SIDE // PATCH, self.x_embedder["proj"].out_channels // self.heads
        speed = 10000.0 ** -(torch.arange(0, d // 2, 2) / (d // 2))
        rows, columns = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
        return torch.cat([rows[:, None] * speed, columns[:, None] * speed], dim=1)

    def turned(self, q):  # (N, T, H, d), pair by pair
        if "RoPE" not in self.switches:
            return q
        pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones(()), self.angles())[:, None]).flatten(-2)

    def mlp(self, mlp, h):
        if "SwiGLU" not in self.switches:
            return mlp["fc2"](F.gelu(mlp["fc1"](h), approximate="tanh"))
        gated, value = mlp["w12"](h).chunk(2, dim=-1)
        return mlp["w3"](F.silu(gated) * value)

    def norm(self, parts, name, h):
        if "RMSNorm" not in self.switches:
            return F.layer_norm(h, h.shape[-1:], eps=1e-6)
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * parts[name].weight

    def forward(self, x, t, y):
        h = self.x_embedder["proj"](x).flatten(2).transpose(1, 2) + self.pos_embed
        N, T, D = h.shape
        d = D // self.heads
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
        c = self.t_embedder["mlp"](torch.cat([angles.cos(), angles.sin()], dim=1))
        c = c + self.y_embedder["embedding_table"](y)
        for block in self.blocks:
            a, b, gate, e, f, gate2 = block["adaLN_modulation"](c)[:, None].chunk(6, dim=2)
            inner = self.norm(block, "norm1", h) * (1 + b) + a
            q, k, v = block["attn"]["qkv"](inner).view(N, T, 3, self.heads, d).unbind(2)
            weights = torch.einsum("nqhd,nkhd->nhqk", self.turned(q), self.turned(k))
            weights = weights.div(math.sqrt(d)).softmax(-1)
            mixed = torch.einsum("nhqk,nkhd->nqhd", weights, v).reshape(N, T, D)
            h = h + gate * block["attn"]["proj"](mixed)
            h = h + gate2 * self.mlp(block["mlp"], self.norm(block, "norm2", h) * (1 + f) + e)
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=2)
        h = self.final_layer["linear"](self.norm(self.final_layer, "norm_final", h) * (1 + scale) + shift)
        g, p = SIDE // PATCH, PATCH
        return torch.einsum("nijpqc->ncipjq", h.view(N, g, g, p, p, -1)).reshape(N, -1, g * p, g * p)
