from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxamp import globs

patterns = st.lists(st.sampled_from(("a", "b", ".", "*", "?", "[ab]", "[!a]")), max_size=5).map("".join)
texts = st.text("ab.c", max_size=6)


@given(texts, patterns)
def test_matching_is_fnmatch(text: str, pattern: str):
    assert globs.matches(text, pattern) == fnmatchcase(text, pattern)


@given(patterns, patterns, st.lists(texts, max_size=20))
def test_what_is_included_matches_no_more(wide: str, narrow: str, some: list[str]):
    if globs.includes(wide, narrow):
        assert all(fnmatchcase(text, wide) for text in some if fnmatchcase(text, narrow))


@pytest.mark.parametrize(
    ("wide", "narrow", "want"),
    [
        ("*", "", True), ("", "*", False), ("a*", "ab", True), ("ab", "a*", False), ("a**", "a*", True), ("a*", "a**", True),
        ("layers.*", "layers.[0-3].attn", True), ("layers.[0-9]", "layers.[0-3]", True), ("layers.[0-3]", "layers.?", False),
        ("?*", "*?", True), ("*a*", "ba?", True), ("*a", "*b", False), ("[!a]", "b", True), ("[!a]", "?", False),
        ("[", "[", True),
    ],
)  # fmt: skip
def test_inclusion(wide: str, narrow: str, want: bool):
    assert globs.includes(wide, narrow) is want
