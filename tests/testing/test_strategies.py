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
