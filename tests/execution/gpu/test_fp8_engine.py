"""The GPU's engine with weights in fp8, and with keys and values in fp8 and fp16."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny_engine import build, run
from execution.gpu.test_gpu_engine import BLOCK_SIZE, MAX_NUM_SEQS, gpu_engine, requests
from execution.models.fp8_checkpoints import compressed, save_fp8
from execution.models.reference_attention import ReferenceAttention
from execution.models.tiny_models import tiny_qwen3
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.execution.models.loading import load_model

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in fp8, scales of keys and values that are not 1."""
    folder = tmp_path_factory.mktemp("fp8")
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(0.01 * (1 + layer))
        for layer in range(2)
        for part in "kv"
    }
    save_fp8(folder, tiny_qwen3(head_dim=16), compressed(), extra=scales)
    return folder


def test_fp8_weights_give_the_tokens_of_what_they_stand_for(model: Path) -> None:
    """A CPU's engine multiplies with them in float32, as a deterministic one does."""
    asked = requests(max_tokens=4)[:2]
    plain, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    core = gpu_engine(model, num_blocks=60, depth=2, chunk=13, weights="fp8", is_invariant=True)
    decoder = core.executor.runner.model.model  # type: ignore[attr-defined]
    linears = [linear for layer in decoder.layers for linear in layer.linears()]
    assert {kind for linear in linears for kind in linear.kinds()} == {"fp8"}
    assert run(core, asked) == run(plain, asked)
    core.close()
    plain.close()


def test_blocks_in_fp8_are_shared_copied_and_swapped(model: Path) -> None:
    """The same tokens with room for all and small chunks, and swapped to host memory and back."""
    greedy, samples, _, beams = requests(max_tokens=3)
    found = []
    for num_blocks, depth, chunk, num_host_blocks in ((60, 1, 13, 0), (8, 2, 32, 16)):
        core = gpu_engine(
            model, num_blocks=num_blocks, depth=depth, chunk=chunk,
            num_host_blocks=num_host_blocks, kv_dtype="fp8",
        )  # fmt: skip
        runner = core.executor.runner  # type: ignore[attr-defined]
        assert runner.arena.kv.dtype == torch.float8_e4m3fn
        assert runner.arena.layout.dtype_bytes == 1
        found.append(run(core, [greedy, samples, beams], beams={}))
        assert bool(core.scheduler.num_swaps) == bool(num_host_blocks)
        core.close()
    assert found[0] == found[1]


def test_scores_are_those_of_rounded_keys_and_values(model: Path) -> None:
    """Of a prompt in chunks and then of tokens one by one, against PyTorch in float32 with the same
    rounding; and not those of keys and values that are not rounded."""
    prompt = np.random.default_rng(3).integers(3, 96, 20).tolist()
    core = gpu_engine(model, num_blocks=60, depth=1, chunk=9, kv_dtype="fp8")
    core.scheduler.add(
        Request(
            number=0,
            prompt_token_ids=int_array(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, prompt_logprobs=0),
            max_tokens=4,
            seed=0,
            stop_token_ids=(),
        )
    )
    found: list[float] = []
    while core.has_work:
        outputs = core.step()
        prompt += outputs.token_ids.tolist()
        for piece in outputs.prompt_logprobs:
            found += piece.scores.logprobs.tolist()
        if outputs.logprobs is not None:
            found += outputs.logprobs.scores.logprobs.tolist()
    core.close()
    decoder = load_model(model, dtype="float32")
    errors = []
    for scales in (decoder.kv_scales, None):
        logits = decoder.logits(ReferenceAttention(decoder, scales).run(prompt[:-1]))
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        errors.append((torch.tensor(found) - expected).abs().mean())
    assert errors[0] < 0.01 < 0.05 < errors[1] < 0.5


def test_what_keys_and_values_are_kept_in(model: Path) -> None:
    from octavo.engine.gpu_parts import resolve_kv_dtype

    decoder = load_model(model, dtype="float32")
    kinds = {"auto": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    kinds |= {"fp8": torch.float8_e4m3fn}
    assert {asked: resolve_kv_dtype(asked, decoder) for asked in kinds} == kinds
    assert decoder.config.fp8 is not None
    fp8 = dataclasses.replace(decoder.config.fp8, kv=True)
    decoder.config = dataclasses.replace(decoder.config, fp8=fp8)
    assert resolve_kv_dtype("auto", decoder) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "fp16"), ("float16", "auto")] + [("bfloat16", "fp16")] * torch.cuda.is_available(),
)
def test_keys_and_values_in_16_bits(model: Path, dtype: str, kv_dtype: str) -> None:
    """Of a prompt in chunks and of generated tokens: close to float32, and rounded."""
    prompt = np.random.default_rng(5).integers(3, 96, 12).tolist()
    found: list[float] = []
    core = gpu_engine(model, num_blocks=60, depth=1, chunk=9, dtype=dtype, kv_dtype=kv_dtype)
    assert core.executor.runner.arena.kv.dtype == torch.float16  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
    core.scheduler.add(Request(0, int_array(prompt), params, 3, seed=0))
    while core.has_work:
        outputs = core.step()
        prompt += outputs.token_ids.tolist()
        for piece in outputs.prompt_logprobs:
            found += piece.scores.logprobs.tolist()
        if outputs.logprobs is not None:
            found += outputs.logprobs.scores.logprobs.tolist()
    core.close()
    decoder = load_model(model, dtype="float32")
    logits = decoder.logits(ReferenceAttention(decoder, None).run(prompt[:-1]))
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert len(found) == len(expected) == 14
    error = (torch.tensor(found) - expected).abs().mean()
    assert 1e-6 < error < (0.05 if dtype == "bfloat16" else 0.01)
