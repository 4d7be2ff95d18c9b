"""FlashAttention-3 is called by the names of whatever build's schema; and as it is, where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from execution.gpu.references import assert_attends, attend, make_pool
from octavo.execution.attention.dense import DenseChunk, dense_attention
from octavo.execution.attention.flash3 import Flash3, find_flash3

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? cu_seqlens_q, Tensor? seqused_k, "
    "int? max_seqlen_q, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, int num_splits, bool? pack_gqa, int sm_margin) "
    "-> Tensor[]"
)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A build whose kernel is PyTorch's."""
    library = torch.library.Library("octavo_test_fa3", "DEF")
    library.define(SCHEMA)

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: object, starts: torch.Tensor,
        used: torch.Tensor, longest: int, scale: float, is_causal: bool, left: int, right: int,
        *rest: object,
    ) -> list[torch.Tensor]:  # fmt: skip
        assert (out, is_causal, left, right) == (None, True, -1, -1)
        assert starts.tolist() == [0, len(q)] == [0, longest]
        assert used.tolist() == [k.shape[1]]
        keys, values = (x.transpose(1, 2) for x in (k, v))
        mask = torch.ones(len(q), k.shape[1], dtype=torch.bool, device=q.device).tril(
            k.shape[1] - len(q)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None].transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return [attended.transpose(1, 2)[0]]

    library.impl("fwd", forward, "CompositeExplicitAutograd")
    library.define("other(Tensor x) -> Tensor")
    yield library
    library._destroy()


@pytest.mark.usefixtures("library")
def test_one_call_for_a_chunk_and_its_prefix(device: torch.device) -> None:
    pool = make_pool(
        [29, 75], num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32,
        device=device,
    )  # fmt: skip
    queries = torch.randn(50, 6, 16, device=device)
    out = torch.full_like(queries, float("nan"))
    flash3 = Flash3(torch.ops.octavo_test_fa3.fwd.default)
    chunk = DenseChunk(row=1, offset=5, count=40, start=35)
    expected = attend(queries[5:45], pool, 1, 35)
    slots = pool.slots([29, 75])[1:]
    for kv_layer, tables in ((pool.kv_layer, pool.tables), (slots, None)):
        dense_attention(queries, kv_layer, tables, chunk, out, flash3=flash3)
        torch.testing.assert_close(out[5:45], expected, atol=1e-5, rtol=1e-5)
    assert out[:5].isnan().all()
    assert out[45:].isnan().all()


@pytest.mark.usefixtures("library")
def test_another_operator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no forward pass"):
        Flash3(torch.ops.octavo_test_fa3.other.default)


def test_a_package_that_cannot_be_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Absent it is no news; broken it would be missed without a word."""
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    find_flash3.__wrapped__()
    assert "flash_attn_interface is installed but cannot be imported" in caplog.text
    assert "undefined symbol" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or find_flash3() is None, reason="needs FlashAttention-3"
)
@pytest.mark.parametrize(("start", "count"), [(0, 2048), (3000, 77), (1, 513)])
def test_the_installed_build(start: int, count: int) -> None:
    pool = make_pool(
        [start + count], num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )  # fmt: skip
    queries = torch.randn(count, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(queries, float("nan"))
    flash3 = find_flash3()
    for kv_layer, tables in (
        (pool.kv_layer, pool.tables),
        (pool.slots([start + count])[1:], None),
    ):
        chunk = DenseChunk(0, 0, count, start)
        dense_attention(queries, kv_layer, tables, chunk, out, flash3=flash3)
        expected = attend(queries, pool, 0, start)
        assert_attends(out, expected, torch.bfloat16)
