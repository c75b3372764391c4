from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fxamp
from fxamp import Policy, Rule, errors, optable
from fxamp.explain.report import Report
from fxamp.optable import OpClass
from fxamp.policy import KINDS, PRESETS, RULE_PRECISIONS
from tests.programs import Attention, Fn, planned, relative_error, step

names = st.from_regex(r"[a-z]{1,3}", fullmatch=True).filter(lambda name: name not in KINDS)
patterns = st.text("abcxyz019_.*?:[]! ", min_size=1, max_size=8).filter(lambda text: text == text.strip() and text[0] != ":")
rules = st.builds(Rule, kind=st.sampled_from(KINDS), pattern=patterns, precision=st.sampled_from(RULE_PRECISIONS))


def test_a_pattern_that_ends_in_a_colon_defines_no_region():
    policy = Policy(rules=(Rule(kind="op", pattern="b:", precision="low"), Rule(kind="class", pattern="a:", precision="fp32")))
    assert Policy.parse(str(policy)) == policy


@given(
    st.sampled_from(tuple(PRESETS)),
    st.lists(rules, max_size=4),
    st.dictionaries(names, patterns, max_size=3),
)
def test_a_policy_reads_its_own_text(preset: str, rules: list[Rule], regions: dict[str, str]):
    try:
        policy = Policy(preset=preset, rules=tuple(rules), regions=tuple(regions.items()))
    except errors.ContradictoryRules:
        return
    assert Policy.parse(str(policy)) == policy
    assert Policy.of(policy) is policy


@given(rules)
def test_a_key_of_a_mapping_is_a_rule_without_its_precision(rule: Rule):
    assert Policy.of({f"{rule.kind}:{rule.pattern}": rule.precision}).rules == (rule,)


def test_keys_of_a_mapping():
    policy = Policy.of({"softmax": "bf16", "layers.0.*": "fp32", "mylib::*": "low", "module:linear": "keep"})
    assert str(policy) == "autocast; op:softmax=bf16; module:layers.0.*=fp32; op:mylib::*=low; module:linear=keep"


