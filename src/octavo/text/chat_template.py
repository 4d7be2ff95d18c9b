"""Messages to prompt text, as a model's own template says. Knows no tokens and no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template, nodes

MAX_SOURCE_CHARS = 1_000_000
MAX_DEPTH = 64


class ChatTemplateError(ValueError):
    """A chat template is not valid, or does not take these messages."""


class ChatTemplate:
    """A model's chat template, compiled once and rendered in a sandbox with bounded work.

    ``source`` is the Jinja text, or several by name, of which ``default`` is used, and
    ``tool_use`` when tools are given. A token that is None is undefined in the template.
    ``clock`` is what templates that print the date read. Safe to share between threads.

    Raises:
        ChatTemplateError: the template has a syntax error, or none is named ``default``.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        from octavo.text.template_sandbox import ChatEnvironment

        if not isinstance(source, str | Mapping):
            raise ChatTemplateError(
                f"the chat template must be a text, or a table of named ones, got {_shown(source)}"
            )
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if len(sources) == 1:
            sources = {"default": next(iter(sources.values()))}
        if "default" not in sources:
            raise ChatTemplateError(
                f"the model has chat templates named {', '.join(sorted(sources))} and none named "
                "default; give one explicitly"
            )
        self.source = sources["default"]
        self._tokens = dict(special_tokens or {})
        self._tokens |= {
            name: token
            for name, token in (("bos_token", bos_token), ("eos_token", eos_token))
            if token is not None
        }
        self._environment = ChatEnvironment(clock)
        self._lock = threading.Lock()
        self._compiled = {
            name: self._compile(text)
            for name, text in sources.items()
            if name in ("default", "tool_use")
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for ``messages``, ending where the assistant's turn begins.

        A message's content may be a string or a list of ``{"type": "text", "text": ...}`` parts;
        parts are joined by newlines for a template that expects a string. ``kwargs`` are further
        variables of the template. The text spells its special tokens: encode it with
        ``add_special_tokens=False``.

        Raises:
            ChatTemplateError: the messages are malformed or the template refuses them.
        """
        named = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template, takes_parts = self._compiled[named]
        variables = {
            **self._tokens,
            "documents": None,
            **{name: _plain(value) for name, value in kwargs.items()},
            "messages": [_message(m, i, takes_parts) for i, m in enumerate(messages)],
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            self._environment.start()
            try:
                return template.render(variables)
            except RecursionError:
                raise ChatTemplateError("the chat template calls itself too deeply") from None
            except Exception as error:  # whatever the template made Python raise
                raise ChatTemplateError(_reason(error)) from error

    def _compile(self, source: str) -> tuple[Template, bool]:
        """The compiled template, and whether it goes through the parts of a message's content."""
        from jinja2 import TemplateSyntaxError

        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"the chat template has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} "
                "are read"
            )
        try:
            takes_parts = _loops_over_content(self._environment.parse(source))
            return self._environment.from_string(source), takes_parts
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # nesting too deep to compile, and the like
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError, UndefinedError

    from octavo.text.template_sandbox import TemplateLimitError

    if isinstance(error, TemplateLimitError):
        return f"the chat template was stopped: {error}"
    if isinstance(error, UndefinedError):
        return f"the chat template uses something that these messages do not have: {error}"
    if isinstance(error, TemplateError):
        return f"the chat template refuses these messages: {error}"
    return f"the chat template failed: {type(error).__name__}: {error}"


def _message(message: Mapping[str, Any], index: int, takes_parts: bool) -> dict[str, Any]:
    """One message in plain JSON types, without the keys that are None."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"messages[{index}] must be an object, got {_shown(message)}")
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"messages[{index}] must have a role")
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        texts = [
            _part_text(part, f"messages[{index}].content[{n}]") for n, part in enumerate(content)
        ]
        plain["content"] = (
            [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)
        )
    elif content is None:
        if plain["role"] != "assistant" or not plain.get("tool_calls"):
            raise ChatTemplateError(
                f"messages[{index}].content is missing; send a text or text parts"
            )
    elif not isinstance(content, str):
        raise ChatTemplateError(
            f"messages[{index}].content must be a string or a list of text parts, "
            f"got {_shown(content)}"
        )
    return plain


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise ChatTemplateError(
            f"{where} is of type {_shown(kind)}; only text parts are taken: "
            '{"type": "text", "text": "..."}'
        )
    if not isinstance(part.get("text"), str):
        raise ChatTemplateError(f"{where}.text must be a string, got {_shown(part.get('text'))}")
    text: str = part["text"]
    return text


def _shown(value: object) -> str:
    """A value as an error shows it: never more than a line, whatever was sent."""
    if isinstance(value, str) and len(value) > 80:
        value = value[:77] + "..."
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 96 else f"{text[:93]}..."


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` rebuilt of exact JSON types, so a template meets no methods but theirs."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError(
            f"the messages are nested more than {MAX_DEPTH} levels deep; flatten them"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise ChatTemplateError(
        f"chat templates take strings, numbers, lists and objects, got {type(value).__name__}"
    )


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template has a loop over ``….content`` or over a variable set from it."""
    from jinja2 import nodes

    def reads_content(expression: nodes.Node) -> bool:
        if isinstance(expression, nodes.Filter) and expression.node is not None:
            return reads_content(expression.node)
        if isinstance(expression, nodes.Getattr):
            return expression.attr == "content"
        if isinstance(expression, nodes.Getitem):
            return isinstance(expression.arg, nodes.Const) and expression.arg.value == "content"
        return isinstance(expression, nodes.Name) and expression.name in from_content

    from_content = {
        argument.name for macro in tree.find_all(nodes.Macro) for argument in macro.args
    } & {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and reads_content(assign.node):
            from_content.add(assign.target.name)
    return any(reads_content(loop.iter) for loop in tree.find_all(nodes.For))
