"""Threads of gloo, which must release tensors before Python ends.

A thread of a gloo group drops a collective's tensors after the collective's caller goes on, and needs the GIL for that.
A thread that asks for the GIL once Python ends is killed before Python 3.14, and the process aborts: "terminate called
without an active exception". `destroy_process_group` ends no thread while a mesh holds the group, as DTensor's caches
do. Busy cores make it likely, and so does a collective shortly before the end, as an optimizer's step has for amaxes.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

NAME = "pt_gloo_runloop"  #: what torch calls these threads
_MILLISECONDS, _AT_REST = 2000, 5  # the most that the end waits; how long all threads have to be at rest


def _states() -> list[str]:
    """A letter for each thread of gloo, as Linux has it: R while it runs or wants a core, S while it waits."""
    found = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended meanwhile
            continue
        found += [rest.split()[0]] if name == NAME else []
    return found


@atexit.register
def let_go() -> None:
    """Gives the GIL to gloo's threads until all of them are idle."""
    if not (states := _states()):
        return
    at_rest = 0
    for _ in range(_MILLISECONDS):
        time.sleep(0.001)  # a waiting thread takes the GIL
        states = _states()
        at_rest = at_rest + 1 if set(states) <= {"S"} else 0
        if at_rest == _AT_REST:
            return
