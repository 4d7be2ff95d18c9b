from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.plan import KVCapacity
from octavo.core.request import ContextLengthError, Request, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.scheduling.admission import Limits, resolve_request

ALL_BUT_EOS = tuple((token_id,) for token_id in range(100) if token_id != 2)
LIMITS = Limits(vocab_size=100, max_model_len=32, num_kv_tokens=64, eos_token_ids=(2,))


def resolve(prompt: list[int], limits: Limits = LIMITS, **params: object) -> Request:
    return resolve_request(7, prompt, SamplingParams(**params), limits, random_seed=5)  # type: ignore[arg-type]


def test_what_the_client_left_open_is_filled_in() -> None:
    request = resolve([1, 2, 3], max_tokens=None, stop_token_ids=(9, 2))
    assert request.max_tokens == 29
    assert request.max_length == 32
    assert request.seed == 5
    assert request.stop_token_ids == (2, 9)
    assert resolve([1], seed=-1).seed == 2**64 - 1
    assert resolve([1], ignore_eos=True, stop_token_ids=(9,)).stop_token_ids == (9,)


@pytest.mark.parametrize("token_id", [-1, 100, 2**40, -(2**70)])
def test_a_token_id_out_of_range_is_named(token_id: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token_id} is out of range"):
        resolve([1, token_id])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        resolve([])


def test_too_long_says_how_much_would_fit() -> None:
    with pytest.raises(ContextLengthError, match="at most 22 tokens"):
        resolve([1] * 10, max_tokens=23)
    assert resolve([1] * 10, max_tokens=22).max_length == 32
    with pytest.raises(ContextLengthError, match="prompt alone has 32"):
        resolve([1] * 32, max_tokens=1)
    with pytest.raises(ContextLengthError, match="prompt alone"):
        resolve([1] * 32, max_tokens=None)


def test_a_pool_smaller_than_the_context_is_named() -> None:
    small = Limits.of(KVCapacity(num_blocks=3, block_size=4, block_bytes=1), 100, 32, ())
    # The last token's keys and values are never needed: 8 slots hold a sequence of 9.
    assert resolve([1] * 4, small, max_tokens=5).max_length == 9
    with pytest.raises(ContextLengthError, match=r"8 tokens \(raise --kv-memory"):
        resolve([1] * 4, small, max_tokens=6)


@pytest.mark.parametrize(
    ("max_blocks", "message"),
    [(100, "serve up to 32"), (5, "serve up to 17"), (3, "all that it can have on this machine")],
)
def test_a_pool_that_can_grow_says_how_far(max_blocks: int, message: str) -> None:
    """What the option was is the start's: since then the pool may have been resized."""
    capacity = KVCapacity(num_blocks=3, block_size=4, block_bytes=1, max_blocks=max_blocks)
    with pytest.raises(ContextLengthError, match=message) as caught:
        resolve([1] * 4, Limits.of(capacity, 100, 32, ()), max_tokens=6)
    assert ("/kv/resize" in str(caught.value)) == (max_blocks > 3)


def test_a_stop_token_out_of_range_is_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids: 100"):
        resolve([1], stop_token_ids=(100,))


def test_a_biased_token_out_of_range_is_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias: 100"):
        resolve([1], logit_bias={100: 1.0})


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words_token_ids"])
def test_other_tokens_out_of_range_are_refused(field: str) -> None:
    value = ((1, 100),) if field.startswith("bad") else (3, 100)
    with pytest.raises(RequestError, match=f"{field}: 100 is out of range"):
        resolve([1], **{field: value})


def test_min_tokens_must_fit() -> None:
    with pytest.raises(RequestError, match=r"min_tokens is 30, but at most 29"):
        resolve([1, 2, 3], max_tokens=None, min_tokens=30)
    assert resolve([1, 2, 3], max_tokens=None, min_tokens=29).max_tokens == 29


