"""Every option of the engine and the server: frozen, validated, never mutated.

The only module that reads the environment. Knows no torch and opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("auto", "bfloat16", "float16", "float32")
PREEMPTION_MODES = ("recompute", "swap", "auto")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
KV_MANAGERS = ("paged", "virtual", "contiguous")
RESERVES = ("max", "pow2", "oracle")
SCHEDULERS = ("continuous", "static")
BLOCK_SIZE = 16
WEIGHT_MODES = ("auto", "bf16", "fp8", "int8", "int4")
KV_DTYPES = ("auto", "bf16", "fp16", "fp8")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
ATTENTION_BACKENDS = (
    "auto",
    "compiled",
    "gather",
    "contiguous",
    "triton",
    "flash3",
    "flashinfer",
    "stock",
    "mixed",
)
# Which read slots, and contiguous addresses of any kind; the others read block tables, which are
# there under every manager.
_OVER_SLOTS = ("mixed",)
_OVER_ADDRESSES = ("contiguous", "stock")
_DOES_NOT_GO_WITH = {
    "paged": (*_OVER_SLOTS, *_OVER_ADDRESSES),
    # Its block tables are true ones, of consecutive blocks, which are contiguous addresses, too.
    "contiguous": _OVER_SLOTS,
}
DEVICES = ("auto", "cpu", "cuda")

# What the same is called elsewhere.
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
DTYPE_ALIASES |= {"float": "float32"}
KV_DTYPE_ALIASES = {"fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16"}
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class ConfigError(ValueError):
    """An option is wrong; the message says which and what it may be."""


class ResourceError(RuntimeError):
    """This machine has less than is needed (memory, addresses, mappings, open files), whatever was
    asked for; the message says of what, and what to do."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """How much memory the KV cache gets: ``num_bytes``, or a ``fraction`` of what remains after
    weights and workspace. Neither set: chosen for the device."""

    num_bytes: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> KVMemory:
        """``auto``, a size such as ``512MiB`` or ``40GiB``, or a share such as ``90%``.

        Raises:
            ConfigError: anything else.
        """
        if text == "auto":
            return cls()
        match = isinstance(text, str) and re.fullmatch(
            r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*|%)", text.strip()
        )
        if match:
            number, unit = float(match[1]), match[2]
            if unit == "%" and 0 < number <= 100:
                return cls(fraction=number / 100)
            if unit in _UNITS and number * _UNITS[unit] >= 1:
                return cls(num_bytes=int(number * _UNITS[unit]))
        raise ConfigError(
            f"kv_memory must be auto, a size such as 512MiB or 40GiB, or a share such as 90%, "
            f"got {text!r}"
        )


def parse_size(name: str, text: str) -> int:
    """Bytes of ``0`` or a size such as ``512MiB``.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(text, str) and text.strip() == "0":
        return 0
    try:
        num_bytes = KVMemory.parse(text).num_bytes
    except ConfigError:
        num_bytes = None
    if num_bytes is None:
        raise ConfigError(f"{name} must be 0 or a size such as 512MiB or 4GiB, got {text!r}")
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to serve and within which limits.

    ``model`` is a known name, a directory or a file; ``device`` is where it runs, ``auto`` takes a
    GPU where there is one. ``weights`` says in what they are kept: ``auto`` as the file does,
    ``fp8`` on a GPU, ``int8`` and ``int4`` on a CPU. ``kv_dtype`` is what keys and values are kept
    in: ``auto`` as the model computes, or in fp8 where its checkpoint was made for that; ``fp8``
    (e4m3, also written ``fp8_e4m3``) takes half the memory, on a GPU.
    ``depth`` is the number of steps in flight: 1 is synchronous, 2 plans a step while another
    runs, None lets the device decide.
    ``kv`` says how attention finds a sequence's blocks: ``paged`` looks them up in its block table,
    ``virtual`` has the driver map them at contiguous addresses. ``contiguous`` is what engines had
    before either, to measure against: each sequence gets one run of the pool when it is admitted,
    nothing is shared, cached or preempted, and ``reserve`` says how long a run: ``max`` (also
    where it is None), the model's longest sequence, ``pow2``, the prompt and the output rounded up
    to a power of two, or ``oracle``, what the request will need. ``scheduler`` is ``continuous``,
    or ``static``: nobody joins a batch until all of it has ended. ``block_size`` is the tokens in a
    block; None takes ``BLOCK_SIZE``, or more where only more can be mapped. ``map_forks`` says
    whether under ``virtual`` samples and beams are mapped in slots of their own, or read through
    their block tables; None takes what costs less on the device.
    With ``deterministic`` a request's tokens are the same to the last bit whatever runs beside it,
    at a cost in speed, on a GPU.
    ``prefix_caching`` lets prompts that begin alike share blocks; without ``sharing`` samples and
    beams copy all their blocks and nothing is cached: the same tokens, to measure against. None
    does both wherever ``kv`` can.
    ``preemption`` says how a sequence that lost its blocks gets them back: ``recompute``, ``swap``
    through ``swap_memory`` of the host, or ``auto``, whichever costs less.
    ``max_num_seqs`` is how many sequences run at once, ``max_num_batched_tokens`` the token budget
    of a step, ``max_model_len`` the longest sequence; None takes the device's or the model's.
    ``max_queued_requests`` is how many may wait beside those; each of the n choices that a request
    asks for counts as one, as it takes the place and the memory of one.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    load_format: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    kv: str = "paged"
    reserve: str | None = None
    kv_dtype: str = "auto"
    block_size: int | None = None
    kv_memory: str = "auto"
    prefix_caching: bool | None = None
    sharing: bool | None = None
    scheduler: str = "continuous"
    preemption: str = "recompute"
    swap_memory: str = "0"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queued_requests: int = 1024
    depth: int | None = None
    threads: int | None = None
    attention: str = "auto"
    map_forks: bool | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model must be a name, a directory or a file, and not empty, got {self.model!r}"
            )
        _choice("device", self.device, DEVICES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        _choice("dtype", self.dtype, DTYPES)
        _choice("weights", self.weights, WEIGHT_MODES)
        _choice("kv", self.kv, KV_MANAGERS)
        if self.reserve is not None:
            _choice("reserve", self.reserve, RESERVES)
        _choice("scheduler", self.scheduler, SCHEDULERS)
        if isinstance(self.kv_dtype, str):
            object.__setattr__(self, "kv_dtype", KV_DTYPE_ALIASES.get(self.kv_dtype, self.kv_dtype))
        _choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _choice("attention", self.attention, ATTENTION_BACKENDS)
        _choice("preemption", self.preemption, PREEMPTION_MODES)
        for name in ("prefix_caching", "sharing", "map_forks"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(
                    f"{name} must be True, False or None, got {getattr(self, name)!r}"
                )
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic must be True or False, got {self.deterministic!r}")
        KVMemory.parse(self.kv_memory)
        parse_size("swap_memory", self.swap_memory)
        _range("block_size", self.block_size, 1, 1024)
        _range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _range("max_queued_requests", self.max_queued_requests, 1, 1_000_000)
        _range("max_model_len", self.max_model_len, 2, 2**24)
        _range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _range("depth", self.depth, 1, 2)
        _range("threads", self.threads, 1, 1024)
        self._check_combinations()

    @property
    def shares_blocks(self) -> bool:
        """Whether sequences may have blocks in common."""
        return self.kv != "contiguous" and self.sharing is not False

    @property
    def caches_prefixes(self) -> bool:
        """Whether blocks are kept for prompts that begin alike."""
        return self.shares_blocks and self.prefix_caching is not False

    def _check_combinations(self) -> None:
        """Refuse what would contradict another option, or change nothing beside it."""
        if self.attention in _DOES_NOT_GO_WITH.get(self.kv, ()):
            raise ConfigError(
                f"attention={self.attention} does not go with kv={self.kv}: "
                f"{', '.join(_OVER_SLOTS)} reads slots, which only kv=virtual has, and "
                f"{', '.join(_OVER_ADDRESSES)} read contiguous addresses, which kv=paged has not; "
                "use attention=auto"
            )
        if self.reserve is not None and self.kv != "contiguous":
            raise ConfigError(
                f"reserve is for kv=contiguous: kv={self.kv} takes blocks as they are needed"
            )
        for name in ("prefix_caching", "sharing"):
            if self.kv == "contiguous" and getattr(self, name):
                raise ConfigError(
                    f"kv=contiguous shares no blocks: leave out {name}, or use kv=paged"
                )
        if self.prefix_caching and self.sharing is False:
            raise ConfigError(
                "prefix_caching shares blocks, which sharing=False forbids: leave out one of them"
            )
        if self.kv == "contiguous" and parse_size("swap_memory", self.swap_memory):
            raise ConfigError(
                "kv=contiguous never preempts, so there is nothing to swap: leave out swap_memory"
            )
        if self.kv == "contiguous" and self.preemption != "recompute":
            raise ConfigError(
                f"kv=contiguous never preempts: leave out preemption={self.preemption}"
            )
        if self.map_forks is not None and self.kv != "virtual":
            raise ConfigError("map_forks is for kv=virtual: there are no slots to map otherwise")
        if self.preemption == "recompute" and parse_size("swap_memory", self.swap_memory):
            raise ConfigError(
                f"swap_memory={self.swap_memory} is not used with preemption=recompute: set "
                "preemption to swap or auto, or leave out swap_memory"
            )
        if self.preemption != "recompute" and not parse_size("swap_memory", self.swap_memory):
            raise ConfigError(
                f"preemption={self.preemption} needs host memory to swap to: set swap_memory, for "
                "example to 1GiB, or use preemption=recompute"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < (
            self.max_num_seqs or 1
        ):
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes one token a "
                "step; raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how to listen. Times are in seconds, sizes in bytes.

    ``served_model_names`` are what clients may call the model (empty: its own name); ``*`` among
    them takes any name. With ``api_keys`` a client must send one of them; ``cors_origins`` may use
    the API from a browser (``*``: all). ``drain_timeout_s`` is what running requests get at
    shutdown, ``stall_timeout_s`` how long the engine may work without ending a step before
    ``/health`` fails, ``client_timeout_s`` how long a client may take to send a request, or leave
    an answer unread. ``admin_endpoints`` adds those that change the server. ``prefixes`` are files
    whose prompts are registered at the start.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    admin_endpoints: bool = False
    prefixes: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    client_timeout_s: float = 60.0
    max_request_bytes: int = 16 * 2**20
    max_connections: int = 4096
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "cors_origins", "prefixes"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if not all(map(_fits_a_header, self.api_keys)):
            # Which, is not told: it is a secret.
            raise ConfigError(
                "api_keys: one has a space, or a character that not every client sends alike in a "
                "header; use letters, digits and punctuation of ASCII"
            )
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _is_origin(origin):
                raise ConfigError(
                    f"cors_origins: no browser sends {origin!r} as its origin; write scheme, host "
                    "and a port that is not the scheme's own in lower case and nothing behind "
                    "them, such as https://app.example or http://127.0.0.1:3000, or * for all"
                )
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError(
                f"host must be an address such as 127.0.0.1, or 0.0.0.0 for every one of this "
                f"machine, got {self.host!r}"
            )
        _range("port", self.port, 0, 65535)
        _range("max_request_bytes", self.max_request_bytes, 1024, 2**31)
        _range("max_connections", self.max_connections, 1, 1_000_000)
        _seconds("drain_timeout_s", self.drain_timeout_s, 0)
        _seconds("stall_timeout_s", self.stall_timeout_s, 0.001)
        _seconds("client_timeout_s", self.client_timeout_s, 0.001)
        _choice("log_format", self.log_format, LOG_FORMATS)
        _choice("log_level", self.log_level, LOG_LEVELS)


def api_keys_of(given: Sequence[str]) -> tuple[str, ...]:
    """The keys that were given, else those of ``$OCTAVO_API_KEY``, separated by commas."""
    return tuple(given) or tuple(
        key for part in os.environ.get("OCTAVO_API_KEY", "").split(",") if (key := part.strip())
    )


def client_key(given: str | None) -> str | None:
    """The key that a client sends: what was given, else the first of ``$OCTAVO_API_KEY``.

    Raises:
        ConfigError: it cannot be sent; it is a secret, and not told.
    """
    key = next(iter(api_keys_of([given] if given else [])), None)
    if key is not None and not _fits_a_header(key):
        raise ConfigError(
            "the server's key, from --api-key or $OCTAVO_API_KEY, has a space, or a character that "
            "cannot be sent in a header; give it as the server was given it"
        )
    return key


def _fits_a_header(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key


def _is_origin(text: str) -> bool:
    """Whether a browser would write an origin so: what it sends is compared as a text."""
    if re.fullmatch(r"(http://.*:80|https://.*:443)", text):
        return False
    return re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+", text) is not None


def cache_dir() -> Path:
    """Where downloaded models are kept: ``$OCTAVO_CACHE``, else the user's cache directory."""
    if override := os.environ.get("OCTAVO_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "octavo"


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    try:
        texts = () if isinstance(values, str) else tuple(values)
    except TypeError:
        texts = (None,)  # type: ignore[assignment]
    if isinstance(values, str) or not all(isinstance(text, str) and text for text in texts):
        # What there is, is not told: keys are secrets.
        raise ConfigError(f"{name} must hold non-empty texts, in a list")
    return texts


def _seconds(name: str, value: float, low: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= 86400:
        raise ConfigError(f"{name} must be between {low:g} and 86400 seconds, got {value!r}")


def _range(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
