"""A deterministic engine says the same to the last bit, whatever runs beside a request and however
its prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from execution.gpu.test_gpu_engine import ON_GPU, gpu_engine
from execution.models.tiny_models import tiny_llama, tiny_qwen3
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
only_on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]
VOCAB = 2048


@pytest.fixture(autouse=True)
def products_summed_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU sums them. Interpreted, products are NumPy's, and on some processors the order of a
    sum depends on where in the tile it is."""
    if ON_GPU:
        return
    from triton.runtime import interpreter

    def create_dot(builder: object, a: Any, b: Any, acc: Any, *options: object) -> Any:
        terms = a.data[..., None].astype(acc.data.dtype) * b.data[..., None, :, :]
        return interpreter.TensorHandle(terms.sum(axis=-2) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@dataclass(slots=True)
class Told:
    """What an engine said of a request: tokens and the bits of their log probabilities, those of
    its prompt by their positions, and how many rows sampled at once with it at most."""

    tokens: list[tuple[int, bytes]] = field(default_factory=list)
    prompt: dict[int, bytes] = field(default_factory=dict)
    most_rows: int = 0


def tell(core: EngineCore, requests: Sequence[Request]) -> dict[int, Told]:
    """Run the requests together."""
    told = {request.number: Told() for request in requests}
    for request in requests:
        core.scheduler.add(request)
    while core.has_work:
        outputs = core.step()
        assert all(finished.error is None for finished in outputs.finished)
        for piece in outputs.prompt_logprobs:
            for place, logprob in enumerate(piece.scores.logprobs):
                told[piece.owner].prompt[piece.start + place] = logprob.tobytes()
        if outputs.logprobs is None:
            continue
        scores = outputs.logprobs.scores.logprobs
        numbers = outputs.numbers[outputs.logprobs.places].tolist()
        token_ids = outputs.token_ids[outputs.logprobs.places].tolist()
        for number, token, logprob in zip(numbers, token_ids, scores, strict=True):
            told[number].tokens.append((token, logprob.tobytes()))
            told[number].most_rows = max(told[number].most_rows, len(outputs.numbers))
    assert core.scheduler.num_preemptions == 0
    return told


def request(
    number: int,
    length: int,
    max_tokens: int,
    *,
    vocab_size: int = 96,
    scores: bool = True,
    scores_prompt: bool = False,
    **asked: Any,
) -> Request:
    prompt = np.random.default_rng(number).integers(3, vocab_size, length)
    params = SamplingParams(
        temperature=asked.pop("temperature", 0.0),
        max_tokens=max_tokens,
        logprobs=0 if scores else None,
        prompt_logprobs=0 if scores_prompt else None,
        **asked,
    )
    return Request(number, int_array(prompt), params, max_tokens, seed=0)


@pytest.mark.parametrize(
    "kinds",
    [{}, {"kv": "virtual"}, pytest.param({"weights": "fp8", "kv_dtype": "fp8"}, marks=only_on_gpu)],
)
def test_few_short_requests(tmp_path: Path, kinds: dict[str, str]) -> None:
    """Alone, and together in chunks of 29 and of 16 tokens: greedy and at random, with penalties,
    of a vocabulary that four does not divide. One is long enough, alone, for the library's
    products."""
    tiny_qwen3(head_dim=16, vocab_size=99).save_pretrained(tmp_path)
    asked = [
        request(0, 9, 2),
        request(1, 14, 2, scores_prompt=True),
        request(2, 5, 3),
        request(3, 7, 3, temperature=0.9, top_p=0.9, presence_penalty=0.5),
        request(4, 70, 2),
    ]
    found = []
    for batches, chunk in (([[one] for one in asked], 80), ([asked], 29), ([asked[::-1]], 16)):
        core = gpu_engine(
            tmp_path, num_blocks=60, depth=1, chunk=chunk, is_invariant=True,
            dtype="bfloat16" if ON_GPU else "float32", **kinds,
        )  # fmt: skip
        told: dict[int, Told] = {}
        for batch in batches:
            told |= tell(core, batch)
        core.close()
        found.append({number: (told[number].tokens, told[number].prompt) for number in told})
    assert found[0] == found[1] == found[2]
    assert [len(found[0][number][0]) for number in range(4)] == [2, 2, 3, 3]
    assert sorted(found[0][1][1]) == list(range(1, 14))
    assert told[2].most_rows == 4


def crowd(num_others: int, scores_prompt: bool) -> list[Request]:
    """Number 0 has 3000 tokens and generates 24; half of the others are there before it. They live
    long enough for all to run at once."""
    long = request(0, 3000, 24, vocab_size=VOCAB, scores_prompt=scores_prompt)
    lengths = np.random.default_rng(num_others).integers(1, 40, num_others)
    lengths[::20] = 300
    others = [
        request(1 + place, int(length), 80 + place % 25, vocab_size=VOCAB, scores=place % 3 == 0)
        for place, length in enumerate(lengths)
    ]
    return [*others[: num_others // 2], long, *others[num_others // 2 :]]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("scores_prompt", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_request_in_any_crowd(tmp_path: Path, head_dim: int, scores_prompt: bool) -> None:
    """Batches cross the numbers of rows and of tokens at which other kernels, tiles and captured
    sizes would be chosen: 16, 64, 128 and 129 rows, 2048 tokens. Nobody shares a prefix."""
    tiny_llama(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=4096,
        initializer_range=0.05,
    ).save_pretrained(tmp_path)  # fmt: skip
    found: dict[tuple[int, int], Told] = {}
    for chunk in (256, 4096):
        core = gpu_engine(
            tmp_path, num_blocks=1600, depth=2, chunk=chunk, dtype="bfloat16", is_invariant=True,
            max_num_seqs=144, block_size=16,
        )  # fmt: skip
        for num_others in (0, 20, 70, 140):
            salt = b"%d" % num_others
            asked = [replace(one, cache_salt=salt) for one in crowd(num_others, scores_prompt)]
            found[chunk, num_others] = tell(core, asked)[0]
        core.close()
    alone = found[256, 0]
    assert len(alone.tokens) == 24
    assert len(alone.prompt) == (2999 if scores_prompt else 0)
    for (chunk, num_others), told in found.items():
        assert told.most_rows == 1 + num_others, "all at once"
        assert told.tokens == alone.tokens, f"beside {num_others}, steps of {chunk} tokens"
        assert told.prompt == alone.prompt, f"beside {num_others}, steps of {chunk} tokens"
