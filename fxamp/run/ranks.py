"""Is this process one of several that train together?"""

from __future__ import annotations


def is_one_of_many() -> bool:
    """Has torch.distributed been initialized?"""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()