def test_toml(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text(
        'preset = "matmul_only"\n[regions]\nearly = "layers.[0-3]"\n[rules]\nsoftmax = "bf16"\n"region:early" = "fp32"\n'
    )
    want = Policy.parse("matmul_only; early:=layers.[0-3]; op:softmax=bf16; region:early=fp32")
    assert Policy.of(path) == Policy.of(str(path)) == want


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[rule]\nsoftmax = 'bf16'", errors.UnknownOption, "Did you mean 'rules'?"),
        ("[rules]\nsoftmax = 16", errors.UnknownOption, "Known: low, fp32, bf16, fp16, keep"),
        ("[rules]\nlayers.0 = 'bf16'", errors.InvalidOption, 'Put keys with dots in quotes: "layers.0"'),
        ("rules = 'bf16'", errors.InvalidOption, "Write [rules] and one line per rule"),
        ("preset =", errors.InvalidOption, "cannot be read: Invalid value"),
        (None, errors.InvalidOption, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_says_so(tmp_path: Path, text: str | None, error: type[Exception], message: str):
    path = tmp_path / "policy.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=re.escape(message)):
        Policy.of(path)


def test_the_last_rule_that_matches_decides():
    policy = Policy.of({"linear": "fp32", "module:head": "low", "layers.*": "keep"})
    assert policy.decide("linear", "body")[0] is OpClass.HIGH
    assert policy.decide("linear", "head")[0] is OpClass.LOW
    assert policy.decide("linear", "layers.3")[0] is OpClass.KEEP
    assert policy.decide("softmax", "body")[0] is OpClass.HIGH


def test_a_modules_rule_leaves_unlisted_operations_alone():
    policy = Policy.of({"head": "bf16"})
    assert policy.decide("linear", "head") == (OpClass.LOW, "bf16", "rule module:head=bf16", policy.rules[0])
    assert policy.decide("mylib::scan", "head")[0] is OpClass.KEEP
    assert Policy.of({"mylib::*": "bf16"}).decide("mylib::scan", "head")[0] is OpClass.LOW


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("autocats", errors.UnknownOption, "Did you mean 'autocast'?"),
        ("autocast; early:=a; region:earl=bf16; early:=b", errors.InvalidOption, "a region is defined twice"),
        ("autocast; op:=a", errors.InvalidOption, "region 'op' = 'a' cannot be written down"),
        ({"a;b": "bf16"}, errors.InvalidOption, "cannot be written down"),
        ({":": "bf16"}, errors.InvalidOption, "does not begin with ':'"),
        ("autocast; op::=low", errors.InvalidOption, "does not begin with ':'"),
        ("autocast; op:softmax", errors.InvalidOption, "Write 'op:softmax=bf16'"),
        ("autocast; layer:x=bf16", errors.UnknownOption, "Known: op, module, class, region"),
        ({"softmax": "int8"}, errors.UnknownOption, "Known: low, fp32, bf16, fp16, keep"),
        ("softmax=fp32", errors.InvalidOption, "A preset comes first: 'autocast; op:softmax=fp32'"),
        (3, errors.InvalidOption, "Give a preset (autocast, conservative, matmul_only, pure)"),
        ([("softmax", "fp32")], errors.InvalidOption, "rules {'softmax': 'fp32', 'layers.0.*': 'low'}"),
        (Policy, errors.InvalidOption, "Give a preset"),
        ({nn.Linear: "fp32"}, errors.InvalidOption, "Name what it speaks of: 'class:Linear'"),
        ({torch.relu: "fp32"}, errors.InvalidOption, "Name what it speaks of: 'relu'"),
        ({3: "fp32"}, errors.InvalidOption, "a policy with the key 3"),
        ({"softmax": torch.float32}, errors.UnknownOption, "Did you mean 'fp32'?"),
    ],
)
def test_what_cannot_be_read_says_so(source: object, error: type[Exception], text: str):
    with pytest.raises(error, match=re.escape(text)):
        Policy.of(source)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rules": {"softmax": "fp32"}}, "Policy.of({'softmax': 'fp32'})"),
        ({"rules": "op:softmax=fp32"}, "Policy.parse('autocast; op:softmax=fp32')"),
        ({"rules": ["op:softmax=fp32"]}, "a Policy with rules="),
        ({"rules": 3}, "a Policy with rules=3"),
        ({"regions": [("a",)]}, "Give (name, glob of module paths) of each"),
        ({"regions": "ab"}, "a Policy with regions='ab'"),
        ({"regions": 3}, "a Policy with regions=3"),
        ({"regions": {"a": 3}}, "region 'a' = 3 cannot be written down"),
        ({"regions": {3: "a"}}, "region 3 = 'a' cannot be written down"),
    ],
)
def test_a_policy_of_wrong_parts_says_so(fields: dict[str, object], text: str):
    with pytest.raises(errors.InvalidOption, match=re.escape(text)):
        Policy(**fields)  # pyright: ignore[reportArgumentType]


def test_what_is_no_text_is_no_policy():
    assert Policy(regions={"a": "b"}) == Policy(regions=(("a", "b"),))  # pyright: ignore[reportArgumentType]
    for text in (3, None, {"softmax": "fp32"}):
        with pytest.raises(errors.InvalidOption, match="Give it a text"):
            Policy.parse(text)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidOption, match="has a pattern that cannot be written down"):
        Rule(kind="op", pattern=3, precision="fp32")  # pyright: ignore[reportArgumentType]


def test_the_policy_of_the_page_is_what_it_says():
    page = (Path(__file__).parents[1] / "docs" / "policy.md").read_text()
    code = page.split("## In Python\n\n```python\n")[1].split("```")[0]
    found = {"fxamp": fxamp}
    exec(code, found)
    policy = found["policy"]
    assert f"# {str(policy)!r}\n" in code
    assert Policy.parse(str(policy)) == policy
    assert {f.name for f in dataclasses.fields(Policy)} == set(re.findall(r"^    (\w+)=", code, flags=re.M))
    verdict = policy.decide("softmax", "layers.7.attn")
    assert f"precision={verdict.precision!r}, why={verdict.why!r}" in code


