"""`python -m megatron_dynatrain.run SCRIPT ARGS...`: run a stock pretraining script with the plugin installed."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_dynatrain.errors import DynaTrainError

USAGE = "usage: python -m megatron_dynatrain.run SCRIPT [Megatron's flags] --dynamic-parallelism ..."


def main(argv: list[str] | None = None) -> int:
    """Run the script as `__main__` with its own arguments.

    Returns the exit code: 0 done, 1 refused or failed, 2 wrong usage. Runs on every rank; the launcher (torchrun) sets
    rank and world size as for any script.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or not Path(arguments[0]).is_file():
        print(USAGE, file=sys.stderr)
        if arguments:
            print(f"no such script: {arguments[0]}", file=sys.stderr)
        return 2
    install()
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except DynaTrainError as error:
        # The same text on every rank: whoever reads one log knows.
        rank = os.environ.get("RANK", "0")
        print(f"[dynatrain] rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        from megatron_dynatrain.training.writers import close_writer

        close_writer()  # torch writes what is left within two minutes, or never where the process ends before
    return 0


def install() -> None:
    """Make Megatron run where there is no GPU, mend its checkpoints, and install the plugin into its training."""
    from megatron_dynatrain.patches import checkpoint, cpu

    cpu.install()
    checkpoint.install()
    from megatron_dynatrain.training.install import install as install_plugin

    install_plugin()


if __name__ == "__main__":
    sys.exit(main())
