"""Both translations measured on a tiny model, on a CPU: every figure is there and is positive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import translation
from octavo.bench.translation import line, measure
from octavo.core.plan import MapBlocks, StepPlan

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "torch_dtype": "float32", "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    monkeypatch.setattr(translation, "_CONTEXT", 12)
    monkeypatch.setattr(translation, "_STEPS", 12)
    monkeypatch.setattr(translation, "_RATE", 200.0)
    monkeypatch.setattr(translation, "DECODE_ROWS", (1, 3))
    monkeypatch.setattr(translation, "HIT_TOKENS", (16, 48))
    monkeypatch.setattr(translation, "_lengths", lambda count: [(9, 3), (20, 2), (5, 4)])
    options = {"device": "cpu", "kv_memory": "8MiB", "max_model_len": 512}
    kinds = {kind: {"kv": kind, **options} for kind in ("paged", "virtual")}
    monkeypatch.setattr(translation, "KINDS", kinds)
    # `resources.files(...) / ... / name` of an absolute path is that path.
    return str(path.with_suffix(""))


def test_every_figure_of_both_translations(shape: str) -> None:
    told: list[dict[str, Any]] = []
    rows = measure(
        shape, ("prefill", "decode", "offline", "load"), ("paged", "virtual"), told.append, (40,)
    )
    assert rows == told
    works = [row["work"] for row in rows if row["kind"] == "paged"]
    assert works == ["decode 1", "decode 3", "prefill 40", "offline", "load"]
    assert [row["work"] for row in rows if row["kind"] == "virtual"] == works
    for row in rows:
        figures = {name: value for name, value in row.items() if name not in ("work", "kind")}
        assert figures
        # Waiting may cost no CPU time, and the mapping thread may have nothing to do.
        least = {"waiting_cpu_ms", "mapping_cpu_ms"}
        assert all(value > 0 or name in least for name, value in figures.items()), row
        assert row["kind"] == "virtual" or not figures.get("mapping_cpu_ms")
        assert all(name in line(row) for name in figures)


@pytest.mark.parametrize("kind", ["paged", "virtual"])
def test_hits_are_hits(shape: str, kind: str) -> None:
    """And under ``virtual`` map what they are said to map: each plan's blocks, in turn."""
    with translation.opened(shape, kind, prefix_caching=True) as llm:
        block = llm._core.scheduler.manager.block_size
        own = block + 1
        launch, counts = llm._core.executor.launch, []

        def noting(plan: StepPlan) -> None:
            commands = [command for command in plan.commands if isinstance(command, MapBlocks)]
            counts.append(sum(len(command) for command in commands if not command.is_ahead))
            launch(plan)

        llm._core.executor.launch = noting  # type: ignore[method-assign]
        found = translation.prefix_hits(llm, 4 * block, own, repeats=3)
        if kind == "paged":
            assert set(found) == {"hit_ms", "computed_ms"}
            assert not any(counts)
        else:
            assert set(found) == {"hit_mapped_ms", "hit_shown_ms", "computed_ms"}
            # The first is not counted. A slot that shows the prefix still shows, behind it, the
            # full block of the last one's own, which is cached, and one that is free again.
            assert counts[1:] == [6, 1, 6] * 3
        assert all(value > 0 for value in found.values())
        with pytest.raises(RuntimeError, match="tokens were cached"):
            translation.prefix_hits(llm, 2 * block + 1, repeats=1)
