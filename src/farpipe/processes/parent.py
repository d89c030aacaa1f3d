"""Watch of a rank under torchrun: it does not outlive torchrun's agent, nor the agent its ranks for long.

An agent that is killed leaves its ranks running. An agent that has lost the agent of another site can wait in a system
call of torch's store, in which it notices no signal, for minutes.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

IDLE_LIMIT_S: Final = 90.0
"""An agent without a rank for so long is ended: longer than the ranks wait for each other when they start again."""
_AGENT_WATCH: Final = Path(__file__).with_name("agent_watch.py")
_PR_SET_PDEATHSIG: Final = 1
"""See prctl(2)."""


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent`, which has started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_agent(environment: Mapping[str, str] = os.environ, idle_limit_s: float = IDLE_LIMIT_S) -> None:
    """Under torchrun: have this process killed when the agent ends, and the agent ended when it idles for too long.

    In the main thread, at the start. Elsewhere it does nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    agent = os.getppid()
    die_with_parent(agent)
    if environment.get("LOCAL_RANK", "0") == "0":
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(_AGENT_WATCH), str(agent), str(idle_limit_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
