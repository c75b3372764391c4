"""Which operation runs in which precision: ordered rules over a preset, which gives optable.py's classes a meaning.

One order decides everything: of all rules that match an operation, the last one in the policy wins; where none matches, the
preset's class stands. docs/policy.md has the long form.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

from fxamp import errors, globs, optable
from fxamp.optable import OpClass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["op", "module", "class", "region"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

RULE_PRECISIONS: Final = ("low", "fp32", "bf16", "fp16", "keep")
"""What a rule may ask for. "low" is whatever the running variant's precision is; "keep" is the traced dtype."""


# ---- presets --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Preset:
    """What the classes of optable.py mean where no rule matches."""

    meaning: str
    changes: tuple[tuple[frozenset[str], OpClass, str], ...] = ()
    """(operations, their class in this preset, why); operations in none of them have their class of optable.py."""

    def classify(self, op: str | None) -> tuple[OpClass, str]:
        """(class, where it comes from) of a canonical operation name."""
        for ops, cls, why in self.changes:
            if op in ops:
                return cls, why
        return optable.classify(op)


def _of(*classes: OpClass) -> frozenset[str]:
    return frozenset(op for op, (cls, _) in optable.TABLE.items() if cls in classes)


_MOVING: Final = frozenset((*optable.MOVEMENT.split(), *optable.EXACT.split(), *optable.BUILTIN_PROMOTION.split()))
_COMPUTING: Final = _of(OpClass.FOLLOW, OpClass.WIDEST) - _MOVING
_PROMOTING: Final = frozenset(optable.BUILTIN_PROMOTION.split())
_PRODUCTS: Final = frozenset(optable.PRODUCTS.split())
_RANDOM: Final = frozenset(optable.RANDOM.split())

PRESETS: Final = MappingProxyType(
    {
        "autocast": Preset(meaning="CUDA autocast's lists, on every device"),
        "conservative": Preset(
            meaning="autocast's lower-precision list runs low; all other arithmetic is fp32, data movement follows",
            changes=((_COMPUTING, OpClass.HIGH, "conservative: all arithmetic off autocast's lower-precision list is fp32"),),
        ),
        "matmul_only": Preset(
            meaning="matrix products alone run low; convolutions, attention and all other arithmetic are fp32, data movement "
            "follows",
            changes=(
                (
                    _COMPUTING | (_of(OpClass.LOW) - _PRODUCTS),
                    OpClass.HIGH,
                    "matmul_only: all arithmetic but matrix products is fp32",
                ),
            ),
        ),
        "pure": Preset(
            meaning="everything listed runs low, norms, softmax and losses too; random operations draw in fp32, views follow",
            changes=(
                (
                    (_of(OpClass.HIGH) - _RANDOM) | _COMPUTING | optable.SELECTING | _PROMOTING,
                    OpClass.LOW,
                    "pure: everything listed runs low",
                ),
            ),
        ),
    }
)
"""Name -> preset. What none of them lists is kept as traced in all of them; numeric guards hold in all of them."""


