"""The project speaks of itself alone: not of the machine that it was written on, nor of who hosts what it installs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.source import ROOT

# In two pieces: this file is searched too.
PIECES = (
    ("/wo", "rk/"),
    ("helper", " agent"),
    ("this", " session"),
    ("sub", "agent"),
    ("pypi", ".org"),
    ("python", "hosted"),
)
WORDS = tuple(map("".join, PIECES))


def tracked(root: Path) -> list[Path]:
    """Files that git tracks, or would with the next `git add .`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    # A deleted file is listed until the deletion is staged.
    return [root / name for name in listing.split("\0") if name and (root / name).is_file()]


def violations(files: Iterable[Path]) -> list[str]:
    return [
        f"{file}:{number}: {word!r}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for word in WORDS
        if word in line.lower()
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout, so nothing says which files are ours")
def test_no_foreign_words():
    assert violations(tracked(ROOT)) == []


@pytest.mark.parametrize("word", WORDS)
def test_planted_word_is_found(tmp_path, word):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "notes.md").write_text(f"first\nsee {word.upper()}x\n")
    (tmp_path / ".gitignore").write_text("ignored.md\n")
    (tmp_path / "ignored.md").write_text(word)
    assert violations(tracked(tmp_path)) == [f"{tmp_path / 'notes.md'}:2: {word!r}"]
