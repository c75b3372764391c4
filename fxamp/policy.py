"""Which operation runs in which precision: a frozen list of rules over the default classes of optable.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from fxamp import errors, optable
from fxamp.optable import OpClass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["op", "module"]

RULE_PRECISIONS: Final = ("low", "fp32", "bf16", "fp16", "keep")
"""What a rule may ask for. "low" is whatever the running variant's precision is; "keep" is the traced dtype."""

PRESETS: Final = ("autocast",)
PRESETS_TO_COME: Final = ("conservative", "matmul_only", "pure")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a policy."""

    kind: Kind
    """What `pattern` is matched with: an operation ("softmax", "mylib::*") or a module path ("layers.0.*")."""
    pattern: str
    """A glob as in `fnmatch`, matched with the whole name. Module paths are relative to the compiled module."""
    precision: str
    """One of `RULE_PRECISIONS`."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.pattern}={self.precision}"

    def matches(self, op: str, module: str) -> bool:
        if self.kind == "op":
            return fnmatchcase(op, self.pattern)
        return fnmatchcase(module, self.pattern) or fnmatchcase(f"{module}.", self.pattern)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules, of which the last that matches decides, over a preset. `Policy.parse(str(p)) == p`."""

    preset: str = "autocast"
    """Classes of all operations that no rule matches. "autocast" is CUDA autocast's lists, on every device."""
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.preset, *map(str, self.rules)])

    @staticmethod
    def parse(text: str) -> Policy:
        """The inverse of `str`: `autocast; op:softmax=bf16; module:layers.0.*=fp32`.

        Raises: UnknownOption for a preset, kind or precision that does not exist; InvalidOption for bad syntax.
        """
        preset, *lines = (part.strip() for part in text.split(";"))
        rules: list[Rule] = []
        for line in lines:
            kind, colon, rest = line.partition(":")
            pattern, equals, precision = rest.rpartition("=")
            if not (colon and equals and pattern):
                raise errors.InvalidOption(
                    f"policy rule {line!r} cannot be read", way_out="Write 'op:softmax=bf16' or 'module:head*=fp32'"
                )
            if kind not in ("op", "module"):
                raise errors.unknown("kind of policy rule", kind, ("op", "module"))
            rules.append(_rule(kind, pattern, precision))
        return Policy(preset=_preset(preset), rules=tuple(rules))

    @staticmethod
    def of(source: Policy | str | Path | Mapping[str, str]) -> Policy:
        """A Policy from whatever `Amp(policy=...)` takes: itself, a preset or the text of one, a TOML file, a mapping.

        In a mapping, and in a TOML file's `[rules]` table, a key that is an operation's name or contains "::" is an
        operation; every other key is a module path. "op:..." and "module:..." say so explicitly.
        """
        if isinstance(source, Policy):
            return source
        if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml")):
            data = tomllib.loads(Path(source).read_text())
            rules = Policy.of(data.get("rules", {})).rules
            return Policy(preset=_preset(data.get("preset", "autocast")), rules=rules)
        if isinstance(source, str):
            return Policy.parse(source)
        return Policy(rules=tuple(_rule(*_kind_of(key), precision) for key, precision in source.items()))

    def decide(self, op: str | None, module: str) -> tuple[OpClass, str | None, str]:
        """(class, precision or None for the variant's own, reason) for an operation at a module path.

        `op` is the canonical name, `namespace::name` for operations outside of torch, None for what is no operation.
        """
        cls, source = optable.classify(op)
        for rule in reversed(self.rules):
            # A module's rule speaks of the operations that fxamp knows; the others in it keep their traced dtypes.
            if rule.matches(op or "", module) and (rule.kind == "op" or cls is not OpClass.KEEP):
                return _OUTCOMES[rule.precision], _low(rule.precision), f"rule {rule}"
        return cls, None, source


_OUTCOMES: Final = MappingProxyType(
    {
        "low": OpClass.LOW,
        "bf16": OpClass.LOW,
        "fp16": OpClass.LOW,
        "fp32": OpClass.HIGH,
        "keep": OpClass.KEEP,
    }
)


def _low(precision: str) -> str | None:
    return precision if precision in ("bf16", "fp16") else None


def _preset(name: str) -> str:
    if name in PRESETS_TO_COME:
        raise errors.not_yet("policy", name, f"Use one of {', '.join(PRESETS)} with rules of your own")
    if name not in PRESETS:
        raise errors.unknown("policy preset", name, (*PRESETS, *PRESETS_TO_COME))
    return name


def _rule(kind: Kind, pattern: str, precision: str) -> Rule:
    if precision not in RULE_PRECISIONS:
        raise errors.unknown(f"precision in the policy rule for {pattern!r}", precision, RULE_PRECISIONS)
    return Rule(kind=kind, pattern=pattern, precision=precision)


def _kind_of(key: str) -> tuple[Kind, str]:
    for kind in ("op", "module"):
        if key.startswith(f"{kind}:") and not key.startswith(f"{kind}::"):
            return kind, key.removeprefix(f"{kind}:")
    return ("op" if "::" in key or key in optable.TABLE else "module"), key
