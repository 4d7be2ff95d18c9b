from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import ConfigError, EngineConfig, KVMemory, ServerConfig, cache_dir


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", KVMemory()),
        ("512MiB", KVMemory(num_bytes=512 * 2**20)),
        ("40GiB", KVMemory(num_bytes=40 * 2**30)),
        ("1.5 GB", KVMemory(num_bytes=1_500_000_000)),
        ("123456", KVMemory(num_bytes=123456)),
        ("90%", KVMemory(fraction=0.9)),
    ],
)
def test_kv_memory_is_a_size_or_a_share(text: str, expected: KVMemory) -> None:
    assert KVMemory.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-1GiB", "0%", "101%", "12XB", "GiB", "1e9", "nan", "9" * 40]
)
def test_a_bad_kv_memory_says_what_is_good(text: str) -> None:
    with pytest.raises(ConfigError, match=r"512MiB or 40GiB, or a share such as 90%"):
        KVMemory.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "int3"),
        ("load_format", "pickle"),
        ("kv", "magic"),
        ("kv_dtype", "fp4"),
        ("weights", "fp4"),
        ("attention", "fast"),
        ("kv_memory", "lots"),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_model_len", 1),
        ("max_queued_requests", 0),
        ("depth", 3),
        ("threads", 0),
        ("max_num_batched_tokens", 0),
        ("device", "tpu"),
        ("sharing", "no"),
        ("deterministic", 1),
    ],
)
def test_a_bad_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_what_keys_and_values_are_kept_in_has_other_names() -> None:
    for given, meant in (("fp8_e4m3", "fp8"), ("bfloat16", "bf16"), ("fp8", "fp8")):
        assert EngineConfig(kv_dtype=given).kv_dtype == meant


@pytest.mark.parametrize(
    ("field", "value"), [("port", 70000), ("drain_timeout_s", -1.0), ("max_request_bytes", 1)]
)
def test_a_bad_server_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**{field: value})


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    assert cache_dir() == Path("/somewhere/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "/elsewhere")
    assert cache_dir() == Path("/elsewhere")
