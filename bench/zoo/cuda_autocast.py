"""CUDA's autocast on a CPU: `torch.autocast("cpu")` with the lists that PyTorch ships for CUDA.

The CPU's own lists are others (there softmax and layer_norm take whatever comes), and fxamp follows CUDA's, so a comparison
with the CPU's would compare two policies, not two implementations of one. The lists are read from the header of the installed
PyTorch, so they are its own, not fxamp's; each operation gets its kernel for the dispatch key of autocast on the CPU, with
PyTorch's rules:

    lower_precision_fp   every eligible operand in the low dtype
    fp32                 every eligible operand in fp32
    fp32_set_opt_dtype   `dtype=torch.float32`, unless the caller names a dtype or the first operand is not eligible
    fp32_append_dtype    the same, for operations whose form without `dtype` is another overload
    promote              every eligible operand in the widest dtype among the low dtype and the operands'

An operand is eligible if it is a floating tensor on the CPU and not float64.

Source of the rules: aten/src/ATen/autocast_mode.h of PyTorch (`CastPolicy`, `cached_cast`, `promote_type`).
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

HEADER: Final = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

_MACROS: Final = MappingProxyType(
    {
        "LOWER_PRECISION_FP": "lower_precision_fp",
        "FP32": "fp32",
        "FP32_SET_OPT_DTYPE": "fp32_set_opt_dtype",
        "DIFFERENT_REDISPATCH_SIGNATURE": "fp32_append_dtype",
        "PROMOTE": "promote",
    }
)
_ENTRY: Final = re.compile(r"^  _\((?:ADD_NS\(\w+\),\s*\"(?P<quoted>[\w.]+)\"|(?P<op>\w+)(?:,\s*(?P<overload>\w+))?\))", re.M)
_WITH_DTYPE: Final = MappingProxyType(
    {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
)
_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def lists(header: str) -> Mapping[str, str]:
    """Operation ("softmax.int", "linear") -> policy, from the text of the header."""
    found: dict[str, str] = {}
    for macro, policy in _MACROS.items():
        start = header.index(f"#define AT_FORALL_{macro}(_)")
        body = header[start : header.index("\n\n", start) if "\n\n" in header[start:] else None]
        for entry in _ENTRY.finditer(body.replace("\\\n", "\n").replace(" \n", "\n")):
            name = entry["quoted"] or entry["op"] + (f".{entry['overload']}" if entry["overload"] else "")
            found[name] = policy
    return MappingProxyType(found)


@contextlib.contextmanager
def cuda_lists_on_cpu() -> Iterator[None]:
    """While it lasts `torch.autocast("cpu")` casts as `torch.autocast("cuda")` does on a GPU."""
    cuda = lists(HEADER.read_text())
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # "overriding a previously registered kernel"
        for name in _on_cpus_lists() - cuda.keys():
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
        for name, policy in cuda.items():
            library.impl(name, _kernel(name, policy), "AutocastCPU", allow_override=True)
        yield


def _overload(name: str) -> OpOverload:
    op, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, op), overload or "default")


def _on_cpus_lists() -> set[str]:
    """The operations that autocast on the CPU has kernels for."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}


def _kernel(name: str, policy: str) -> Callable[..., Any]:
    op, with_dtype = _overload(name), _overload(_WITH_DTYPE.get(name, name))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if policy in ("fp32_set_opt_dtype", "fp32_append_dtype"):
                return _with_dtype(op, with_dtype, args, kwargs)
            to = low if policy == "lower_precision_fp" else torch.float32 if policy == "fp32" else _widest(low, (args, kwargs))
            cast = functools.partial(_cast, dtype=to)
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _with_dtype(op: OpOverload, with_dtype: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if not _is_eligible(args[0]) or given.get("dtype") is not None:
        return op(*args, **kwargs)
    return with_dtype(*args, **{**kwargs, "dtype": torch.float32})


def _widest(low: torch.dtype, operands: Any) -> torch.dtype:
    """PyTorch knows two cases: the low dtype, and fp32 as soon as one operand is fp32."""
    dtypes = {leaf.dtype for leaf in tree_leaves(operands) if _is_eligible(leaf)}
    return torch.float32 if torch.float32 in dtypes else low


def _is_eligible(value: Any) -> bool:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return is_floating and value.dtype != torch.float64 and value.device.type == "cpu"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_eligible(value) and value.dtype != dtype else value
