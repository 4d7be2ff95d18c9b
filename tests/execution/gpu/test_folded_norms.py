"""Norms that are no kernels: their weights in the products after them, the division left to whoever
reads those. What comes out is what comes out of norms of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from engine.tiny_engine import build, run
from execution.gpu.attention_runs import GRID
from execution.gpu.references import ints, make_pool, tolerance
from execution.gpu.test_gpu_engine import BLOCK_SIZE, MAX_NUM_SEQS, gpu_engine, requests
from execution.models.fp8_checkpoints import compressed, save_fp8
from execution.models.reference_attention import ReferenceAttention
from execution.models.tiny_models import PROMPT, tiny_llama, tiny_qwen2, tiny_qwen3
from octavo.core.request import BeamResult
from octavo.execution.kernels import activation, linear, rope
from octavo.execution.kernels.activation import silu_and_mul
from octavo.execution.kernels.gpu import Product, Unnormed
from octavo.execution.kernels.linear import add_linear, takes_library, unnormed_linear, whole
from octavo.execution.kernels.rope import rope_and_write
from octavo.execution.models import fused
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.fused import FusedDecoder, fold_norms
from octavo.execution.models.loading import load_model
from octavo.execution.models.norms import QueryKeyNorm

ON_GPU = torch.cuda.is_available()
FLOATS = [torch.float32, torch.bfloat16]
QKV = (4 + 2 * 2) * 16
"""Outputs of the fixture's first product."""
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def normed(residual: torch.Tensor) -> torch.Tensor:
    """In float64, without a weight."""
    x = residual.double()
    return x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()


