"""Tiny models on disk, and engines over them with pools of a wanted number of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from execution.models.tiny_models import tiny_llama, write_gguf
from octavo.config import EngineConfig
from octavo.core.request import BeamResult, FinishReason, Request
from octavo.engine.build import build_engine
from octavo.engine.core import EngineCore
from octavo.engine.llm import LLM
from octavo.engine.report import EngineReport
from text.tiny_tokenizers import byte_level_metadata

# Of the shape in tiny_models: 2 layers, keys and values, 2 heads, 16 dimensions, 4 bytes.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_llama(folder: Path, **changes: Any) -> Path:
    """A Hugging Face directory without a tokenizer."""
    tiny_llama(**changes).save_pretrained(folder)
    return folder


def save_gguf(path: Path, **metadata: Any) -> Path:
    """A GGUF file with a byte-level tokenizer, whose token 0 ends a turn."""
    words = byte_level_metadata(chat_template=CHAT_TEMPLATE) | metadata
    vocab_size = len(words["tokenizer.ggml.tokens"])
    return write_gguf(path, tiny_llama(vocab_size=vocab_size), metadata=words)


def pool(num_blocks: int, block_size: int = 16) -> str:
    """``kv_memory`` for ``num_blocks`` blocks beside the null block."""
    return str((num_blocks + 1) * block_size * TOKEN_BYTES)


def options(model: Path, **changes: Any) -> dict[str, Any]:
    """Small, single-threaded and exact, unless ``changes`` say otherwise."""
    base: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_num_seqs": 4,
        "kv_memory": pool(32),
        "attention": "gather",
    }
    return base | changes


def build(model: Path, **changes: Any) -> tuple[EngineCore, EngineReport]:
    return build_engine(EngineConfig(**options(model, **changes)))


def make_llm(model: Path, **changes: Any) -> LLM:
    return LLM(**options(model, **changes))


def run(
    core: EngineCore, requests: list[Request], beams: dict[int, BeamResult] | None = None
) -> dict[int, list[int]]:
    """Each request's tokens; the engine's invariants are checked at every step. ``beams`` gets the
    results of searches."""
    found: dict[int, list[int]] = {
        number: [] for r in requests for number in range(r.number, r.number + r.n)
    }
    for request in requests:
        core.scheduler.add(request)
    while core.has_work:
        outputs = core.step()
        core.scheduler.check()
        for number, token in zip(outputs.numbers.tolist(), outputs.token_ids.tolist(), strict=True):
            found[number].append(token)
        for beam in outputs.beams:
            found[beam.number] = beam.token_ids.tolist()
            if beams is not None:
                beams[beam.number] = beam
        assert all(finished.reason is not FinishReason.ERROR for finished in outputs.finished)
    return found


def is_idle(llm: LLM) -> bool:
    """Nothing is left behind: no work, no row, no block."""
    scheduler = llm._core.scheduler
    scheduler.check()
    manager = scheduler.manager
    return (
        not scheduler.has_work
        and not scheduler.rows.num_used
        and manager.num_free_blocks == manager.num_usable_blocks
    )
