"""One rank of three, of which the last is killed and the next one fails: ``leaving_rank.py FOLDER``.

Ranks 0 and 1 wait for each other meanwhile, not for rank 2. Then rank 0 waits for rank 1 in a group of these two.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import farpipe.torch  # noqa: F401


def error_of(call):
    """The error that `call` raises, with its type and the time that it took."""
    start_s = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start_s}
    return None


def main(folder):
    dist.init_process_group("farpipe")
    me = dist.get_rank()
    pair = dist.new_group([0, 1], backend="farpipe")
    posted = dist.irecv(torch.zeros(1), 1 - me) if me < 2 else None
    dist.barrier()
    if me == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [error_of(lambda: dist.all_reduce(torch.zeros(1)) if me else dist.recv(torch.zeros(1), 1, tag=9))]
    found += [
        error_of(posted.wait),
        error_of(lambda: dist.barrier()),
        error_of(lambda: dist.send(torch.zeros(1), 1 - me)),
    ]
    if me == 0:
        found.append(error_of(lambda: dist.recv(torch.zeros(1), 1, group=pair)))
    (folder / f"errors-{me}.json").write_text(json.dumps(found))
    if me == 1:
        raise ValueError("the disk is full")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