# ---- rules ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a policy. Raises, when built, UnknownOption for a kind or precision that does not exist, InvalidOption for a
    pattern that a policy's text could not hold."""

    kind: Kind
    """What `pattern` is matched with: an operation ("softmax", "mylib::*"); the path of a module ("layers.0.*"), which speaks
    of everything in it; the class of a module ("LlamaRMSNorm"), likewise; or the name of a region of the policy."""
    pattern: str
    """A glob as in `fnmatch`, matched with the whole name. Module paths are relative to the compiled module. A class is known
    by its name, and by its full name ("torch.nn.modules.linear.Linear"). Of a region, the name itself."""
    precision: str
    """One of `RULE_PRECISIONS`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise errors.unknown("kind of policy rule", self.kind, KINDS)
        if self.precision not in RULE_PRECISIONS:
            raise errors.unknown(f"precision in the policy rule for {self.pattern!r}", self.precision, RULE_PRECISIONS)
        if not isinstance(self.pattern, str) or not _is_writable(self.pattern):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(
                f"policy rule {self.kind}:{self.pattern}={self.precision} has a pattern that cannot be written down",
                way_out="A pattern is not empty, holds no ';' or '=', does not begin with ':', and has no blank at either end",
            )

    def __str__(self) -> str:
        return f"{self.kind}:{self.pattern}={self.precision}"

    def matches(self, op: str, module: str, classes: Sequence[str] = ()) -> bool:
        """Does it speak of an operation, in the module at this path, inside modules of these classes? Never for a region."""
        if self.kind == "op":
            return globs.matches(op, self.pattern)
        if self.kind == "module":
            return any(
                globs.matches(path, self.pattern) or (path != "" and globs.matches(f"{path}.", self.pattern))
                for path in _enclosing(module)
            )
        if self.kind == "class":
            return any(
                globs.matches(name, self.pattern) or globs.matches(name.rpartition(".")[2], self.pattern) for name in classes
            )
        return False

    def covers(self, earlier: Rule) -> bool:
        """Does it match every operation that `earlier` matches? True is proved; False means "not always, or unknown"."""
        if self.kind == "module" and self.pattern.strip("*") == "":
            known = earlier.kind == "op" and optable.classify(earlier.pattern)[0] is not OpClass.KEEP
            return known or earlier.kind in ("module", "class")
        if self.kind != earlier.kind:
            return False
        if self.kind == "region":
            return self.pattern == earlier.pattern
        if globs.includes(self.pattern, earlier.pattern):
            return True
        if self.kind != "module":
            return False
        below = globs.includes(f"{self.pattern}.*", earlier.pattern)
        return below or globs.includes(self.pattern, f"{earlier.pattern}.")


def _is_writable(pattern: str) -> bool:
    """Does a policy's text hold this pattern as it is? Behind its kind, ":x" would read as an operation: "op::x" is the
    operation x of a namespace "op"."""
    return pattern != "" and pattern == pattern.strip() and not pattern.startswith(":") and not set(pattern) & set(";=")


def _enclosing(module: str) -> list[str]:
    """The path and those of the modules around it: "a.b" -> ["a.b", "a"]; at the top [""]."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


