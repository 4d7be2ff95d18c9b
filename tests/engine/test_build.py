"""The composition root: what options become, and which are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.tiny_engine import TOKEN_BYTES, build, options, pool, save_gguf, save_llama
from octavo.config import ConfigError, EngineConfig
from octavo.core.model_config import ModelLoadError
from octavo.engine.build import build_engine
from octavo.engine.core import EngineCore
from octavo.engine.report import EngineReport
from octavo.execution import host
from octavo.model_store import ModelStoreError

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"))


def report_of(model: Path, **changes: Any) -> EngineReport:
    core, report = build(model, **changes)
    core.close()
    return report


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize(
    ("kv_memory", "num_bytes"),
    [("64KiB", 65536), ("0.1MiB", 104857), ("100000", 100000), ("70 KB", 70000), ("2GiB", None)],
)
def test_a_size_gives_as_many_blocks_as_fit(
    model: Path, kv_memory: str, num_bytes: int | None, block_size: int
) -> None:
    report = report_of(model, kv_memory=kv_memory, block_size=block_size, prefix_caching=False)
    capacity = report.capacity
    assert capacity.block_bytes == TOKEN_BYTES * block_size
    assert capacity.block_size == block_size
    # Without a prefix cache four rows of 128 tokens never need more than this.
    most = -(-4 * 128 // block_size) + 1
    fits = most if num_bytes is None else num_bytes // capacity.block_bytes
    assert capacity.num_blocks == min(fits, most)


@pytest.mark.parametrize(("kv_memory", "share"), [("50%", 0.5), ("100%", 1.0), ("12.5%", 0.125)])
def test_a_share_is_of_what_remains(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv_memory: str, share: float
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 3 * MIB)
    report = report_of(model, kv_memory=kv_memory, max_num_seqs=64)
    remaining = 3 * MIB - report.workspace_bytes
    assert report.capacity.num_blocks == int(share * remaining) // (16 * TOKEN_BYTES)


def test_auto_takes_half_of_what_remains(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 3 * MIB)
    report = report_of(model, kv_memory="auto", max_num_seqs=64)
    remaining = 3 * MIB - report.workspace_bytes
    assert report.capacity.num_blocks == remaining // 2 // (16 * TOKEN_BYTES)


@pytest.mark.parametrize("kv_memory", [pool(1), pool(2), pool(3, 16)])
def test_the_smallest_pools_serve(model: Path, kv_memory: str) -> None:
    core, report = build(model, kv_memory=kv_memory)
    assert report.num_kv_tokens == report.limits.num_kv_tokens
    assert report.num_kv_tokens == (report.capacity.num_blocks - 1) * 16
    assert report.limits.max_length == report.num_kv_tokens + 1
    assert core.scheduler.manager.num_usable_blocks == report.capacity.num_blocks - 1
    core.close()


@pytest.mark.parametrize("kv_memory", ["1", "8191", "16383"])
def test_less_than_two_blocks_is_refused(model: Path, kv_memory: str) -> None:
    message = r"at least two blocks of 8192 bytes \(16 tokens each\), but kv_memory leaves room for"
    with pytest.raises(ConfigError, match=message + r" [01]; give more memory or a smaller block"):
        build(model, kv_memory=kv_memory)


@pytest.mark.parametrize("kv_memory", ["100%", "auto", "1%", "16KiB"])
def test_no_memory_left_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv_memory: str
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"beside weights and .* a step of max_num_seqs .* lower"):
        build(model, kv_memory=kv_memory)


def test_a_share_too_small_for_two_blocks_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_memory leaves room for 0; give more memory"):
        build(model, kv_memory="0.0000001%")


@pytest.mark.parametrize("kv_memory", ["64KiB", "auto"])
def test_too_many_rows_for_the_machine_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv_memory: str
) -> None:
    """It is not ``kv_memory`` that asks for too much."""
    monkeypatch.setattr(host, "available_bytes", lambda: 3 * MIB)
    with pytest.raises(ConfigError, match="step of max_num_seqs 65536 and max_num_batched_tok"):
        build(model, kv_memory=kv_memory, max_num_seqs=65536, max_num_batched_tokens=65536)


def test_more_than_there_is_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"asks for 900000.00 GiB but .* remain .* ask for less"):
        build(model, kv_memory="900000GiB")


def test_a_context_over_the_models_is_refused(model: Path) -> None:
    assert report_of(model).max_model_len == 128
    assert report_of(model, max_model_len=128).max_model_len == 128
    assert report_of(model, max_model_len=2).max_model_len == 2
    with pytest.raises(ConfigError, match=r"max_model_len 129 is more than .* 128 positions"):
        build(model, max_model_len=129)


@pytest.mark.parametrize(("depth", "expected"), [(None, 1), (1, 1), (2, 2)])
def test_depth(model: Path, depth: int | None, expected: int) -> None:
    core, report = build(model, depth=depth)
    assert core.depth == report.depth == expected
    core.close()


@pytest.mark.parametrize("depth", [0, 3, True, "2"])
def test_a_depth_that_is_none(model: Path, depth: Any) -> None:
    with pytest.raises(ConfigError, match="depth must be an integer from 1 to 2"):
        build(model, depth=depth)
    core, _ = build(model)
    with pytest.raises(ValueError, match="depth must be 1"):
        EngineCore(core.scheduler, core.executor, 3)
    core.close()


@pytest.mark.parametrize(
    ("attention", "expected"), [("auto", "compiled"), ("compiled", "compiled"), ("gather",) * 2]
)
def test_attention(model: Path, attention: str, expected: str) -> None:
    assert report_of(model, attention=attention).attention == expected


def test_without_numba(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "octavo.execution.attention.cpu", None)
    assert report_of(model, attention="auto").attention == "gather"
    assert "numba is not installed" in caplog.text
    with pytest.raises(ConfigError, match=r"attention=compiled needs numba, .* attention=gather"):
        build(model, attention="compiled")


def test_the_token_budget(model: Path) -> None:
    assert report_of(model).max_num_batched_tokens == 512
    assert report_of(model, max_num_seqs=600).max_num_batched_tokens == 600
    report = report_of(model, max_num_seqs=7, max_num_batched_tokens=7)
    assert (report.max_num_seqs, report.max_num_batched_tokens) == (7, 7)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(6\) must be at least"):
        build(model, max_num_seqs=7, max_num_batched_tokens=6)


def test_the_report_adds_up(model: Path) -> None:
    report = report_of(model, max_queued_requests=9)
    # tiny_models: 96 words, 64 hidden, 128 intermediate, 4 heads and 2 kv heads of 16, 2 layers.
    layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128 + 2 * 64
    assert report.weight_bytes == 4 * (2 * layer + 2 * 96 * 64 + 64)
    assert report.kv_bytes == report.capacity.num_blocks * report.capacity.block_bytes
    assert report.kv_bytes == int(pool(32))
    assert report.num_kv_tokens == 32 * 16
    assert report.workspace_bytes > 4 * 96 * 4, "at least the logits"
    assert (report.architecture, report.dtype) == ("LlamaForCausalLM", "float32")
    assert (report.device, report.num_threads, report.vocab_size) == ("cpu", 1, 96)
    assert (report.max_num_seqs, report.max_queued_requests) == (4, 9)
    assert report.eos_token_ids == (2,)
    assert report.load_s > 0
    for part in (
        str(model),
        "512 tokens (blocks 32, 16 tokens each)",
        "gather",
        "Up to 4 sequences at once, of 128",
    ):
        assert part in str(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    report = report_of(save_gguf(tmp_path / "model.gguf"), dtype=dtype)
    expected = "float32" if dtype == "auto" else dtype
    assert report.dtype == expected
    assert report.capacity.block_bytes == 16 * TOKEN_BYTES // (1 if expected == "float32" else 2)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match="neither a directory or file here nor one of"):
        build(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"empty.*config\.json"):
        build(tmp_path / "empty")


def test_a_warm_up_leaves_no_trace(model: Path) -> None:
    """The engine starts with every block and row free, whatever the smallest limits are."""
    for changes in ({}, {"kv_memory": pool(1)}, {"max_model_len": 2}, {"max_num_seqs": 1}):
        core, _ = build_engine(EngineConfig(**(options(model) | changes)))
        manager = core.scheduler.manager
        assert manager.num_free_blocks == manager.num_usable_blocks
        assert not core.has_work
        core.close()


def test_deterministic_is_for_gpus(model: Path) -> None:
    with pytest.raises(ConfigError, match="deterministic is for GPUs"):
        build(model, deterministic=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype=fp8 is for GPUs; use kv_dtype=auto"),
        ({"weights": "fp8"}, "weights=fp8 is for GPUs; .* weights=int8"),
        ({"kv_dtype": "bf16"}, "kv_dtype=bf16, but on a CPU .* in float32; use kv_dtype=auto"),
        ({"kv_dtype": "bf16", "dtype": "float16"}, "kv_dtype=bf16, but .* in float16"),
    ],
)
def test_fp8_is_refused_on_a_cpu(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(model, **changes)


def test_keys_and_values_as_the_model_computes(model: Path) -> None:
    report = report_of(model, dtype="bfloat16", kv_dtype="bf16")
    assert report.kv_dtype == "bfloat16"
    assert "bfloat16 KV cache" in str(report)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"weights": "fp8", "kv_dtype": "bf16"}, "weights"),
    ],
)
def test_fp8_needs_a_gpu_that_has_it(
    model: Path, changes: dict[str, Any], refused: str | None
) -> None:
    pytest.importorskip("triton")
    from octavo.engine.build_gpu import _check_fp8
    from octavo.engine.mechanism import resolve_limits
    from octavo.execution.models.loading import load_config

    config = EngineConfig(model=str(model), **changes)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "depth": 1}
    limits = resolve_limits(config, str(model), load_config(model), **sizes)
    _check_fp8(config, limits, (9, 0))
    if refused is None:
        _check_fp8(config, limits, (8, 0))
        return
    with pytest.raises(ConfigError, match=f"{refused} in fp8 needs .* 8.0; use {refused}=bf16"):
        _check_fp8(config, limits, (8, 0))


@pytest.mark.parametrize(
    ("changes", "installed", "message"),
    [
        ({"attention": "flashinfer"}, None, "needs the package flashinfer-python, .* cannot be"),
        ({"attention": "flashinfer"}, object(), None),
        ({"kv": "contiguous", "attention": "stock"}, None, None),
        ({"attention": "compiled"}, object(), "is for CPUs; use auto, triton, flash3, flashinfer"),
    ],
)
def test_packages_that_a_gpu_may_use(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], installed: object, message: str | None
) -> None:
    pytest.importorskip("triton")
    from octavo.engine import build_gpu

    monkeypatch.setattr(build_gpu, "find_flashinfer", lambda: installed)
    config = EngineConfig(model="any", device="cuda", **changes)
    if message is None:
        assert build_gpu._attention(config) == changes["attention"]
        return
    with pytest.raises(ConfigError, match=message):
        build_gpu._attention(config)


@pytest.mark.parametrize(
    ("asked", "is_dense", "kv_dtype", "head_dim", "message"),
    [
        ("flash3", False, torch.bfloat16, 64, "attention=flash3 is for long chunks in bfloat16"),
        ("mixed", False, torch.float32, 64, "attention=mixed is for long chunks"),
        ("stock", True, torch.float32, 64, "reads bfloat16 or float16, .* not float32 and 64"),
        ("stock", True, torch.float16, 64, "as the model computes, .* not float16 and 64"),
        ("stock", True, torch.bfloat16, 100, "a multiple of 8 up to 256, not bfloat16 and 100"),
        ("stock", True, torch.bfloat16, 512, "a multiple of 8 up to 256, not bfloat16 and 512"),
        ("stock", True, torch.bfloat16, 80, None),
        ("auto", False, torch.float32, 64, None),
        ("flash3", True, torch.bfloat16, 64, None),
        ("flashinfer", True, torch.bfloat16, 64, None),
        ("flashinfer", True, torch.float8_e4m3fn, 64, "64, 128, 256, not float8_e4m3fn and 64"),
        ("flashinfer", True, torch.float16, 64, "as the model computes, .* not float16 and 64"),
    ],
)
def test_what_a_gpu_would_not_use_is_not_taken_silently(
    asked: str, is_dense: bool, kv_dtype: torch.dtype, head_dim: int, message: str | None
) -> None:
    pytest.importorskip("triton")
    from octavo.engine.build_gpu import _check_attention

    model = SimpleNamespace(dtype=torch.bfloat16, head_dim=head_dim)
    parts: Any = SimpleNamespace(attends_densely=is_dense, kv_dtype=kv_dtype, model=model)
    if message is None:
        _check_attention(asked, parts)
        return
    with pytest.raises(ConfigError, match=message):
        _check_attention(asked, parts)
