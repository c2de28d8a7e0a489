"""Memory that one step frees serves the next.

glibc gives big blocks back to the system as soon as they are free, and every activation of the next
step is then fetched again, page by page: a fifth to a third of the time of a step on a CPU.
"""

from __future__ import annotations

import ctypes

# malloc.h: what mallopt can set, and to what we set it.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 2**28}


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS and musl; no handle; Windows
        return False
    return all(mallopt(option, value) for option, value in KEEP.items())