# ---- what a rule matches --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "module", "want"),
    [
        ("module:head", "head", True), ("module:head", "head.proj", True), ("module:head", "header", False),
        ("module:layers.0.*", "layers.0", True), ("module:layers.0.*", "layers.0.attn.q", True),
        ("module:layers.0.*", "layers.01", False), ("module:layers.[0-3]", "layers.2.mlp", True), ("module:*", "", True),
        ("module:?", "", False), ("module:?", "a", True), ("class:Block", "layers.0", True),
        ("class:torch.nn.*", "layers.0", True),
        ("class:*Norm", "layers.0", False), ("region:early", "layers.1.mlp", True), ("region:early", "layers.4", False),
        ("region:late", "layers.4", False),
    ],
)  # fmt: skip
def test_a_rule_speaks_of_all_that_is_inside(rule: str, module: str, want: bool):
    policy = Policy.parse(f"autocast; early:=layers.[0-3]; {rule}=keep")
    classes = ("my.models.Block", "torch.nn.modules.linear.Linear")
    assert (policy.decide("linear", module, classes)[0] is OpClass.KEEP) is want


def test_modules_are_found_by_path_and_class_under_every_way_to_compile():
    class Norm(nn.Module):
        def forward(self, x):
            return x.sigmoid()

    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), Norm()), "head": nn.Linear(4, 4)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["head"](self.parts["body"](x))

    whole = Model()
    for fn in (whole, lambda x: whole(x)):
        policy = {"parts.body": "keep", "class:Norm": "fp16", "parts.head": "fp16"}
        _, made = planned(fn, torch.rand(2, 4), policy=policy)
        got = [(d.op, d.cls.value, d.why) for d in made.decisions.values()]
        assert got == [
            ("linear", "keep", "rule module:parts.body=keep"),
            ("sigmoid", "low", "rule class:Norm=fp16"),
            ("linear", "low", "rule module:parts.head=fp16"),
        ]


# ---- rules among themselves -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    ["op:softmax=bf16; op:softmax=fp32", "op:a*=low; op:a**=fp32", "module:a=low; module:a.*=fp32", 
     "class:?*=low; class:*?=keep", "part:=a; module:a=low; region:part=fp32"],
)  # fmt: skip
def test_contradictions_raise(text: str):
    with pytest.raises(errors.ContradictoryRules, match="speak of the same operations. Delete the one that you do not mean"):
        Policy.parse(f"autocast; {text}")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("op:softmax=bf16; op:soft*=fp32", ["op:softmax=bf16"]),
        ("op:soft*=bf16; op:softmax=fp32", []),  # the later one is the more specific: both have something to say
        ("op:softmax=bf16; op:softmax=bf16", ["op:softmax=bf16"]),
        ("module:layers.0=bf16; module:layers=fp32", ["module:layers.0=bf16"]),
        ("module:layers.0.attn.*=bf16; module:layers.?.*=fp32", ["module:layers.0.attn.*=bf16"]),
        ("op:softmax=bf16; op:mylib::*=low; module:head=low; class:Norm=low; module:*=fp32",
         ["op:softmax=bf16", "module:head=low", "class:Norm=low"]),
        ("class:Norm=bf16; module:norm=fp32", []),
    ],
)  # fmt: skip
def test_rules_that_can_never_win(text: str, want: list[str]):
    assert [str(earlier) for earlier, _ in Policy.parse(f"autocast; {text}").shadowed] == want


@given(
    st.lists(rules, min_size=1, max_size=4),
    st.sampled_from(("softmax", "a", "x::y")),
    st.sampled_from(("", "a", "x.a", "0.y")),
)
def test_a_shadowed_rule_never_decides(rules: list[Rule], op: str, module: str):
    try:
        policy = Policy(rules=tuple(rules))
    except errors.ContradictoryRules:
        return
    verdict = policy.decide(op, module, (module,))
    assert verdict.rule not in {earlier for earlier, later in policy.shadowed if earlier != later}


