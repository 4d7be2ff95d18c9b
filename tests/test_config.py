from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import (
    KV_MANAGERS,
    ConfigError,
    EngineConfig,
    KVMemory,
    ServerConfig,
    cache_dir,
)


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
        ("model", 5),
        ("kv_dtype", ["fp8"]),
        ("kv_memory", 2**30),
        ("kv_memory", None),
        ("swap_memory", 0),
    ],
)
def test_a_bad_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("given", "meant"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("float", "float32")],
)
def test_dtypes_have_short_names(given: str, meant: str) -> None:
    assert EngineConfig(dtype=given).dtype == meant


@pytest.mark.parametrize("text", ["smollm2-135m", "/no/such/directory", "no/such-name"])
def test_a_model_may_be_a_path(text: str) -> None:
    """One that does not exist as well, which is then looked up as any name."""
    model: Any = Path(text)
    assert EngineConfig(model=model).model == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "contiguous", "prefix_caching": True}, "leave out prefix_caching, or use kv=paged"),
        ({"kv": "contiguous", "sharing": True}, "leave out sharing, or use kv=paged"),
        ({"sharing": False, "prefix_caching": True}, "sharing=False forbids"),
        ({"swap_memory": "1GiB"}, "set preemption to swap or auto"),
        ({"swap_memory": "1GiB", "preemption": "recompute"}, "set preemption to swap or auto"),
        ({"preemption": "swap"}, "set swap_memory"),
        ({"map_forks": True}, "map_forks is for kv=virtual"),
        ({"reserve": "max"}, "reserve is for kv=contiguous"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_what_is_left_open_goes_with_everything() -> None:
    shares = {}
    for kv in KV_MANAGERS:
        config = EngineConfig(kv=kv)
        assert config.caches_prefixes == config.shares_blocks
        shares[kv] = config.shares_blocks
    assert shares == {"paged": True, "virtual": True, "contiguous": False}
    off = EngineConfig(kv="contiguous", prefix_caching=False, sharing=False)
    assert not off.shares_blocks
    assert EngineConfig(prefix_caching=False).shares_blocks
    assert not EngineConfig(prefix_caching=False).caches_prefixes
    assert not EngineConfig(sharing=False).caches_prefixes


def test_what_keys_and_values_are_kept_in_has_other_names() -> None:
    for given, meant in (("fp8_e4m3", "fp8"), ("bfloat16", "bf16"), ("fp8", "fp8")):
        assert EngineConfig(kv_dtype=given).kv_dtype == meant


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("host", " "),
        ("port", 70000),
        ("drain_timeout_s", -1.0),
        ("max_request_bytes", 1),
        ("drain_timeout_s", "5"),
        ("stall_timeout_s", None),
        ("client_timeout_s", True),
        ("api_keys", None),
        ("prefixes", 5),
        ("cors_origins", "*"),
    ],
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
