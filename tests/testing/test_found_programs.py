"""Programs, each the smallest that needs one rule: what random search found, and what kills a mutant (tools/mutants.py)."""

from __future__ import annotations

import pytest

from fxamp import testing
from fxamp.testing import Program

PROGRAMS = {
    # ---- found by search ------------------------------------------------------------------------------------------------
    "an output and an earlier reader share one cast": '''
        def forward(x: "f32[4, 4]"):
            v0 = F.linear(x, x)
            v1 = torch.cat([x, v0])
            return v0, v1,
    ''',
    "running statistics stay fp32, what they normalise follows": '''
        def forward(x: "f32[4, 4]"):
            v0 = F.linear(x, x, x[0])
            v1 = F.batch_norm(v0, x[0].detach(), x[1].detach().abs(), None, None, True)
            return v1,
    ''',
    "what reads a value that is widened early has its strides": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            b = a.expand(2, 4, 4)
            c = b.float()
            return c,
    ''',
    "so has what joins it": '''
        def forward(x: "f32[4, 4] whole", y: "f32[2, 4, 4] whole"):
            a = x @ x
            b = a.expand(2, 4, 4)
            c = b.float()
            return torch.maximum(c, y), torch.maximum(b, y), c.exp(), b.softmax(-1),
    ''',
    # ---- writes, through every name, before and after a product has read the value -----------------------------------------
    **{
        f"written between two products by {write}": f'''
        def forward(x: "f32[4, 4] whole", i: "i64[4]"):
            a = x @ x
            b = a @ x
            {write}
            return b, a @ x,
        '''
        for write in (
            "a.add_(1.0)", "a += 1.0", "a[0] = 1.0", "a[i] = 0.0", "a.t().add_(1.0)", "a.detach().mul_(2.0)", "torch.relu_(a)",
            "F.relu(a, inplace=True)", "torch.add(x, x, out=a)", "torch.ops.aten.add_.Tensor(a, x)", "a.copy_(x)",
            "torch._foreach_add_([a], 1.0)", "a[1:3].zero_()", "a.view(-1)[3:].add_(1.0)",
        )
    },
    "an argument written between two products": '''
        def forward(x: "f32[4, 4] whole", w: "f32[4, 4] buffer whole"):
            a = x @ w
            w.mul_(2.0)
            return a, x @ w,
    ''',
    "a view written, and its base read low": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            b = a.t()
            c = b @ x
            b.add_(1.0)
            return c, a @ x, b,
    ''',
    "written in one grad mode, computed in another": '''
        def forward(x: "f32[4, 4] grad whole"):
            a = x @ x
            with torch.no_grad():
                a.mul_(2.0)
            return a,
    ''',
    "a view that is the argument itself, written": '''
        def forward(x: "f32[4, 4] whole", w: "f32[4, 4] whole"):
            b = w.contiguous()
            c = w @ x
            b.add_(1.0)
            return c, w @ x, b,
    ''',
    # ---- memory -----------------------------------------------------------------------------------------------------------
    "two outputs in one memory": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            return a, a.view(-1), a[1],
    ''',
    "two outputs that are views of what is not returned": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            b, c = a.chunk(2)
            return b, c,
    ''',
    "a copy of a low value, written": '''
        def forward(x: "f32[4, 4] whole"):
            a = (x @ x)[:, :2]
            b = a.exp().round()
            c = a.contiguous()
            c.add_(1.0)
            return c, a,
    ''',
    "a cast up that is handed on and written": '''
        def forward(x: "f32[4, 4] whole", y: "f32[4, 4] whole"):
            a = x @ x
            b = a.sum(-1)
            c = a.float()
            c.add_(1.0)
            return b, c, a.sum(0),
    ''',
    "dropout that hands on its operand, written": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            b = a.sum(-1)
            c = F.dropout(a, 0.5, False)
            c.add_(1.0)
            return b, c, a.sum(0),
    ''',
    "a reshape that hands on its operand, written": '''
        def forward(x: "f32[4, 4] whole", y: "f32[4, 4] whole"):
            a = x @ x
            b = a.sum(-1)
            c = a.reshape(4, 4)
            c.add_(1.0)
            return b, c, a.sum(0),
    ''',
    **{
        f"a product handed on by {hands_on} where gradients are off": f'''
        def forward(x: "f32[4, 4] grad whole"):
            a = x @ x
            with torch.no_grad():
                b = {hands_on}
            return b,
        '''
        for hands_on in ("a.contiguous()", "a.float()", "F.dropout(a, 0.5, False)")
    },
    "a view of what is written where gradients are off": '''
        def forward(x: "f32[4, 4] grad"):
            a = x @ x
            b = (a @ a).half()
            with torch.no_grad():
                b[1:3] = b[0]
            return b,
    ''',
    "a product laid out as it is where a gradient is wanted": '''
        def forward(x: "f32[4, 4] grad"):
            a = x @ x
            b = F.avg_pool1d(a.unsqueeze(0), 3)
            return torch.matmul(a, b),
    ''',
    **{
        f"a cast lays out anew what {view} sees where autocast is off": f'''
        def forward(x: "f32[4, 4] whole"):
            a = (x @ x)[:, :2]
            with torch.autocast("cpu", enabled=False):
                b = {view}
            return b,
        '''
        for view in ("a.unsqueeze(0)", "a.t()", "a.t().reshape(-1)", "a.t().exp()", "torch.ops.aten.t.default(a)")
    },
    "a sum handed on where gradients are off, and read where they are on": '''
        def forward(x: "f32[4, 4] grad whole"):
            a = x @ x + 1.0
            with torch.no_grad():
                b = a.to(torch.float32)
            return b * 2.0, b @ x,
    ''',
    # ---- in place, or ordinary --------------------------------------------------------------------------------------------
    "read again after it was written in place": '''
        def forward(x: "f32[4, 4] whole"):
            a = x + 1.0
            b = a.relu_()
            return b @ x, a @ x,
    ''',
    "a view read again after its base was written": '''
        def forward(x: "f32[4, 4] whole"):
            a = x + 1.0
            v = a.t()
            b = a.mul_(2.0)
            return b @ x, v @ x,
    ''',
    "an argument that is written and returned": '''
        def forward(x: "f32[4, 4] whole"):
            y = x.add_(1.0)
            return y @ y,
    ''',
    "a wider operand added in place": '''
        def forward(x: "f32[4, 4] whole", d: "f64[4, 4] whole"):
            a = x + 1.0
            b = a.add_(d)
            return b * 2.0,
    ''',
    "in place keeps strides": '''
        def forward(x: "f32[4, 4] whole", y: "f32[4, 4] whole"):
            a = (x + 1.0).t()
            b = a.add_(y)
            return b.view(torch.int32), b,
    ''',
    # ---- modes ------------------------------------------------------------------------------------------------------------
    "one value cast with and without a history": '''
        def forward(x: "f32[4, 4] grad whole"):
            with torch.no_grad():
                a = x @ x
            return a, x @ x,
    ''',
    "one value cast without a history first, for an output": '''
        def forward(x: "f32[4, 4] grad whole"):
            a = x @ x
            with torch.no_grad():
                b = a.sum(-1)
            return a, b,
    ''',
    "a region that opted out": '''
        def forward(x: "f32[4, 4]"):
            a = x @ x
            with torch.autocast("cpu", enabled=False):
                b = a @ x
            return b,
    ''',
    "a region of the user's own": '''
        def forward(x: "f32[4, 4]"):
            a = x @ x
            with torch.autocast("cpu", dtype=torch.bfloat16):
                b = a @ x
                c = a.relu()
            return b, c,
    ''',
    # ---- types ------------------------------------------------------------------------------------------------------------
    **{
        f"{kind} beside a low value": f'''
        def forward(x: "f32[4, 4] whole", o: "{kind}[4, 4] whole", s: "{kind}[] whole"):
            a = x @ x
            return a + o, a * s, torch.where(o > 0, a, o),
        '''
        for kind in ("f64", "f16", "bf16", "i64")
    },
    "a dtype that the program names": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            return a.view(torch.int32), torch.sum(a, -1, dtype=torch.float64), torch.zeros_like(a, dtype=torch.float32),
    ''',
    "a 0-dim value that a lower format does not have": '''
        def forward(x: "f32[4, 4] whole", p: "b8[4, 4]"):
            a = x @ x
            s = torch.tensor(257.0)
            return torch.where(p, a, s), torch.maximum(a, s), a.clamp(s, s), a.masked_fill(p, s),
    ''',
    "a constant that a lower format does not have": '''
        def forward(x: "f32[4, 4] whole", p: "b8[4, 4]"):
            a = x @ x
            return a.masked_fill(p, -3.4028234663852886e+38), torch.where(p, a, 3.4e38),
    ''',
    "an einsum that is a view, written": '''
        def forward(x: "f32[4, 4] whole"):
            a = torch.einsum("ij->ji", x)
            a.add_(1.0)
            return x @ x,
    ''',
    "a product that is written from birth": '''
        def forward(x: "f32[4, 4] whole"):
            a = x @ x
            b = a.t()
            a.add_(257.0)
            return b, a,
    ''',
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_needed_a_rule(name: str):
    program = Program(PROGRAMS[name])
    testing.check(program)
    testing.check(program, precision="fp32")


def test_two_low_formats_widen_each_other():
    program = Program(
        '''
        def forward(x: "f32[4, 4]"):
            a = x @ x
            b = x.mm(x)
            return a + b,
        '''
    )
    testing.check(program, {"mm": "fp16"})  # bf16 + fp16: in fp16, a large bf16 value would be infinite


@pytest.mark.parametrize(
    "text",
    [
        # random numbers, which eager and compiled programs draw differently unless they are told not to
        '''
        def forward(x: "f32[4, 4]"):
            a = x @ x
            return F.dropout(a, 0.5, True, True), F.dropout(x, 0.5, True),
        ''',
        # the invariants of joint graphs: a cast of one of several results
        '''
        def forward(x: "f32[4, 4] grad"):
            a = x.detach() @ x.detach()
            b, c = a.chunk(2)
            return b,
        ''',
        # autocast's own cast, in the backward of a region of the user's, is no decomposition's
        '''
        def forward(x: "f32[4, 4] grad"):
            a = x @ x
            with torch.autocast("cpu", dtype=torch.bfloat16):
                b = a @ a
            return b,
        ''',
        # the decomposition of a product with a vector has casts of its own
        '''
        def forward(x: "f32[4, 4] whole"):
            a, b = x.max(-1)
            return torch.matmul(x, a),
        ''',
        # AOTAutograd by itself gives an output in memory of its own
        '''
        def forward(x: "f32[4, 4] grad"):
            x.detach().mul_(2.0)
            a, b = x.chunk(2)
            return a, x @ x,
        ''',
        # a region of the user's own, in which AOTAutograd by itself sums low gradients in another order
        '''
        def forward(x: "f32[4, 4] grad"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                a = x @ x
                b = (x @ a).tanh() @ a
            return b,
        ''',
        '''
        def forward(x: "f32[4, 4] grad", w: "f32[4, 4] parameter"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                a = checkpoint(lambda x: (x @ w).tanh() @ w, x)
            return a,
        ''',
        # what AOTAutograd by itself computes otherwise than eager, or refuses: writes of batch_norm that autograd misses,
        # and a write to what a checkpoint returns and would have computed anew
        *(
            f'''
            def forward(x: "f32[4, 4] grad", w: "f32[4, 4] parameter"):
                a = F.batch_norm({read}, {written}[0].detach(), {written}[1].detach().abs(), None, None, True)
                return a,
            '''
            for read, written in (("w", "x"), ("w", "w"), ("x", "x"))
        ),
        '''
        def forward(x: "f32[4, 4]"):
            a = F.batch_norm(x, x[0].detach(), x[1].detach().abs(), None, None, True)
            return a,
        ''',
        '''
        def forward(x: "f32[4, 4] grad"):
            a = checkpoint(lambda x: (x @ x).relu(), x)
            a.add_(1.0)
            return a,
        ''',
    ],
)
def test_behind_aot_autograd(text: str):
    testing.check(Program(text), lower="aot_eager")


def test_they_say_what_they_are():
    assert all(Program(text).text.startswith("def forward(x: ") for text in PROGRAMS.values())