def of_library(dtype: torch.dtype) -> dict[str, float]:
    """It may multiply float32 in TF32."""
    return {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float32 else tolerance(dtype)


def rows_of(rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Of lengths from 0.1 to 100, the last one zero."""
    x = (
        torch.randn(rows, hidden, device=device)
        * torch.logspace(-1, 2, rows, device=device)[:, None]
    )
    x[-1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("rows", "hidden", "features"),
    [(3, 200, 300), (513, 4096, 14336), (130, 2048, 8192)] if ON_GPU else [(3, 200, 300)],
)
def test_a_gate_of_rows_that_were_not_normed(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    hidden: int,
    features: int,
    many: bool,
    dtype: torch.dtype,
) -> None:
    """By a program for each tile, and, of ``many`` rows, by one for the whole row."""
    monkeypatch.setattr(activation, "_MANY_ROWS", 1 if many else 1 << 20)
    residual = rows_of(rows, hidden, device, dtype)
    weight = (torch.randn(2 * features, hidden, device=device) / hidden**0.5).to(dtype)
    product = unnormed_linear(residual, weight, 1e-5)
    inverse = (residual.double().square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    gate, up = (product.product.double() * inverse).chunk(2, dim=-1)
    y = silu_and_mul(product, dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), F.silu(gate) * up, **tolerance(dtype))
    gate, up = (normed(residual) @ weight.double().T).chunk(2, dim=-1)
    torch.testing.assert_close(y.double(), F.silu(gate) * up, **of_library(dtype))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "sizes", [(6, 2, 16, 4), (3, 1, 80, 16), (32, 8, 128, 16), *(GRID if ON_GPU else [])]
)
@pytest.mark.parametrize("hidden", [200, 4096] if ON_GPU else [200])
def test_rotation_of_rows_that_were_not_normed(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int, int],
    hidden: int,
    many: bool,
) -> None:
    """Queries, keys and values are those of the rows that were, with norms of heads too."""
    monkeypatch.setattr(rope, "_MANY_TOKENS", 1 if many else 1 << 20)
    num_heads, num_kv_heads, head_dim, block_size = sizes
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    rows, positions = ints([1, 0, 0], device), ints([17, 38, 39], device)
    residual = rows_of(3, hidden, device, torch.float32)
    inverse = (residual.double().square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    # Of order one where it is divided, so that the tolerance is.
    divided = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    product = (divided / inverse).float()
    cos, sin = torch.randn(2, 64, head_dim // 2, device=device)
    norms = torch.rand(num_heads + num_kv_heads, head_dim, device=device)
    found = []
    for qkv in (Unnormed(product, residual, 1e-5), (product.double() * inverse).float()):
        for head_norms in (None, norms):
            pool = make_pool([40, 18], **shape, dtype=torch.float32, device=device)
            pool.kv_layer.fill_(float("nan"))
            queries = rope_and_write(
                qkv, pool.kv_layer, rows, positions, pool.tables, cos, sin, num_heads,
                head_norms=head_norms, eps=1e-6, dtype=torch.float32,
            )  # fmt: skip
            slots = [pool.tables[row, p // block_size] for row, p in ((1, 17), (0, 38), (0, 39))]
            written = torch.stack(
                [pool.kv_layer[b, p % block_size] for b, p in zip(slots, (17, 38, 39), strict=True)]
            )
            assert int((~pool.kv_layer.isnan()).sum()) == written.numel(), "and nothing else"
            found.append((queries, written))
    for late, early in zip(found[:2], found[2:], strict=True):
        for a, b in zip(late, early, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_is_added_before_it_is_rounded(device: torch.device, dtype: torch.dtype) -> None:
    residual, x = (torch.randn(70, size, device=device).to(dtype) for size in (64, 96))
    weight = (torch.randn(64, 96, device=device) / 10).to(dtype)
    expected = residual.double() + x.double() @ weight.double().T
    add_linear(residual, x, weight)
    torch.testing.assert_close(residual.double(), expected, **of_library(dtype))


def test_which_products_are_the_librarys(device: torch.device) -> None:
    x = torch.zeros(1025, 64, device=device, dtype=torch.bfloat16)
    narrow, wide = (torch.zeros(n, 64, device=device, dtype=torch.bfloat16) for n in (6144, 28672))
    taken = [rows for rows in (1, 64, 65, 128, 129, 256) if takes_library(x[:rows], narrow, None)]
    assert taken == [65, 128, 129, 256]
    taken = [rows for rows in (1, 64, 65, 128, 129, 256) if takes_library(x[:rows], wide, None)]
    assert taken == [129, 256]
    scales = torch.ones(6144, device=device)
    assert not takes_library(x, narrow.to(torch.float8_e4m3fn), scales)
    if not ON_GPU or torch.cuda.get_device_capability(device)[0] >= 9:
        gated = [
            rows
            for rows in (64, 65, 128, 129, 224, 225, 256, 257)
            if takes_library(x[:rows], wide, None, is_gated=True)
        ]
        assert gated == [129, 224, 257], "the others are multiplied by a kernel of ours"


class Attention(ReferenceAttention):
    """Of products however they are left, by tables and masks on the device that is the default."""

    def __call__(self, layer: int, qkv: Product, norm: QueryKeyNorm | None = None) -> torch.Tensor:
        if isinstance(qkv, Unnormed):
            mean = qkv.residual.square().mean(dim=-1, keepdim=True)
            qkv = qkv.product * (mean + qkv.eps).rsqrt()
        qkv = whole(qkv, torch.float32)
        return super().__call__(layer, qkv if norm is None else norm(qkv))


def states(runs: Any, model: Decoder, device: torch.device) -> torch.Tensor:
    """Of the tokens of a prompt, float32 ``[tokens, hidden]``, by what ``runs`` ``model``."""
    with torch.inference_mode(), device:
        token_ids = torch.tensor(PROMPT)
        return runs.forward(token_ids, torch.arange(len(PROMPT)), Attention(model))


def load(folder: Path, device: torch.device, dtype: str = "float32", **options: Any) -> Any:
    return load_model(folder, dtype=dtype, device=device, max_positions=64, **options)


def test_weights_move_once(device: torch.device, tmp_path: Path) -> None:
    """And the model's own forward pass is right after it."""
    tiny_llama().save_pretrained(tmp_path)
    plain, moved = load(tmp_path, device), load(tmp_path, device)
    expected = states(plain, plain, device)
    scales = [layer.attention_norm.weight for layer in plain.layers]
    assert not all(torch.equal(scale, torch.ones_like(scale)) for scale in scales)
    for _ in range(2):
        assert fold_norms(moved)
        for layer, own in zip(moved.layers, plain.layers, strict=True):
            assert torch.equal(layer.qkv.weight, own.qkv.weight * own.attention_norm.weight)
            assert torch.equal(layer.up.weight, own.up.weight * own.mlp_norm.weight)
            assert bool((layer.attention_norm.weight == 1).all())
            assert bool((layer.mlp_norm.weight == 1).all())
        torch.testing.assert_close(states(moved, moved, device), expected, **CLOSE)
    assert not torch.equal(moved.norm.weight, torch.ones_like(moved.norm.weight))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (tiny_llama, {}),
        (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
        (tiny_qwen2, {"tie_word_embeddings": True}),
        (tiny_qwen3, {}),
    ],
)
def test_states_are_those_of_the_models_layers(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., PreTrainedModel],
    changes: dict[str, Any],
    size: int,
) -> None:
    """Whatever biases it has, and of the first rank of two, whose sums are not its own: the other's
    are taken to be twice as large."""
    make(**changes).save_pretrained(tmp_path)
    ranks: dict[str, Any] = {"rank": 0, "size": size}
    if size > 1:
        ranks |= {"all_reduce": lambda part: 3 * part, "all_gather": lambda part: part}
    model = load(tmp_path, device, **ranks)
    expected = states(model, model, device)
    monkeypatch.setattr(linear, "MAX_ROWS", 2)
    found = states(FusedDecoder(model), model, device)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_where_weights_stay(device: torch.device, tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "biased")
    tiny_llama().save_pretrained(tmp_path / "plain")
    save_fp8(tmp_path / "narrow", tiny_qwen3(head_dim=16), compressed())
    for model in (
        load(tmp_path / "biased", device),
        load(tmp_path / "plain", device, "float16"),
        load(tmp_path / "narrow", device, weights="fp8"),
    ):
        before = [layer.up.weight.clone() for layer in model.layers]
        assert not fold_norms(model)
        assert all(map(torch.equal, before, (layer.up.weight for layer in model.layers)))
    model = load(tmp_path / "plain", device)
    before = [layer.up.weight.clone() for layer in model.layers]
    assert not FusedDecoder(model, is_invariant=True).holds_norms
    assert all(map(torch.equal, before, (layer.up.weight for layer in model.layers)))
    assert FusedDecoder(model).holds_norms


