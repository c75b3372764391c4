"""The README runs. Its ```python blocks are one program, in order; a ```text block right behind one is what it prints.

In a text block a line `...` stands for any lines, and the fence ```text digits says that numbers may differ: then any
run of digits equals any other.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house.source import ROOT, USE_BY_NAME, run_python

README = ROOT / "README.md"


@dataclass(frozen=True)
class Snippet:
    """One python block, and the text block that follows it."""

    line: int
    """Line of the file on which the code starts."""
    code: str
    printed: str | None = None
    any_digits: bool = False


FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


def snippets(text: str) -> list[Snippet]:
    found: list[Snippet] = []
    end_of_python = None
    for fence in FENCE.finditer(text):
        info, body = fence["info"].strip(), fence["body"]
        follows = end_of_python is not None and not text[end_of_python : fence.start()].strip()
        end_of_python = None
        if info == "python":
            found.append(Snippet(text.count("\n", 0, fence.start("body")) + 1, body))
            end_of_python = fence.end()
        elif info in ("text", "text digits") and follows:
            found[-1] = Snippet(found[-1].line, found[-1].code, body, any_digits=info == "text digits")
    return found


# Empty lines in front of each snippet put its lines where they stand in the file, so that tracebacks, and the reports
# that name the user's line, point into the README.
RUN = """
import contextlib, io, json, sys
file, names, printed = sys.argv[1], {"__name__": "__main__"}, []
for line, code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\\n" * (line - 1) + code, file, "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def matches(expected: str, printed: str, any_digits: bool) -> bool:
    if any_digits:
        expected, printed = (re.sub(r"\d+", "0", text) for text in (expected, printed))
    lines = ("(.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in expected.splitlines())
    return re.fullmatch("".join(lines), "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None


def failures(readme: Path) -> list[str]:
    found = snippets(readme.read_text(encoding="utf-8"))
    program = json.dumps([(snippet.line, snippet.code) for snippet in found])
    printed = json.loads(run_python(USE_BY_NAME + RUN, str(readme), stdin=program, timeout_s=600))
    return [
        f"{readme.name}:{snippet.line} prints something else:\n"
        + "\n".join(difflib.ndiff(snippet.printed.splitlines(), text.splitlines()))
        for snippet, text in zip(found, printed, strict=True)
        if snippet.printed is not None and not matches(snippet.printed, text, snippet.any_digits)
    ]


@pytest.mark.slow  # compiles models; `make readme`
@pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")
def test_readme_runs():
    assert snippets(README.read_text(encoding="utf-8")), "the README has no python block: nothing was tested"
    assert failures(README) == []


GOOD = """# Title
```python
x = 1
print(x)
```

```text
1
```
Words between make it no output:
```python
for i in range(3):
    print("step", x + i, "took", i / 7)
```
```text digits
step 0 took 0.0
...
```
```text
not compared, a text block came before
```
```bash
exit 1
```
"""


@pytest.fixture
def without_fxamp(monkeypatch: pytest.MonkeyPatch):
    """The planted READMEs do not need the package, so they need not wait for it."""
    monkeypatch.setattr("tests.house.test_readme.USE_BY_NAME", "")


def test_good_readme_passes(tmp_path, without_fxamp):
    readme = tmp_path / "README.md"
    readme.write_text(GOOD)
    assert [snippet.line for snippet in snippets(GOOD)] == [3, 12]
    assert failures(readme) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("```text\n1\n", "```text\n2\n"),
        ("```text\n1\n", "```text\n"),
        ("```text\n1\n", "```text\n1\n1\n"),
        ("```text digits", "```text"),
        ("step 0 took 0.0\n...", "step 0 took 0.0"),
        ("step 0 took 0.0", "step 0 took some 0.0"),
    ],
)
def test_wrong_output_is_found(tmp_path, without_fxamp, old, new):
    readme = tmp_path / "README.md"
    assert old in GOOD
    readme.write_text(GOOD.replace(old, new))
    (failure,) = failures(readme)
    assert "prints something else" in failure


def test_raising_snippet_is_found_with_its_line(tmp_path, without_fxamp):
    readme = tmp_path / "README.md"
    readme.write_text(GOOD.replace("print(x)", "print(y)"))
    with pytest.raises(AssertionError, match=r'README.md", line 4[\s\S]*NameError'):
        failures(readme)
