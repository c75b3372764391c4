"""Which programs are drawn: those of which eager PyTorch gives a right answer."""

from __future__ import annotations

import pytest

from fxamp.testing import strategies


@pytest.mark.parametrize(("reads", "is_drawn"), [("torch.addmm(v, v, v)", False), ("v * 2.0", True)])
def test_no_gradient_hangs_on_what_batch_norm_writes_unseen(reads: str, is_drawn: bool):
    """Eager's backward of `addmm` reads the running statistics where v was; that of a product with a number reads none."""
    program = f'''def forward(x: "f32[4, 4] grad"):
    v = x @ x
    w = {reads}
    y = F.batch_norm(w, v[0].detach(), v[1].detach().abs(), None, None, True)
    return locals()
'''
    assert (strategies._known(program, False) is not None) == is_drawn


@pytest.mark.parametrize(("written", "is_drawn"), [("[v, v]", False), ("[v, v.t()]", False), ("[v, w]", True)])
def test_no_list_holds_memory_twice_that_is_written(written: str, is_drawn: bool):
    """Eagerly `_foreach_add_` writes it twice; compiled, by any back end of PyTorch's, once."""
    program = f'''def forward(x: "f32[4, 4]"):
    v = x @ x
    w = x * 2.0
    torch._foreach_add_({written}, 1.0)
    return locals()
'''
    assert (strategies._known(program, False) is not None) == is_drawn