def test_some_of_the_layers_run_as_they_do_among_all(device: torch.device, tmp_path: Path) -> None:
    """Where weights of one keep the norms of all in place, the others' are not moved later."""
    tiny_llama().save_pretrained(tmp_path)
    model = load(tmp_path, device)
    bias = torch.zeros(len(model.layers[1].qkv.weight), device=device)
    model.layers[1].qkv.bias = bias
    before = model.layers[0].qkv.weight.clone()
    short = copy.copy(model)
    short.layers = model.layers[:1]
    found = FusedDecoder(model).over(short)
    assert not found.holds_norms
    assert found.model is short
    assert torch.equal(model.layers[0].qkv.weight, before)


@pytest.mark.parametrize(
    ("kv", "is_invariant", "depth", "chunk"),
    [
        ("paged", False, 1, 32),
        ("paged", False, 2, 5),
        ("virtual", False, 2, 32),
        ("paged", True, 2, 32),
    ],
)
def test_tokens_are_those_of_the_cpu(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    kv: str,
    is_invariant: bool,
    depth: int,
    chunk: int,
) -> None:
    """Where steps of more than two tokens are the library's, and so mixed with those that are not;
    with heads that are normed too."""
    core, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    expected = run(core, requests(), beams={})
    core.close()
    monkeypatch.setattr(linear, "MAX_ROWS", 2)
    taken = {"qkv": 0, "gated": 0, "added": 0}

    def multiplied(residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Unnormed:
        taken["qkv" if len(weight) == QKV else "gated"] += 1
        return unnormed_linear(residual, weight, eps)

    def added(*tensors: torch.Tensor) -> None:
        taken["added"] += 1
        add_linear(*tensors)

    monkeypatch.setattr(fused, "unnormed_linear", multiplied)
    monkeypatch.setattr(fused, "add_linear", added)
    core = gpu_engine(
        model, num_blocks=60, depth=depth, chunk=chunk, kv=kv, is_invariant=is_invariant
    )
    beams: dict[int, BeamResult] = {}
    assert run(core, requests(), beams=beams) == expected
    assert beams
    core.close()
    assert all(taken.values()) != is_invariant
    assert not (is_invariant and any(taken.values()))
