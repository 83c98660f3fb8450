"""Random states, taken and put back by several threads at once."""

from __future__ import annotations

import subprocess
import sys

from farandole.layout.recording.state.random_states import RandomStates, set_seed

# Each object that is made collects garbage, whose finalizers hand over to another thread. Without
# turns this stands still within a fraction of a second, with nobody who could end it from inside.
THREADS = """
import gc, sys, threading, time, weakref
from farandole.layout.recording.state.random_states import RandomStates, set_seed

gc.set_threshold(3)
sys.setswitchinterval(1e-6)

class Node: pass

def work(number):
    for _ in range(150):
        one, other = Node(), Node()
        one.other, other.one = other, one
        weakref.finalize(one, time.sleep, 0)
        states = RandomStates()
        set_seed(number)
        states.put_back()

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ended")
"""


def test_threads_take_turns() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=400
    )
    assert done.stdout == "ended\n", done.stderr


def test_a_state_is_put_back() -> None:
    before = RandomStates()
    set_seed(3)
    assert RandomStates() != before
    before.put_back()
    assert RandomStates() == before