# ---- presets --------------------------------------------------------------------------------------------------------------
CLASSES = {
    #            autocast  conservative  matmul_only  pure
    "linear":    ("low",    "low",        "low",       "low"),
    "conv2d":    ("low",    "low",        "high",      "low"),
    "scaled_dot_product_attention": ("low", "low", "high", "low"),
    "softmax":   ("high",   "high",       "high",      "low"),
    "layer_norm": ("high",  "high",       "high",      "low"),
    "cross_entropy": ("high", "high",     "high",      "low"),
    "dropout":   ("high",   "high",       "high",      "high"),
    "addcmul":   ("widest", "high",       "high",      "low"),
    "cat":       ("widest", "widest",     "widest",    "low"),
    "gelu":      ("follow", "high",       "high",      "low"),
    "add":       ("follow", "high",       "high",      "low"),
    "batch_norm": ("follow", "high",      "high",      "low"),
    "where":     ("follow", "follow",     "follow",    "low"),
    "reshape":   ("follow", "follow",     "follow",    "follow"),
    "amax":      ("follow", "follow",     "follow",    "follow"),
    "svd":       ("keep",   "keep",       "keep",      "keep"),
    "mylib::op": ("keep",   "keep",       "keep",      "keep"),
}  # fmt: skip


def test_the_presets_are_what_they_say():
    got = {op: tuple(preset.classify(op)[0].value for preset in PRESETS.values()) for op in CLASSES}
    assert list(PRESETS) == ["autocast", "conservative", "matmul_only", "pure"]
    assert got == CLASSES


def test_matmul_only_lowers_products_and_nothing_else():
    low = {op for op in optable.TABLE if PRESETS["matmul_only"].classify(op)[0] is OpClass.LOW}
    assert low == set(optable.PRODUCTS.split())
    assert low < set(optable.AUTOCAST_LOW.split())


@pytest.mark.parametrize(
    ("preset", "want"),
    [
        ("autocast", ["bf16", "bf16", "fp32", "bf16", "bf16", "fp32"]),
        ("conservative", ["bf16", "fp32", "fp32", "bf16", "fp32", "fp32"]),
        ("matmul_only", ["fp32", "fp32", "fp32", "bf16", "fp32", "fp32"]),
        ("pure", ["bf16", "bf16", "bf16", "bf16", "bf16", "bf16"]),
    ],
)
def test_a_preset_in_a_model(preset: str, want: list[str]):
    model = Fn(
        lambda m, x: torch.softmax(m.lin(m.norm(m.conv(x).relu().flatten(1))).sigmoid(), -1),
        conv=nn.Conv2d(1, 2, 3), norm=nn.LayerNorm(8), lin=nn.Linear(8, 4),
    )  # fmt: skip
    _, made = planned(model, torch.rand(2, 1, 4, 4), policy=preset)
    assert [d.computes for d in made.decisions.values() if d.op != "flatten"] == want


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_is_right_within_its_format(preset: str):
    model = Fn(
        lambda m, x: m.head(m.attn(m.norm(m.bn(m.conv(x)).flatten(2))).relu().mean(1)).softmax(-1),
        conv=nn.Conv2d(1, 6, 3), bn=nn.BatchNorm2d(6), norm=nn.LayerNorm(16), attn=Attention(16, 2), head=nn.Linear(16, 4),
    )  # fmt: skip
    x = torch.randn(2, 1, 6, 6)
    want = step(copy.deepcopy(model).double(), [x.double()], backend="eager")
    got = step(model, [x], backend=fxamp.Amp(precision="bf16", policy=preset, lower="eager"))
    for key, value in want.items():
        is_float = value.is_floating_point()
        assert got[key].dtype == (torch.float32 if is_float else value.dtype), key
        if is_float and value.norm() > 1e-3:
            assert relative_error(got[key], value) < (0.3 if "grad" in key else 0.02), key


@pytest.mark.parametrize("policy", ["pure", {"batch_norm": "low", "instance_norm": "low"}, {"op:*": "bf16"}])
def test_running_statistics_are_written_under_every_policy(policy: object):
    norms = nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), *norms)
    x = torch.rand(2, 1, 6, 6)
    want = step(model, [x], backend="eager")
    got = step(model, [x], backend=fxamp.Amp(precision="bf16", policy=policy, lower="eager"))
    for key in [key for key in want if "running" in key]:
        assert torch.allclose(got[key], want[key], rtol=0.02, atol=1e-3), key
        assert not torch.equal(want[key], model.state_dict()[key])