class Verdict(NamedTuple):
    """What a policy says of one operation."""

    cls: OpClass
    precision: str | None
    """The storage format asked for; None: the variant's own."""
    why: str
    rule: Rule | None = None
    """The rule that decided; None if the preset did."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules, of which the last that matches decides, over a preset. `Policy.parse(str(p)) == p`.

    Raises, when built: UnknownOption for a preset that does not exist; ContradictoryRules for two rules that match the same
    operations and say different things of them; InvalidOption for a region that cannot be written down.
    """

    preset: str = "autocast"
    """One of `PRESETS`: the class of every operation that no rule matches."""
    rules: tuple[Rule, ...] = ()
    regions: tuple[tuple[str, str], ...] = ()
    """(name, glob over module paths): what the rules of kind "region" speak of."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            if "=" in str(self.preset):
                raise errors.InvalidOption(
                    f"the text of a policy begins with {self.preset!r}",
                    way_out="A preset comes first: 'autocast; op:softmax=fp32'",
                )
            raise errors.unknown("policy preset", self.preset, PRESETS)
        rules: Any = self.rules  # what people give is not what it becomes
        if not isinstance(rules, (tuple, list)) or not all(isinstance(rule, Rule) for rule in rules):
            raise errors.InvalidOption(
                f"a Policy with rules={rules!r}",
                way_out="Rules are fxamp.Rule(kind='op', pattern='softmax', precision='fp32'); Policy.of({'softmax': 'fp32'}) "
                "and Policy.parse('autocast; op:softmax=fp32') make them",
            )
        regions: Any = self.regions.items() if isinstance(self.regions, Mapping) else self.regions
        if isinstance(regions, str) or not isinstance(regions, Iterable) or any(len(pair) != 2 for pair in regions):
            raise errors.InvalidOption(
                f"a Policy with regions={regions!r}",
                way_out="Give (name, glob of module paths) of each: (('early', 'layers.[0-3]'),)",
            )
        object.__setattr__(self, "rules", tuple(rules))
        object.__setattr__(self, "regions", tuple((name, pattern) for name, pattern in regions))
        for name, pattern in self.regions:
            are_texts = isinstance(name, str) and isinstance(pattern, str)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not are_texts or not name.isidentifier() or name in KINDS or not _is_writable(pattern):
                raise errors.InvalidOption(
                    f"region {name!r} = {pattern!r} cannot be written down",
                    way_out="A region has an identifier for a name, which is no kind of rule, and a glob of module paths",
                )
        if len(dict(self.regions)) < len(self.regions):
            raise errors.InvalidOption("a region is defined twice", way_out="Give each region one glob")
        for i, j in self._shadowing():
            if self.rules[i].precision != self.rules[j].precision and self._resolved[i].covers(self._resolved[j]):
                raise errors.ContradictoryRules(
                    f"the policy's rules '{self.rules[i]}' and '{self.rules[j]}' speak of the same operations",
                    way_out="Delete the one that you do not mean",
                )

    def __str__(self) -> str:
        regions = [f"{name}:={pattern}" for name, pattern in self.regions]
        return "; ".join([self.preset, *regions, *map(str, self.rules)])

    @staticmethod
    def parse(text: str) -> Policy:
        """The inverse of `str`: `autocast; early:=layers.[0-3]; op:softmax=bf16; class:RMSNorm=fp32; region:early=fp32`.

        Raises: UnknownOption for a preset, kind or precision that does not exist; InvalidOption for bad syntax.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(f"Policy.parse({text!r})", way_out="Give it a text: 'autocast; op:softmax=fp32'")
        preset, *lines = (part.strip() for part in text.split(";"))
        rules, regions = list[Rule](), list[tuple[str, str]]()
        for line in lines:
            name, defines, region = line.partition(":=")
            if defines and name.strip().isidentifier():  # a rule's pattern may end in ":" too
                regions.append((name.strip(), region.strip()))
                continue
            kind, colon, rest = line.partition(":")
            pattern, equals, precision = rest.rpartition("=")
            if not (colon and equals and pattern):
                raise errors.InvalidOption(
                    f"policy rule {line!r} cannot be read", way_out="Write 'op:softmax=bf16' or 'module:head*=fp32'"
                )
            rules.append(Rule(kind=kind, pattern=pattern.strip(), precision=precision.strip()))  # pyright: ignore[reportArgumentType]
        return Policy(preset=preset, rules=tuple(rules), regions=tuple(regions))

    @staticmethod
    def of(source: Policy | str | Path | Mapping[str, str]) -> Policy:
        """A Policy from whatever `Amp(policy=...)` takes: itself, a preset or the text of one, a TOML file, a mapping.

        In a mapping, and in a TOML file's `[rules]` table, a key that is an operation's name or contains "::" is an
        operation; every other key is a module path. "op:...", "module:...", "class:..." and "region:..." say so explicitly.

        Raises: as `Policy` and `Rule` do; InvalidOption for a file that cannot be read, UnknownOption for a key of it.
        """
        if isinstance(source, Policy):
            return source
        if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml")):
            return _from_toml(Path(source))
        if isinstance(source, str):
            return Policy.parse(source)
        if not isinstance(source, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(
                f"policy={source!r}",
                way_out=f"Give a preset ({', '.join(PRESETS)}), rules {{'softmax': 'fp32', 'layers.0.*': 'low'}}, the path of "
                "a TOML file, or a fxamp.Policy(...)",
            )
        return Policy(rules=_rules(source))

    def with_regions(self, regions: Mapping[str, str]) -> Policy:
        """The policy with these regions too. Raises: InvalidOption where it has one of that name with another glob."""
        if not isinstance(regions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(f"regions={regions!r} is no mapping", way_out="Write regions={'early': 'layers.[0-3]'}")
        mine = dict(self.regions)
        for name, pattern in regions.items():
            if mine.get(name, pattern) != pattern:
                raise errors.InvalidOption(
                    f"region {name!r} is {mine[name]!r} in the policy and {pattern!r} in regions=",
                    way_out="Define it in one place",
                )
        return replace(self, regions=tuple((mine | dict(regions)).items()))

    def check_regions(self) -> None:
        """Raises UnknownOption for a rule about a region that the policy does not define."""
        for rule in self.rules:
            if rule.kind == "region" and rule.pattern not in dict(self.regions):
                raise errors.unknown(
                    "region in the policy rule", rule.pattern, dict(self.regions) or ("none; say regions={name: glob}",)
                )

    # ---- deciding ---------------------------------------------------------------------------------------------------------
    def decide(self, op: str | None, module: str, classes: Sequence[str] = ()) -> Verdict:
        """(class, precision, reason, rule) for an operation at a module path.

        `op` is the canonical name, `namespace::name` for operations outside of torch, None for what is no operation;
        `classes` the full names of the classes of the modules around it.
        """
        cls, source = PRESETS[self.preset].classify(op)
        for rule in self.matching(op, module, classes):
            return Verdict(_OUTCOMES[rule.precision], _format(rule.precision), f"rule {rule}", rule)
        return Verdict(cls, None, source)

    def matching(self, op: str | None, module: str, classes: Sequence[str] = ()) -> Iterator[Rule]:
        """The rules that match an operation, the one that wins first.

        A rule about modules speaks of the operations that fxamp knows; the others in it keep their traced dtypes.
        """
        if not self.rules:
            return
        is_known = optable.classify(op)[0] is not OpClass.KEEP
        for rule, resolved in zip(reversed(self.rules), reversed(self._resolved), strict=True):
            if (rule.kind == "op" or is_known) and resolved.matches(op or "", module, classes):
                yield rule

    def resolved(self, rule: Rule) -> Rule:
        """A rule about a region as the rule about modules that it stands for; every other rule as it is."""
        return self._resolved[self.rules.index(rule)]

    @functools.cached_property
    def _resolved(self) -> tuple[Rule, ...]:
        """The rules, those about a region as rules about modules."""
        globs_of = dict(self.regions)
        return tuple(
            Rule(kind="module", pattern=globs_of[rule.pattern], precision=rule.precision)
            if rule.kind == "region" and rule.pattern in globs_of
            else rule
            for rule in self.rules
        )

    # ---- rules among themselves -------------------------------------------------------------------------------------------
    @property
    def shadowed(self) -> tuple[tuple[Rule, Rule], ...]:
        """(rule, later rule) for every rule that can never win, because a later one matches all that it matches."""
        return tuple({i: (self.rules[i], self.rules[j]) for i, j in self._shadowing()}.values())

    def _shadowing(self) -> list[tuple[int, int]]:
        resolved = self._resolved
        pairs = ((i, j) for j in range(len(resolved)) for i in range(j))
        return [(i, j) for i, j in pairs if resolved[j].covers(resolved[i])]


_OUTCOMES: Final = MappingProxyType(
    {
        "low": OpClass.LOW,
        "bf16": OpClass.LOW,
        "fp16": OpClass.LOW,
        "fp32": OpClass.HIGH,
        "keep": OpClass.KEEP,
    }
)


def _format(precision: str) -> str | None:
    return precision if precision in ("bf16", "fp16") else None


# ---- from mappings and files ----------------------------------------------------------------------------------------------
def _from_toml(path: Path) -> Policy:
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise errors.InvalidOption(
            f"the policy file {str(path)!r} cannot be read: {error}",
            way_out="docs/policy.md shows what such a file looks like",
        ) from error
    known: dict[str, Callable[[Any], Any]] = {"preset": str, "regions": _texts, "rules": _texts}
    for key in data:
        if key not in known:
            raise errors.unknown(f"key in the policy file {str(path)!r}", key, known)
    regions = known["regions"](data.get("regions", {}))
    return Policy(
        preset=str(data.get("preset", "autocast")), rules=_rules(_texts(data.get("rules", {}))), regions=tuple(regions.items())
    )


def _texts(table: Any) -> dict[str, str]:
    """A TOML table of texts. A table inside it is most often a dotted key without quotes."""
    if not isinstance(table, dict):
        raise errors.InvalidOption(f"{table!r} is no table of rules", way_out="Write [rules] and one line per rule")
    for key, value in table.items():
        if isinstance(value, dict):
            raise errors.InvalidOption(
                f"the key {key!r} in a policy file holds a table",
                way_out=f'Put keys with dots in quotes: "{key}.{next(iter(value), "x")}"',
            )
    return {str(key): str(value) for key, value in table.items()}


def _rules(lines: Mapping[str, str]) -> tuple[Rule, ...]:
    made: list[Rule] = []
    for key, precision in lines.items():
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            name = getattr(key, "__name__", "softmax")
            raise errors.InvalidOption(
                f"a policy with the key {key!r}",
                way_out=f"Name what it speaks of: {f'class:{name}' if inspect.isclass(key) else name!r}",
            )
        kind, pattern = _kind_of(key)
        made.append(Rule(kind=kind, pattern=pattern, precision=precision))
    return tuple(made)


def _kind_of(key: str) -> tuple[Kind, str]:
    for kind in KINDS:
        if key.startswith(f"{kind}:") and not key.startswith(f"{kind}::"):
            return kind, key.removeprefix(f"{kind}:")
    return ("op" if "::" in key or key in optable.TABLE else "module"), key
