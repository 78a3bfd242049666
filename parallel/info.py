"""What this machine and its torch offer a run, and whether the ranks of a launch reach each other.

    python -m parallel.info
    torchrun --nproc-per-node N -m parallel.info [--quick] [--timeout SECONDS]

For the minutes before a long run, and for the report of a failed one. Rank 0 describes its own process; then,
where there are several, connectivity.py shows every rank and measures what they exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import socket
import sys
from pathlib import Path

from parallel import log
from parallel.connectivity import ConnectivityCheck, aligned
from parallel.errors import local_errors
from parallel.process_group import (
    choose_backend,
    choose_device,
    has_backend,
    is_main,
    num_cores,
    omp_threads_of_the_user,
    set_cpu_threads,
    world_size,
)

_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_VARIABLES = (  # by their beginnings
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_"),
    *("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DIST", "TORCH_FR_", "TORCH_DISABLE_SHARE_RDZV"),
    *("NCCL_", "GLOO_", "UCC_", "UCX_", "FI_", "OMPI_COMM_WORLD_", "PMI_", "OMP_", "KMP_", "MKL_NUM_THREADS"),
    *("CUDA_VISIBLE", "CUDA_DEVICE", "CUDA_LAUNCH", "HIP_VISIBLE", "ROCR_VISIBLE", "PYTORCH_"),
)


def main() -> None:
    options = _read_command_line()
    if is_main():
        log.info(aligned(describe_process()))
        variables = [pair for pair in sorted(os.environ.items()) if pair[0].startswith(_VARIABLES)]
        log.info(
            f"\n{aligned(variables)}" if variables else "\nno variables of processes and networks are set"
        )
    if world_size() > 1:
        ConnectivityCheck(options).run()
        return
    with local_errors():
        device = choose_device(options.device)
        backend = choose_backend(options.backend, device)
    log.info(f"\none process on {device}; several would talk over {backend}")


def _read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parallel.info", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--backend", default="auto", choices=["auto", "nccl", "gloo", "mpi"])
    parser.add_argument("--timeout", default=30.0, type=float, metavar="SECONDS", help="of each stage (30)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller messages")
    with contextlib.ExitStack() as stack:
        if not is_main():  # all ranks read the same line: help and mistakes are told once
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        options = parser.parse_args()
        if options.timeout <= 0:
            parser.error(f"--timeout {options.timeout:g} is not above 0")
    return options


def describe_process() -> list[tuple[str, str]]:
    """Names and values: software, machine and devices of this process."""
    import torch

    built_in = [name for name in _BACKENDS if has_backend(name)]
    lacking = [name for name in _BACKENDS if name not in built_in]
    git = torch.version.git_version or "unknown"
    lines = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", f"{torch.__version__} (git {git[:12]})"),
        ("built with", _describe_build()),
        ("backends", f"{', '.join(built_in) or 'none'}; not in this torch: {', '.join(lacking) or 'none'}"),
        ("host", f"{socket.gethostname()} ({platform.platform()})"),
        ("cores", f"{num_cores()} for this process, {os.cpu_count()} in the machine"),
        ("threads", _describe_threads()),
        ("memory", _describe_memory()),
        ("cpu", _describe_cpu()),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = _gibibytes(device.total_memory)
        lines.append((f"cuda:{index}", f"{device.name}, {memory}, {_describe_bf16(index)}"))
    if torch.backends.mps.is_available():
        lines.append(("mps", f"{_gibibytes(torch.mps.recommended_max_memory())} at most"))
    return lines


def _describe_build() -> str:
    import torch

    version = torch.version
    parts = [f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "no CUDA"]
    if torch.backends.cudnn.version():
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    if has_backend("nccl"):
        parts.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(parts)


def _describe_threads() -> str:
    chosen = omp_threads_of_the_user()
    reason = "OMP_NUM_THREADS" if chosen else "cores over the processes of this node"
    return f"{set_cpu_threads('auto')} for torch ({reason})"


def _describe_memory() -> str:
    text = _gibibytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (value := limit.read_text().strip()).isdigit():
        text += f", limited to {_gibibytes(int(value))}"
    return text


def _describe_cpu() -> str:
    import torch

    features = [name for name, value in torch.cpu.get_capabilities().items() if value and "bf16" in name]
    bf16 = f"bf16 by {', '.join(features)}" if features else "bf16 emulated, slow"
    return f"{torch.backends.cpu.get_cpu_capability()}, {bf16}"


def _describe_bf16(cuda_index: int) -> str:
    import torch

    with torch.cuda.device(cuda_index):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"


def _gibibytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
