"""Lets gloo's threads release tensors before Python exits.

A thread of a gloo group drops a collective's tensors after the caller has moved on, and needs the GIL for that. Before
Python 3.14, a thread that requests the GIL during exit is killed, and the process aborts: "terminate called without an
active exception". `destroy_process_group` stops no thread while a mesh holds the group, as in DTensor's caches. Busy
cores make the abort likely, and so does a collective shortly before exit, such as an optimizer step's, for amaxes.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

NAME = "pt_gloo_runloop"  #: torch's name of these threads
_MILLISECONDS, _AT_REST = 2000, 5  # the longest wait at exit; how long all threads must be idle


def _states() -> list[str]:
    """Linux's state letter for each gloo thread: R while it runs or waits for a core, S while it sleeps."""
    found = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has just ended
            continue
        found += [rest.split()[0]] if name == NAME else []
    return found


@atexit.register
def let_go() -> None:
    """Releases the GIL to gloo's threads until all are idle, for up to 2 s."""
    if not (states := _states()):
        return
    at_rest = 0
    for _ in range(_MILLISECONDS):
        time.sleep(0.001)  # lets a waiting thread acquire the GIL
        states = _states()
        at_rest = at_rest + 1 if set(states) <= {"S"} else 0
        if at_rest == _AT_REST:
            return
