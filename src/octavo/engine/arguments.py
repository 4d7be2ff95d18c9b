"""What `LLM` takes: one prompt or many, one set of parameters or one for each. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeAlias

from octavo.core.request import RequestError
from octavo.core.sampling_params import SamplingParams, shown

Prompt: TypeAlias = "str | Sequence[int]"


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt: a text, or a flat list (or array) of token ids."""
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be a text, a list of token ids, or a list of these, got {prompts!r}"
        )
    return isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))


def _is_list(value: object) -> bool:
    """Whether it has items in an order: a text, a sequence, or an array."""
    if isinstance(value, bytes | bytearray | Mapping) or not hasattr(value, "__getitem__"):
        return False
    # An array of no dimension has the method, and no items.
    return hasattr(value, "__len__") and getattr(value, "shape", None) != ()


def token_ids_of(prompt: Sequence[int]) -> list[int]:
    """A list of whole numbers; whether they are in the vocabulary is checked later."""
    if not _is_list(prompt):
        raise RequestError(f"a prompt must be a text or a list of token ids, got {prompt!r}")
    kinds = set(map(type, prompt))
    if kinds == {int} and isinstance(prompt, list):
        return prompt  # long prompts are not looked at one by one
    for item in prompt:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise RequestError(f"a token id must be an integer, got {item!r}")
    return [int(item) for item in prompt]


def check_messages(messages: object) -> None:
    """Refuse what is no conversation; what its messages say is the chat template's to check."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError(
            "messages must be a list of objects with role and content, such as "
            f'[{{"role": "user", "content": "Hi"}}], got {shown(messages)}'
        )


def params_for(
    items: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(items)
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"params must be SamplingParams, one or a list, got {params!r}")
    if len(params) != len(items):
        raise RequestError(f"{len(items)} prompts but {len(params)} sampling parameters")
    return params


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Any]:
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda count: bar.advance(task, count) if count else None
