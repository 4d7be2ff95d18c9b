"""A StepAttention in plain PyTorch: one sequence, one contiguous cache, no blocks."""

from __future__ import annotations

import torch

from octavo.execution.models.decoder import Decoder


class ReferenceAttention:
    """Causal attention of one sequence. With ``kv_scales [layer, K|V, kv_head]`` keys and values
    are rounded to fp8."""

    def __init__(self, model: Decoder, kv_scales: torch.Tensor | None = None) -> None:
        self.model = model
        self.kv_scales = kv_scales
        self.num_past = 0
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, token_ids: list[int]) -> torch.Tensor:
        """The next tokens of the sequence through the model."""
        positions = torch.arange(self.num_past, self.num_past + len(token_ids))
        hidden = self.model.forward(torch.tensor(token_ids), positions, self)
        self.num_past += len(token_ids)
        return hidden

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = self.model.num_heads, self.model.num_kv_heads, self.model.head_dim
        num_tokens = qkv.shape[0]
        parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        q, k, v = (part.reshape(num_tokens, -1, dim) for part in parts)
        positions = torch.arange(self.num_past, self.num_past + num_tokens)
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        if self.kv_scales is not None:
            k, v = (
                (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
                for part, scale in zip((k, v), self.kv_scales[layer][:, :, None], strict=True)
            )
        if layer in self.cache:
            past_k, past_v = self.cache[layer]
            k, v = torch.cat([past_k, k]), torch.cat([past_v, v])
        self.cache[layer] = (k, v)
        k = k.repeat_interleave(heads // kv_heads, dim=1).float()
        v = v.repeat_interleave(heads // kv_heads, dim=1).float()
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * dim**-0.5
        is_future = torch.arange(k.shape[0])[None, :] > positions[:, None]
        scores = scores.masked_fill(is_future, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return attended.reshape(num_tokens, heads * dim).to(qkv.dtype)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[positions][:, None, :] for table in self.model.rope)
        if not cos.shape[-1]:
            return x
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def logits_of(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Float32 ``[num_tokens, vocab]`` of one prefill."""
    return model.logits(ReferenceAttention(model).run(token_ids))


def greedy(model: Decoder, prompt: list[int], num_new: int) -> list[int]:
    """Greedy continuation: one prefill, then one token a step."""
    attention = ReferenceAttention(model)
    step, chosen = list(prompt), []
    for _ in range(num_new):
        hidden = attention.run(step)
        step = [int(model.logits(hidden[-1:]).argmax())]
        chosen += step
    return chosen
