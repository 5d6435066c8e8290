"""A server's worker in a process of its own: python worker_process.py SOCKET. It answers one call per line of JSON.

With the word `dies` it kills itself when the first chunk of a push has arrived.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from multiprocessing.connection import Client


def main() -> None:
    import torch

    from lockstep.weights.wire.network import Receiver

    receiver, found = Receiver(), dict[str, list[float]]()
    with Client(sys.argv[1], "AF_UNIX") as calls:
        while True:
            try:
                info = json.loads(calls.recv_bytes())
            except EOFError:
                return
            try:
                with closing(receiver.receive(info, info["chunks"])) as coming:
                    for arrived in coming:
                        if "dies" in sys.argv:
                            os.kill(os.getpid(), signal.SIGKILL)
                        found |= {name: torch.as_tensor(tensor).tolist() for name, tensor in arrived}
                answer = {"found": found}
            except RuntimeError as error:
                answer = {"error": str(error)}
            calls.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
