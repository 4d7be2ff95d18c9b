"""The baseline that runs outside the engine: its greedy tokens are the engine's."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from engine.tiny_engine import build, pool, run, save_llama
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.workload.items import WorkItem
from octavo.workload.prompts import prompt_token_ids

SCRIPT = Path(__file__).parents[2] / "scripts" / "hf_throughput.py"
ITEMS = [WorkItem(0.0, prompt, output) for prompt, output in ((5, 9), (17, 3), (1, 12), (8, 1))]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_its_tokens_are_those_of_every_manager(
    script: dict[str, Any], model: Path, batch_size: int
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    reference.generation_config.eos_token_id = None
    found = script["generate"](reference, ITEMS, batch_size, seed=3)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = []
    for number, item in enumerate(ITEMS):
        prompt = prompt_token_ids(
            item, number, lowest=0, highest=reference.config.vocab_size, seed=3
        )
        requests.append(Request(number, int_array(prompt), greedy, item.num_output_tokens, seed=0))
    for options in ({}, {"kv": "contiguous", "attention": "auto", "scheduler": "static"}):
        core, _ = build(model, kv_memory=pool(64), **options)
        assert run(core, requests) == dict(enumerate(found))
        core.close()


def test_the_whole_script(
    script: dict[str, Any], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-requests", "3", "--input-len", "6", "--output-len", "4", "--batch-size", "2"]
    script["main"]([str(model / "config.json"), "--dummy", *sizes, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens"] == 12
    assert report["prompt_tokens"] == 18
    assert report["output_tokens_per_second"] > 0
    with pytest.raises(SystemExit):
        script["main"]([str(model), *sizes[:-1], "0"])
    assert "at least 1" in capsys.readouterr().err


def test_what_it_takes_is_told_without_transformers(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as told:
        script["main"](["--help"])
    assert told.value.code == 0
    with pytest.raises(SystemExit) as refused:
        script["main"](["model"])
    assert refused.value.code == 2
    assert "this measures Transformers, which cannot be imported" in capsys.readouterr().err