# ---- custom operations ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mylib():
    lib = torch.library.Library("mylib", "DEF")  # noqa: TOR901
    lib.define("twice(Tensor x) -> Tensor")
    lib.define("only_fp32(Tensor x) -> Tensor")
    lib.define("store(Tensor x, Tensor(a!) into) -> Tensor")

    def only_fp32(x):
        if x.dtype != torch.float32:
            raise TypeError("fp32 only")
        return x * 2

    def store(x, into):
        into.copy_(x)
        return x * 2

    lib.define("relu(Tensor x) -> Tensor")  # a namesake of torch's
    for kind in ("CPU", "Meta"):
        lib.impl("relu", lambda x: x.relu(), kind)
        lib.impl("twice", lambda x: x * 2, kind)
        lib.impl("only_fp32", only_fp32, kind)
        lib.impl("store", store, kind)
    yield torch.ops.mylib
    lib._destroy()


def test_a_namespace_is_low_on_the_users_word(mylib):
    amp = fxamp.Amp(precision="bf16", policy={"mylib::*": "low"}, lower="eager")
    model = Fn(lambda m, x: mylib.only_fp32(mylib.twice(m.lin(x))), lin=nn.Linear(4, 4))
    torch.compile(model, backend=amp)(torch.rand(2, 4))
    plan = amp.graphs[0].variants["bf16"].plan
    assert [(d.op, d.computes) for d in plan.decisions.values()] == [
        ("linear", "bf16"), ("mylib::twice", "bf16"), ("mylib::only_fp32", "fp32"),
    ]  # fmt: skip
    (use,) = amp.report().rules
    assert (use.num_matched, use.num_decided, use.num_followed) == (2, 2, 1)
    assert use.note.startswith("not followed by mylib::only_fp32 at test_policy.py:")
    assert "refuses bf16: fp32 only" in use.note
    amp = fxamp.Amp(precision="bf16", policy={"mylib::twice": "low"}, lower="eager")
    torch.compile(model, backend=amp)(torch.rand(2, 4))
    assert amp.report().rules[0].note == "runs low on this rule's word alone: mylib::twice"


@pytest.mark.parametrize("overload", ["default", None])
def test_a_custom_operation_is_no_namesake_of_torchs(mylib, overload: str | None):
    op = mylib.relu if overload is None else getattr(mylib.relu, overload)
    _, made = planned(lambda a: op(a @ a), torch.rand(4, 4))
    assert [(d.op, d.computes) for d in made.decisions.values()] == [("matmul", "bf16"), ("mylib::relu", "fp32")]


def test_what_a_custom_operation_writes_is_written(mylib):
    model = Fn(lambda m, x: mylib.store(m.lin(x), m.kept), lin=nn.Linear(4, 4), kept=torch.zeros(2, 4))
    x = torch.rand(2, 4)
    torch.compile(model, backend=fxamp.Amp(precision="bf16", policy={"mylib::*": "low"}, lower="eager"))(x)
    assert torch.allclose(model.kept, model.lin(x), atol=0.02)


