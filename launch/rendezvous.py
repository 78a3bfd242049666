"""Serves the TCP store of an elastic torchrun job from outside the job, so that any node may leave.

    python -m launch.rendezvous [PORT]

Run it on a machine that stays up, such as a login node. On each node, start torchrun with --rdzv-endpoint
NAME:PORT of this machine, and with --rdzv-conf is_host=false.
"""

import argparse
import contextlib
import signal

from torch.distributed import TCPStore


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.rendezvous", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("port", nargs="?", type=int, default=29400, help="port to listen on (default: 29400)")
    port = parser.parse_args().port
    if not 0 <= port < 2**16:
        parser.error(f"port {port} is not in 0 to 65535")
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
        parser.exit(1, f"error: cannot open port {port} ({reason}). Choose another port.\n")
    print(f"rendezvous store is listening on port {store.port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    main()