@pytest.mark.parametrize(
    ("params", "is_possible"),
    [
        ({"allowed_token_ids": (3,), "bad_words_token_ids": ((3,),)}, False),
        ({"allowed_token_ids": (3, 4), "bad_words_token_ids": ((3,),)}, True),
        ({"allowed_token_ids": (3,), "bad_words_token_ids": ((3, 3),)}, False),
        ({"allowed_token_ids": (2,)}, True),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, False),
        ({"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": (2, 9), "min_tokens": 1, "stop_token_ids": (9,)}, False),
        ({"bad_words_token_ids": (*ALL_BUT_EOS, (2,))}, False),
        ({"bad_words_token_ids": ALL_BUT_EOS}, True),
        ({"bad_words_token_ids": ALL_BUT_EOS, "min_tokens": 1}, False),
    ],
)
def test_masks_must_leave_a_token(params: dict[str, object], is_possible: bool) -> None:
    if is_possible:
        resolve([1], **params)
    else:
        with pytest.raises(RequestError, match="allowed_token_ids, bad_words and min_tokens"):
            resolve([1], **params)


def test_bad_words_must_be_tokens_by_now() -> None:
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        resolve([1], bad_words=("word",))


def test_ends_that_the_vocabulary_lacks_are_left_out() -> None:
    limits = Limits(vocab_size=100, max_model_len=32, num_kv_tokens=64, eos_token_ids=(2, 100))
    assert resolve([1], limits).stop_token_ids == (2,)


def beams(n: int = 1, limits: Limits = LIMITS, **params: object) -> Request:
    return resolve_request(
        7,
        [1, 2],
        SamplingParams(use_beam_search=True, **params),  # type: ignore[arg-type]
        limits,
        random_seed=5,
        n=n,
    )


def test_a_search_is_as_wide_as_asked_or_as_n() -> None:
    assert beams(n=3).beam_width == 3
    assert beams(n=2, beam_width=4).num_sequences == 4
    assert resolve([1]).beam_width == 0
    with pytest.raises(RequestError, match="n is 3, but a beam search of beam_width 2"):
        beams(n=3, beam_width=2)
    with pytest.raises(RequestError, match="beam_width is 33, but it must be from 1 to 32"):
        beams(n=33)
    with pytest.raises(RequestError, match="beam_width is 4, but it must be from 1 to 2"):
        beams(beam_width=4, limits=replace(LIMITS, max_num_seqs=2))
    with pytest.raises(RequestError, match="n is 0"):
        beams(n=0, beam_width=4)


def test_a_search_needs_tokens_that_do_not_stop() -> None:
    small = replace(LIMITS, vocab_size=10)
    found = beams(beam_width=6, limits=small, stop_token_ids=(3, 4, 5), max_tokens=4)
    assert (found.beam_width, found.stop_token_ids) == (6, (2, 3, 4, 5))
    with pytest.raises(RequestError, match="beam_width 6 and 5 stop tokens are too many"):
        beams(beam_width=6, limits=small, stop_token_ids=(3, 4, 5, 6), max_tokens=4)
    with pytest.raises(RequestError, match="at most 64 are possible"):
        beams(beam_width=32, stop_token_ids=tuple(range(20, 52)), max_tokens=1)


def test_all_beams_have_to_fit() -> None:
    limits = replace(LIMITS, block_size=4)  # 16 blocks
    assert beams(beam_width=4, limits=limits, max_tokens=None).max_tokens == 4 * 4 + 1 - 2
    with pytest.raises(
        ContextLengthError, match="4 beams of 2 prompt and 16 new tokens do not fit"
    ):
        beams(beam_width=4, limits=limits, max_tokens=16)


def test_without_sharing_each_sequence_needs_all_its_blocks() -> None:
    limits = replace(LIMITS, block_size=4)
    assert limits.longest(8, 3) == 2 * 4 + 14 // 3 * 4 + 1
    assert replace(limits, sharing=False).longest(8, 3) == 16 // 3 * 4 + 1
