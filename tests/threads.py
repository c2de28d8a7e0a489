"""Run a function in several threads at once, for tests."""

import sys
import threading
from collections.abc import Callable
from typing import Any


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Return the results of ``function(0)``, …, ``function(count - 1)``, run at the same time.

    Threads start together and are switched often. The first exception of any of them is raised.
    """
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            barrier.wait()
            results[i] = function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return results
