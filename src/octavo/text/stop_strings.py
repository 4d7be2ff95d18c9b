"""Stop strings found across token boundaries. Knows characters; knows no tokens and no requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Watches a stream of text for the first stop string.

    The match that *completes* first wins, wherever the text was cut into pieces; of several that
    complete at the same character, the longest (the one that starts earliest). So with stops
    ``abcd`` and ``bc``, the text ``abcd`` stops at ``bc``: nothing later has to be awaited.

    Held back is exactly the longest suffix that begins some stop string. It is the depth of the
    current state in an Aho-Corasick automaton (Aho & Corasick 1975), so the cost is one or two
    dictionary look-ups a character, whatever the number of stop strings.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = (
        "_depth",
        "_fail",
        "_goto",
        "_held",
        "_include_stop",
        "_match",
        "_state",
        "matched",
    )

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stops, str):
            stops = (stops,)
        if not all(stops):
            raise ValueError("a stop string must have at least one character")
        self._include_stop = include_stop
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._failures()
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that is now safe to emit, and the stop string if one completed.

        After a match every further call returns ``("", the match)``.
        """
        if self.matched is not None:
            return "", self.matched
        goto, fail, state = self._goto, self._fail, self._state
        for index, char in enumerate(text):
            while (following := goto[state].get(char)) is None and state:
                state = fail[state]
            state = following or 0
            if state and (stop := self._match[state]) is not None:
                seen = self._held + text[: index + 1]
                self.matched, self._held, self._state = stop, "", 0
                return (seen if self._include_stop else seen[: len(seen) - len(stop)]), stop
        self._state = state
        depth = self._depth[state]
        if not depth and not self._held:
            return text, None
        seen = self._held + text
        cut = len(seen) - depth
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text still held back, at the end of a stream in which no stop string completed."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _failures(self) -> list[int]:
        """For each state the state of its longest proper suffix, filling inherited matches in."""
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
            for char, child in self._goto[state].items():
                back = fail[state]
                while char not in self._goto[back] and back:
                    back = fail[back]
                fail[child] = self._goto[back].get(char, 0)
                queue.append(child)
        return fail
