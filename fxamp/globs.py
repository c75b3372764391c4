"""Globs as in `fnmatch`, and the question whether one of them matches everything that another does."""

from __future__ import annotations

import functools
import re
import string
from fnmatch import translate

_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def matches(name: str, pattern: str) -> bool:
    """Does the whole name match? `*` any text, dots too; `?` one character; `[ab]`, `[!ab]`, `[0-9]` one of a set."""
    return _regex(pattern).match(name) is not None


def is_plain(pattern: str) -> bool:
    """Does the pattern match nothing but itself?"""
    return not set(pattern) & set("*?[")


@functools.lru_cache(maxsize=1024)
def includes(wide: str, narrow: str) -> bool:
    """Does `wide` match every text that `narrow` matches?

    >>> includes("layers.*", "layers.[0-3].attn"), includes("layers.[0-3]", "layers.?")
    (True, False)

    Both are automata, whose states are positions in the pattern. The walk follows every text that `narrow` accepts, with the
    set of positions at which `wide` may be meanwhile (subset construction), over the printable characters.
    """
    narrow_tokens, wide_tokens = _tokens(narrow), _tokens(wide)
    alphabet = sorted({*string.printable, *wide, *narrow})
    waiting: list[tuple[int, frozenset[int]]] = [(0, _closed(frozenset((0,)), wide_tokens))]
    seen = set(waiting)
    while waiting:
        here, there = waiting.pop()
        for position in _closed(frozenset((here,)), narrow_tokens):
            if position == len(narrow_tokens):
                if len(wide_tokens) not in there:
                    return False
                continue
            token = narrow_tokens[position]
            for character in alphabet:
                if not _accepts(token, character):
                    continue
                after = position if token == "*" else position + 1
                reached = _step(there, character, wide_tokens)
                if (state := (after, reached)) not in seen:
                    seen.add(state)
                    waiting.append(state)
    return True


def _tokens(pattern: str) -> tuple[str, ...]:
    return tuple(_TOKEN.findall(pattern))


@functools.lru_cache(maxsize=65536)
def _accepts(token: str, character: str) -> bool:
    return token == "*" or matches(character, token)


def _closed(positions: frozenset[int], tokens: tuple[str, ...]) -> frozenset[int]:
    """The positions, and those behind stars that match nothing."""
    reached = set(positions)
    for position in positions:
        while position < len(tokens) and tokens[position] == "*":
            position += 1
            reached.add(position)
    return frozenset(reached)


def _step(positions: frozenset[int], character: str, tokens: tuple[str, ...]) -> frozenset[int]:
    reached = {
        position if tokens[position] == "*" else position + 1
        for position in positions
        if position < len(tokens) and _accepts(tokens[position], character)
    }
    return _closed(frozenset(reached), tokens)
