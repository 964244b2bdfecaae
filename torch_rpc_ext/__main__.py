"""``python -m torch_rpc_ext COMMAND``, and the console script ``torch-rpc-ext COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import sys

from torch_rpc_ext._base.version import __version__
from torch_rpc_ext.cli import common

_EXAMPLES = """examples:
  python -m torch_rpc_ext info
      what is installed, which transports work here and why, and a self-test
  python -m torch_rpc_ext run train.py --epochs 3
      run a program that uses torch.distributed.rpc on UCX, without changing it
  python -m torch_rpc_ext run --nproc-per-node 4 train.py
      the same, four processes, with torchrun's options
  python -m torch_rpc_ext build
      after an update of torch: compile the extension module for it, now and not at the first use
  python -m torch_rpc_ext top --init-method tcp://host0:29500
      watch a running group
  python -m torch_rpc_ext ping worker1 --init-method tcp://host0:29500
      latency, bandwidth and path to a worker
  python -m torch_rpc_ext trace --seconds 5 --out trace.json --init-method tcp://host0:29500
      record what all workers do, as a trace for Perfetto
"""
_COMMANDS = ("info", "run", "build", "top", "ping", "trace")
# Commands that join a running group as a guest.
_GUESTS = ("top", "ping", "trace")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after the program's name; None for those in sys.argv.

    Returns:
        The exit status.
    """
    program = common.program()
    parser = argparse.ArgumentParser(
        prog=program,
        description="torch.distributed.rpc over UCX.",
        epilog=_EXAMPLES.replace("python -m torch_rpc_ext", program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch-rpc-ext {__version__}")
    parser.add_argument("command", choices=_COMMANDS, help="what to do; each has a --help")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return common.MISTAKE
    given = parser.parse_args(arguments)
    command = importlib.import_module(f"torch_rpc_ext.cli.{given.command}")
    if given.command not in _GUESTS:
        return int(command.main(given.arguments))
    return _look_at_a_group(command, given)


def _look_at_a_group(command: object, given: argparse.Namespace) -> int:
    """Run a command; an error that the user can mend is printed as a sentence, not a traceback."""
    from torch_rpc_ext._calls import failures

    main_of_command = vars(command)["main"]
    try:
        return int(main_of_command(given.arguments))
    except KeyboardInterrupt:
        return 130
    except common.CannotJoinError as problem:
        status = common.NO_GROUP
        text = str(problem)
    except (ValueError, OSError) as problem:
        status = common.MISTAKE
        text = failures.brief(problem)
    except ImportError as problem:
        status = common.MISTAKE
        extra = {"rich": "cli", "matplotlib": "profiler"}.get(problem.name or "")
        text = failures.brief(problem)  # a worker may lack a module too
        if extra:
            text = f"{problem.name} is missing: pip install 'torch-rpc-ext[{extra}]'"
    except RuntimeError as problem:
        # An error of the group: a worker that is being profiled already, versions that differ.
        status = common.UNWELL
        text = failures.brief(problem)
    print(f"{given.command}: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
