"""The savings against a count by hand, and the whole command on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.tiny_engine import pool, save_gguf
from octavo import output_files
from octavo.bench import sharing
from octavo.bench.shared_prefix import shared_prefix
from octavo.cli import app
from octavo.memory.paged import PagedManager
from octavo.workload.items import WorkItem
from octavo.workload.traces import load_trace


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_blocks_are_counted_in_each_table_and_once() -> None:
    manager = PagedManager(9, 4, 3)
    assert sharing.blocks_held(manager, []) == (0, 0)
    manager.admit(0, np.arange(8, dtype=np.int32))
    manager.fork(0, 1, 8)
    manager.grow(1, 9)
    assert sharing.blocks_held(manager, [0, 1]) == (5, 3)


def test_samples_save_the_prompts_full_blocks() -> None:
    """Ten blocks of prompt are shared, one block of output is each sample's own."""
    figures = sharing.policy_saving([WorkItem(0.0, 160, 15)], 4, False)
    # While the prompt waits for its result only the first sample has a table.
    assert 100 * 30 / 44 * 13 / 15 < figures["saved_percent"] <= 100 * 30 / 44
    assert figures["num_preemptions"] == 0


def test_beams_save_more_than_samples_and_the_run_repeats() -> None:
    items = load_trace(sharing.lengths_path())[:12]
    found = {
        (is_beam, width): sharing.policy_saving(items, width, is_beam, num_blocks=600)
        for is_beam in (False, True)
        for width in (2, 4)
    }
    for width in (2, 4):
        most = 100 * (width - 1) / width
        samples = found[False, width]["saved_percent"]
        assert 0 < samples < found[True, width]["saved_percent"] < most
    assert found[True, 4] == sharing.policy_saving(items, 4, True, num_blocks=600)


def test_made_up_probabilities_are_probabilities() -> None:
    random = np.random.default_rng(1)
    ids, logprobs = sharing.made_up_tops(random, np.zeros(2000, dtype=np.int32), 6)
    assert ids.shape == logprobs.shape == (2000, 6)
    assert (np.diff(logprobs, axis=1) <= 0).all()
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert (np.exp(logprobs).sum(axis=1) <= 1 + 1e-6).all()
    # The mean largest part of the Poisson-Dirichlet distribution (the Golomb-Dickman constant).
    assert float(np.exp(logprobs[:, 0]).mean()) == pytest.approx(0.624, abs=0.02)


def test_the_lengths_that_ship_are_those_of_the_paper() -> None:
    items = load_trace(sharing.lengths_path())
    assert len(items) == 1000
    assert np.mean([i.num_prompt_tokens for i in items]) == pytest.approx(161.2, rel=0.05)
    assert np.mean([i.num_output_tokens for i in items]) == pytest.approx(338.0, rel=0.05)
    assert max(i.num_prompt_tokens + i.num_output_tokens for i in items) < 2048


def test_a_shared_prefix_is_computed_once_or_not_at_all(gguf: Path) -> None:
    report = shared_prefix(
        str(gguf),
        num_requests=4,
        prefix_tokens=48,
        own_tokens=8,
        output_tokens=4,
        rounds=2,
        kv_memory=pool(32),
        attention="gather",
    )
    assert [f["caching"] for f in report["figures"]] == ["off", "on", "registered"]
    assert [f["cached_tokens"] for f in report["figures"]] == [0, 3 * 48, 4 * 48]
    assert report["figures"][0]["speedup"] == 1.0
    assert all(len(f["all_seconds"]) == 2 for f in report["figures"])


def test_the_whole_command(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(model: str, **_: Any) -> dict[str, Any]:
        return shared_prefix(
            model, num_requests=2, prefix_tokens=32, own_tokens=4, output_tokens=2, rounds=1
        )

    monkeypatch.setattr(sharing, "shared_prefix", small)
    monkeypatch.setattr(sharing, "_MODEL_MAX_LEN", 60)
    picture = tmp_path / "sharing.png"
    # Enough for a full pool, and two that are short enough for the model.
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "300,60\n150,90\n" * 9 + "20,12\n25,20\n")
    arguments = ["bench", "sharing", str(gguf), "--trace", str(trace), "--num-requests", "20"]
    arguments += ["--model-requests", "2"]
    command = [*arguments, "--seed", "1", "--json", "--plot", str(picture)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [f["width"] for f in report["policy"]] == [2, 4, 6, 2, 4, 6]
    assert report["model"]["num_requests"] == 2
    for figure in report["model"]["savings"]:
        assert 0 < figure["saved_percent"] < 100 * (figure["width"] - 1) / figure["width"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = sharing.table(report)
    assert "2 prompts of 32 shared and 4 own tokens" in text
    assert "44.3 to 66.3" in text


def test_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "WIDTHS", (2,))
    command = ["bench", "sharing", "--policy-only", "--num-requests", "10"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "parallel       2" in result.stdout
    assert "model" not in sharing.run(None, num_requests=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--model-requests", "0"], "--model-requests must be at least 1, got 0"),
        (["--policy-only", "--rounds", "2"], "--policy-only runs no model"),
        (["--policy-only", "smollm2-135m"], "leave it, or the model, out"),
        (["--seed", "-1"], "--seed"),
        (["--num-requests", "1", "--trace", "LENGTHS"], "none of the 1 requests has a prompt of"),
    ],
)
def test_what_would_change_nothing_is_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n3,3\n")
    lengths = str(tmp_path / "lengths.csv")
    arguments = [lengths if argument == "LENGTHS" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["bench", "sharing", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", "sharing", "--plot", "x.png"])
    assert result.exit_code == 2
    assert "pip install 'matplotlib>=3.10'" in result.stderr


def test_the_help_lists_it() -> None:
    assert "sharing" in CliRunner().invoke(app, ["bench", "--help"]).output