# ---- what became of the rules ---------------------------------------------------------------------------------------------
def test_rules_that_did_nothing_are_reported_and_warned_of_once():
    policy = {"sofmax": "bf16", "op:sofmax": "bf16", "class:Liner": "fp32", "0": "low", "op:linear": "low", "op:line*": "fp32"}
    amp = fxamp.Amp(precision="bf16", policy=policy, lower="eager")
    assert [use.num_matched for use in amp.report().rules] == [0] * 6  # and no warning before anything was compiled
    with pytest.warns(fxamp.FxampWarning, match="Did you mean") as caught:  # what was hardly meant is told of at once
        torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), backend=amp)(torch.rand(2, 4))
    assert [str(c.message) for c in caught] == [
        "policy: the rule module:sofmax=bf16 matches no module so far, and is no operation of torch. Did you mean the "
        "operation 'softmax'?",
        "policy: the rule op:sofmax=bf16 matches no operation so far. Did you mean 'softmax'?",
    ]
    with pytest.warns(fxamp.FxampWarning, match="rules of the policy that decide nothing: module:sofmax=bf16") as caught:
        report = amp.report()
    assert len(caught) == 1
    assert [use.note for use in report.rules] == [
        "matched nothing. Did you mean the operation 'softmax'?",
        "matched nothing. Did you mean 'softmax'?",
        "matched nothing. Did you mean 'Linear'?",
        "lost everywhere: a later rule matches too",
        "can never win: op:line*=fp32, behind it, matches all that it does",
        "",
    ]
    other = fxamp.Amp(precision="bf16", policy={"vander": "low"}, lower="eager")
    torch.compile(lambda x: torch.vander(x), backend=other)(torch.rand(2))
    with pytest.warns(fxamp.FxampWarning, match="There is an operation of that name: write 'op:vander'"):
        other.report()
    assert str(amp.report()).count("matched nothing") == 3  # pytest would make an error of a second warning


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("matmull", "Did you mean the operation 'matmul'?"),
        ("layernorm", "There is a module of that name: write 'module:layernorm'"),
        ("LayerNorm", "There is a class of modules of that name: write 'class:LayerNorm'"),
        ("F.gelu", "Did you mean the operation 'gelu'?"),
        ("torch.softmax", "Did you mean the operation 'softmax'?"),
        ("aten::mm", "Did you mean the operation 'mm'?"),
        ("relu_", "Did you mean the operation 'relu'?"),
        ("truediv", "Did you mean the operation 'div'?"),
        ("op:crossentropy", "Did you mean the operation 'cross_entropy'?"),
        ("norm", "There is a module of that name: write 'module:norm'"),  # and an operation, which the key is taken for
    ],
)
def test_a_rule_that_is_hardly_meant_as_it_stands_is_told_of(key: str, meant: str, recwarn: pytest.WarningsRecorder):
    model = Fn(lambda m, x: m.norm(m.lin(x)), lin=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    if key == "layernorm":
        model = Fn(lambda m, x: m.layernorm(m.lin(x)), lin=nn.Linear(4, 4), layernorm=nn.LayerNorm(4))
        key = "op:layernorm"
    amp = fxamp.Amp(precision="bf16", policy={key: "fp32"}, lower="eager")
    torch.compile(model, backend=amp)(torch.rand(2, 4))
    (warned,) = (str(w.message) for w in recwarn if issubclass(w.category, fxamp.FxampWarning))
    assert warned.endswith(meant), warned
    assert [use.note.removeprefix("matched nothing. ") for use in _report_of(amp).rules] == [meant]


def _report_of(amp: fxamp.Amp) -> Report:
    with pytest.warns(fxamp.FxampWarning, match="rules of the policy that decide nothing"):
        return amp.report()


@pytest.mark.parametrize(
    "key",
    [
        *("norm", "linear1", "conv1", "layers.3.norms", "linears", "gate", "encoder", "head*"),
        *("op:relu", "class:Liner", "mylib::gelu"),
    ],
)
def test_a_rule_for_a_later_graph_is_not_told_of(key: str, recwarn: pytest.WarningsRecorder):
    amp = fxamp.Amp(precision="bf16", policy={key: "fp32"}, lower="eager")
    torch.compile(Fn(lambda m, x: m.lin(x), lin=nn.Linear(4, 4)), backend=amp)(torch.rand(2, 4))
    assert not [w for w in recwarn if issubclass(w.category, fxamp.FxampWarning)]


# ---- parts of models ------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x).relu()


def linears(amp: fxamp.Amp) -> list[str]:
    return [d.computes for d in amp.graphs[0].variants["bf16"].plan.decisions.values() if d.op == "linear"]


class Stack(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers, self.breaks = nn.ModuleList([Block(), Block(), Block()]), breaks

    def forward(self, x):
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = layer(x)
        return x


def per_block(policy: dict[str, str], **options: object) -> fxamp.Amp:
    model, amp = Stack(), fxamp.Amp(precision="bf16", lower="eager", policy=policy, **options)
    for layer in model.layers:
        layer.compile(backend=amp)
    model(torch.rand(2, 4, requires_grad=True))
    return amp


def test_a_rule_that_cannot_tell_instances_apart_raises():
    with pytest.raises(BackendCompilerFailed, match=re.escape(
        "ERROR[RuleOutOfReach]: the policy's rule 'module:layers.0=fp32' means layers.0 of Stack (not the 2 others), but this "
        "graph was compiled from a Block by itself (now layers.0), and one graph serves all 3 of them. Write the rule "
        "relative to Block, for all of them alike; or give each of these modules an Amp of its own; or compile Stack as a "
        "whole, without graph breaks above Block"
    )):  # fmt: skip
        per_block({"layers.0": "fp32"})


@pytest.mark.parametrize("policy", [{"layers.2.*": "fp32"}, {"layers.*.lin": "fp32"}, {"region:late": "fp32"}])
def test_so_does_one_for_another_instance_or_for_all(policy: dict[str, str]):
    with pytest.raises(BackendCompilerFailed, match="RuleOutOfReach"):
        per_block(policy, **({"regions": {"late": "layers.[12]"}} if "region:late" in policy else {}))
    with pytest.raises(BackendCompilerFailed, match="RuleOutOfReach"):
        per_block(policy, on_error="eager", **({"regions": {"late": "layers.[12]"}} if "region:late" in policy else {}))


def test_a_loop_of_the_users_own_is_seen_too():
    model, amp = Stack(), fxamp.Amp(precision="bf16", lower="eager", policy={"layers.0": "fp32"})
    for layer in model.layers:
        layer.compile(backend=amp)
    first = next(iter(model.layers))
    with pytest.raises(BackendCompilerFailed, match="means layers.0 of Stack"):
        first(torch.rand(2, 4))


def test_and_one_above_a_graph_break():
    model, amp = Stack(breaks=True), fxamp.Amp(precision="bf16", lower="eager", policy={"layers.1": "fp32"})
    with pytest.raises(BackendCompilerFailed, match="RuleOutOfReach"):
        torch.compile(model, backend=amp)(torch.rand(2, 4))


def test_rules_relative_to_the_part_hold_in_all_instances():
    amp = per_block({"lin": "fp32", "class:Block": "low", "op:linear": "keep"})
    assert len(amp.graphs) == 1
    assert [d.cls.value for d in amp.graphs[0].variants["bf16"].plan.decisions.values()] == ["keep", "follow"]


def test_a_whole_model_takes_paths_of_its_own():
    amp = fxamp.Amp(precision="bf16", lower="eager", policy={"layers.1": "fp32"})
    torch.compile(nn.Sequential(Stack())[0], backend=amp)(torch.rand(2, 4))
    assert linears(amp) == ["bf16", "fp32", "bf16"]


# ---- regions --------------------------------------------------------------------------------------------------------------
def test_regions_are_names_for_modules():
    amp = fxamp.Amp(precision="bf16", lower="eager", regions={"early": "layers.[01]"}, policy={"region:early": "fp32"})
    torch.compile(Stack(), backend=amp)(torch.rand(2, 4))
    assert linears(amp) == ["fp32", "fp32", "bf16"]
    assert str(amp.options.policy) == "autocast; early:=layers.[01]; region:early=fp32"
    assert amp.report().rules[0].num_decided == 4


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"policy": {"region:earl": "fp32"}, "regions": {"early": "a"}}, errors.UnknownOption, "Did you mean 'early'?"),
        ({"policy": {"region:early": "fp32"}}, errors.UnknownOption, "say regions={name: glob}"),
        ({"regions": {"early": "a"}}, errors.InvalidOption,
         "'early' has neither a rule nor a ladder to climb. Add a rule, policy={'region:early': 'fp32'}"),
        ({"regions": ("early",)}, errors.InvalidOption, "Write regions={'early': 'layers.[0-3]'}"),
        ({"regions": {"a": "x"}, "policy": Policy.parse("autocast; a:=y; region:a=low")}, errors.InvalidOption,
         "region 'a' is 'y' in the policy and 'x' in regions=. Define it in one place"),
    ],
)  # fmt: skip
def test_regions_that_cannot_be_used_say_so(options: dict[str, object], error: type[Exception], text: str):
    with pytest.raises(error, match=re.escape(text)):
        fxamp.Amp(**options)


def test_every_part_of_a_policy_is_part_of_its_key():
    texts = ["autocast", "pure", "pure; op:a=low", "pure; op:a=fp32", "pure; class:a=low"]
    texts += ["pure; r:=a; region:r=low", "pure; r:=b; region:r=low"]
    keys = {fxamp.Options(policy=Policy.parse(text)).key() for text in texts}
    assert len(keys) == len(texts)
