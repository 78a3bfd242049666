"""Holds the store where the machines of an elastic run meet, so that any of them may leave: the first too.

    python -m launch.rendezvous [PORT]

On a machine that stays, as a login node; torchrun has its name and port as --rdzv-endpoint, and --rdzv-conf
is_host=false.
"""

import argparse
import signal

from torch.distributed import TCPStore


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.rendezvous", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("port", nargs="?", type=int, default=29400, help="default: 29400")
    port = parser.parse_args().port
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        parser.exit(
            1, f"error: port {port} cannot be opened: choose another ({str(error).partition('. ')[0]})\n"
        )
    print(f"machines may meet at port {store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
