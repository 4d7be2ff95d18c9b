from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from octavo.text.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}",
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- message.tool_calls[0].function.arguments | tojson }}
    {%- else %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
MACROS = """{%- macro show(content, depth=0) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for part in content -%}{{ part.text }}{{ loop.length }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, text='') -%}
{%- for message in messages[::-1] -%}
    {%- if message.role == 'user' and ns.last < 0 -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if loop.index0 > 5 -%}{%- break -%}{%- endif -%}
    {%- set ns.text = ns.text ~ loop.index ~ ':' ~ show(message.content) ~ ';' -%}
    {%- if message.role == 'assistant' -%}
    {% generation %}{{ '%s|%03d' | format(message.role, loop.index) }}{% endgeneration %}
    {%- endif -%}
    {{ ['a', 1, none] | join('-') }}{{ "{:>4}".format(loop.revindex) }}{{ loop.last }}
    {{ message.content.split('x')[0].replace('e', '<&>') if message.content is string }}
{%- endfor -%}
{{ ns.text }}{{ ns.last }}{{ {'é': '<b>'} | tojson }}{{ range(3) | list }}{{ undefined_name }}
{{- messages | map(attribute='role') | join(', ', ) }}{{ messages | map(attribute='role') | list }}
"""
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hello <there> & é"},
    {"role": "assistant", "content": " fine\n"},
    {"role": "user", "content": "exit?"},
]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": " Be brief. "}, *CHAT]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["<x>", 1, None]}}}]


def reference(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **kwargs)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (CHATML, SYSTEM, None),
        (SMOLLM2, CHAT, None),
        (SMOLLM2, SYSTEM, None),
        (LLAMA3, CHAT, None),
        (LLAMA3, SYSTEM, TOOLS),
        (
            LLAMA3,
            [
                *CHAT,
                {"role": "assistant", "tool_calls": [{"function": {"arguments": {"é": "<"}}}]},
                {"role": "tool", "content": '{"a": 1}'},
            ],
            TOOLS,
        ),
        (MISTRAL, CHAT, None),
        (MACROS, SYSTEM, None),
        (MACROS, [{"role": "user", "content": [{"type": "text", "text": "part"}]}], None),
    ],
)
def test_equals_transformers(
    source: str, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool
) -> None:
    ours = ChatTemplate(source, "<s>", "</s>").render(messages, add_generation_prompt, tools)
    assert ours == reference(
        source,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )


def test_the_clock_is_injected() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 7, 26))
    assert template.render(CHAT) == "26 Jul 2024"


def test_variables_and_tokens() -> None:
    template = ChatTemplate(
        "{{ pad_token }}{{ bos_token is defined }}{{ enable_thinking }}",
        special_tokens={"pad_token": "<pad>"},
    )
    assert template.render(CHAT, enable_thinking=False) == "<pad>FalseFalse"


def test_parts_are_flattened_for_templates_that_expect_a_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert ChatTemplate("{{ messages[0].content }}").render([message]) == "one\ntwo"
    loop = (
        "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }},{% endfor %}"
    )
    assert ChatTemplate(loop + "{% endfor %}").render([message]) == "one,two,"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\] must have a role"),
        ([{"role": "user", "content": 3}], "must be a string or a list"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing; send a text"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "user", "tool_calls": [{}]}], "content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content is missing"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] is of type 'image_url'; only text",
        ),
        ([{"role": "user", "content": [3]}], "only text"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"content\[0\]\.text must be a string, got None",
        ),
        ([{"role": "user", "content": "x", "extra": object()}], "got object"),
    ],
)
def test_malformed_messages(messages: Any, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(CHATML).render(messages)


def test_a_template_that_refuses() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(MISTRAL, "<s>", "</s>").render(SYSTEM)
    with pytest.raises(ChatTemplateError, match="do not have"):
        ChatTemplate("{{ messages[0].a.b }}").render(CHAT)
    with pytest.raises(ChatTemplateError, match="TypeError"):
        ChatTemplate("{{ 1 + 'a' }}").render(CHAT)


def test_errors_at_load() -> None:
    with pytest.raises(ChatTemplateError, match="syntax error in line 2"):
        ChatTemplate("\n{% for %}")
    with pytest.raises(ChatTemplateError, match="none named default"):
        ChatTemplate({"a": "", "b": ""})
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(ChatTemplateError, match="at most"):
        ChatTemplate("x" * 1_000_001)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(CHAT)


def test_unsafe_attributes_are_undefined() -> None:
    source = "{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format(1) }}"
    assert ChatTemplate(source).render(CHAT) == ""


def test_formats_that_mention_numbers() -> None:
    source = (
        "{{ 'on 20240726: %5.1f%%' % 2.5 }}{{ '20240726 {:>4}'.format(1) }}{{ '%s' | format(1) }}"
    )
    assert ChatTemplate(source).render(CHAT) == "on 20240726:   2.5%20240726    11"


def looped(statement: str) -> str:
    return (
        "{% set ns = namespace(n=3, s='x') %}{% for i in range(99) %}" + statement + "{% endfor %}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * ['x'] }}",
        "{{ 10 ** (10 ** 10) }}",
        looped("{% set ns.n = ns.n * ns.n %}"),
        "{{ range(10**9) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
        looped("{% set ns.s = ns.s + ns.s %}"),
        looped("{% set ns.s = ns.s ~ ns.s %}"),
        looped("{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ ('x' * 9999999).replace('x', 'y' * 999) }}",
        "{{ ('x' * 9999999) | replace('x', 'yyy') }}",
        "{{ ('x' * 9999).join(['y'] * 9999) }}",
        "{{ ['y' * 9999] * 9999 | join }}",
        "{{ (['y'] * 9999) | join('x' * 9999) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ {'a': 1} | tojson(indent=10**8) }}",
        "{{ ('%s' * 999999) % ('x' * 9999,) }}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% for i in range(99999) %}{% set x = 'x' * 99999 %}{% endfor %}",
        "{{ 1.5 | round(10**9, 'ceil') }}",
        "{{ lipsum(100000) }}",
    ],
)
def test_runaway_templates_are_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(CHAT)


def test_a_budget_is_for_one_render() -> None:
    template = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}"
    )
    for _ in range(3):
        assert template.render(CHAT) == ""


def test_long_conversations_are_not_runaways() -> None:
    messages = [
        {"role": "assistant" if turn % 2 else "user", "content": "word " * 2000}
        for turn in range(201)
    ]
    assert len(ChatTemplate(LLAMA3, "<s>").render(messages)) > 2_000_000


def test_messages_nested_too_deeply_are_refused_before_python_gives_up() -> None:
    nested: object = "x"
    for _ in range(400):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="nested more than 64 levels"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": "a", "extra": nested}])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": {"a": "x" * 10**6}},
        {"role": "user", "content": [{"type": "x" * 10**6}]},
        "x" * 10**6,
    ],
)
def test_an_error_never_repeats_all_of_what_was_sent(message: object) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ messages }}").render([message])  # type: ignore[list-item]
    assert len(str(caught.value)) < 300


def test_a_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="must be a text"):
        ChatTemplate(5)  # type: ignore[arg-type]
