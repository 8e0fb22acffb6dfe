"""Lines of tokens of the text form; every complaint has line and column."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from lf_hal.lir.errors import LirSyntaxError
from lf_hal.lir.graph import Number

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#.*)
    |(?P<string>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")
    |(?P<number>-?(?:[0-9]+\.[0-9]+(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|[0-9]+|inf)(?![A-Za-z0-9_.\-]))
    |(?P<reference>%[A-Za-z0-9_][A-Za-z0-9_.\-]*)
    |(?P<name>[A-Za-z0-9_][A-Za-z0-9_.\-]*)
    |(?P<sign>[:=,@\[\](){}])
    """,
    re.VERBOSE,
)
DIGITS = 40  # of one number: far beyond 64 bits, far below what makes reading slow


class Line:
    """The tokens of one line, read from left to right."""

    def __init__(self, number: int, text: str) -> None:
        self.number_of_line, self._text, self._next = number, text, 0
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise LirSyntaxError(number, position + 1, f"{text[position]!r} begins nothing known")
            if match.lastgroup != "space":
                self._tokens.append((str(match.lastgroup), match.group(), position))
            position = match.end()

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def peek(self) -> str:
        """The next token, "" at the end."""
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def is_string(self) -> bool:
        return self.peek().startswith('"')

    def fail(self, reason: str, back: int = 0) -> NoReturn:
        """Complain of the next token, or of the one ``back`` before it."""
        at = self._next - back
        position = self._tokens[at][2] if at < len(self._tokens) else len(self._text)
        raise LirSyntaxError(self.number_of_line, position + 1, reason)

    def _take(self, kinds: tuple[str, ...], wanted: str, exact: str | None = None) -> str:
        kind, text = self._tokens[self._next][:2] if self._next < len(self._tokens) else ("end", "the end")
        if kind not in kinds or exact not in (None, text):
            self.fail(f"{text} where {wanted} should be")
        self._next += 1
        return text

    def word(self, word: str) -> None:
        self._take(("name",), word, word)

    def sign(self, sign: str) -> None:
        self._take(("sign",), sign, sign)

    def name(self) -> str:
        return self._take(("name", "number"), "a name")

    def reference(self) -> str:
        """The name of a value, without its ``%``."""
        return self._take(("reference",), "a value like %x")[1:]

    def string(self) -> str:
        return str(json.loads(self._take(("string",), "a string in double quotes")))

    def integer(self) -> int:
        found = self.number()
        if not isinstance(found, int) or isinstance(found, bool):
            self.fail("no integer", back=1)
        return found

    def number(self) -> Number:
        """An integer, a float, or true or false."""
        if self.peek() in ("true", "false"):
            return self._take(("name",), "a truth") == "true"
        text = self._take(("number",), "a number")
        if text.lstrip("-").isdigit():
            if len(text) > DIGITS:
                self.fail(f"a number of {len(text)} digits", back=1)
            return int(text)
        return float(text)

    def end(self) -> None:
        if self._next < len(self._tokens):
            self.fail(f"{self.peek()} after the end of the statement")


def lines_of(text: str) -> list[Line]:
    """Lines that hold something."""
    return [line for i, part in enumerate(text.split("\n"), 1) if (line := Line(i, part.rstrip("\r")))]


def quoted(text: str) -> str:
    """``text`` as a string of the text form."""
    return json.dumps(text)
