"""The Jinja environment that chat templates run in. Knows limits; knows no messages.

Jinja's immutable sandbox keeps a template from Python's internals. What it does not bound is
work and memory, so this one counts loop turns, calls and operators against a budget, and refuses
any value larger than the output may be *before* it is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any

from jinja2 import Environment, nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# 1,000 messages through SmolLM2's template take 10,000 steps.
MAX_STEPS = 2_000_000
# 128K tokens are about half a million characters; documents of 16 million are nobody's prompt.
MAX_CHARS = 16_000_000
_MAX_INT_BITS = 4096
_SIZED = (str, bytes, list, tuple, dict)
_MAX_COUNT = 100_000  # largest width a template may ask for; Jinja's own limit on ranges too
_TAKES_WIDTH = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes")
) | {"tojson", "wordwrap", "zfill"}
_GROWS_BY_LINE = frozenset(["expandtabs", "indent", "urlize", "wordwrap"])
_PRINTS = frozenset(["string", "tojson", "pprint", "urlencode", "escape", "e", "forceescape"])
_CHARS_PER_STEP = 256  # so all values ever built by a render come to half a billion characters

_PERCENT_SPEC = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
_BRACE_SPEC = re.compile(r"\{[^{}:]*:([^}]*)")


class TemplateLimitError(SecurityError):
    """A template used more work or memory than a chat template may."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template at a time: its owner holds a lock and calls :meth:`start` first."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.steps = 0
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=self._printable,
        )
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: clock().strftime(format)
        self.filters["tojson"] = _to_json
        self.filters["join"] = self._join_filter
        for name, function in self.filters.items():
            self.filters[name] = self._guarded(name, function)
        self.filters["octavo_turns"] = self._turns
        self.filters["octavo_concat"] = self._concat

    def start(self) -> None:
        """Begin a render with a fresh budget."""
        self.steps = 0

    def charge(self, size: int = 0) -> None:
        """Count one step and the handling of ``size`` characters or items."""
        self.steps += 1 + size // _CHARS_PER_STEP
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps")

    def check_size(self, size: int) -> None:
        """Refuse a value of ``size`` characters or items."""
        if size > MAX_CHARS:
            raise TemplateLimitError(f"it builds a value of more than {MAX_CHARS:,} characters")
        self.charge(size)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.check_size(_size(left) + _size(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            self._check_power(left, right)
        elif isinstance(left, str | bytes):
            pattern = left if isinstance(left, str) else left.decode("latin-1")
            self._check_format(pattern, "%", right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, subject, name = __self, getattr(__obj, "__self__", None), _name_of(__obj)
        if name == "join" and isinstance(subject, str):
            return self._join(args[0] if args else (), subject)
        self._check_growth(name, subject, [*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        self.check_size(_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, "{", [args, kwargs])
            return wrapped(*args, **kwargs)

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        result: nodes.Template = _Instrument().visit(tree)
        return result

    def _turns(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.charge()
            yield item

    def _concat(self, parts: Iterable[Any]) -> str:
        texts: list[str] = []
        total = 0
        for part in parts:
            text = part if isinstance(part, str) else str(self._printable(part))
            total += len(text)
            if total > MAX_CHARS:
                raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters")
            texts.append(text)
        self.charge(total)
        return "".join(texts)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its arguments and its result bounded."""

        @wraps(function)  # keeps the mark that tells Jinja to pass the context
        def guard(*args: Any, **kwargs: Any) -> Any:
            values = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self._check_growth(name, values[0] if values else None, [*values[1:], *kwargs.values()])
            result = function(*args, **kwargs)
            self.check_size(_size(result))
            return result

        return guard

    def _join(self, items: Iterable[Any], separator: Any = "") -> str:
        def pieces() -> Iterator[Any]:
            for index, item in enumerate(items):
                if index and separator:
                    yield separator
                yield item

        return self._concat(pieces())

    @pass_environment
    def _join_filter(
        self, _: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
    ) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        return self._join(value, d)

    def _check_growth(self, name: str, subject: Any, arguments: list[Any]) -> None:
        """Refuse calls whose result could be much larger than what goes in."""
        self.charge(_size(subject) + sum(map(_size, arguments)))
        counts = [abs(value) for value in arguments if isinstance(value, int)]
        widest = max(counts, default=0)
        if name == "translate" or (name in _TAKES_WIDTH and widest > _MAX_COUNT):
            raise TemplateLimitError(f"it calls {name} with {widest}")
        if not isinstance(subject, str | bytes):
            if name in _PRINTS:
                self._printable(subject)
            return
        if name == "replace" and len(arguments) > 1:
            old, new = arguments[:2]
            places = str(subject).count(str(old))
            self.check_size(len(subject) + places * _size(new))
        elif name in _GROWS_BY_LINE:
            longest = max([widest, 8, *map(_size, arguments)])
            self.check_size(len(subject) + longest * (1 + len(subject.split())))
        elif name == "format" and isinstance(subject, str):
            self._check_format(subject, "%", arguments)

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int) or isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            self.check_size(max(0, count) * _size(value))

    def _check_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))

    def _check_format(self, pattern: str, mark: str, values: Any) -> None:
        """Refuse fields that are wide, as wide as an argument says, or many of a large value."""
        specs = _PERCENT_SPEC.findall(pattern) if mark == "%" else _BRACE_SPEC.findall(pattern)
        numbers = re.findall(r"\d+", " ".join(specs))
        computed = any("*" in spec or "{" in spec for spec in specs)
        if computed or sum(int(digits[:9]) for digits in numbers) > _MAX_COUNT:
            raise TemplateLimitError("it formats a field of a very large or computed width")
        self.check_size(len(pattern) + pattern.count(mark) * _deep_size(values))

    def _printable(self, value: Any) -> Any:
        """``value``, once it is known that printing it stays within bounds."""
        if isinstance(value, list | tuple | dict):
            self.check_size(_deep_size(value))
        return value


class _Instrument(NodeTransformer):
    """Routes loops and ``~`` through the environment, which Jinja compiles to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "octavo_turns", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "octavo_concat", [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the model's words; it is rendered as is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _deep_size(value: Any, limit: int = MAX_CHARS + 1) -> int:
    """About how long ``value`` is in print; stops counting at ``limit``."""
    if not isinstance(value, list | tuple | dict):
        return 1 + _size(value)
    size = 2
    for item in chain(value, value.values()) if isinstance(value, dict) else value:
        size += _deep_size(item, limit - size)
        if size >= limit:
            break
    return size


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name if isinstance(name, str) else ""


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise TemplateLimitError("it computes a very large number")


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: Jinja's own filter would write ``<`` as ``\\u003c``."""
    if isinstance(indent, int) and indent > 64:
        raise TemplateLimitError(f"it indents JSON by {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
