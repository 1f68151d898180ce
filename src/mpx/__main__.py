"""The command line: `python -m mpx doctor`, `report`, `memory`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": (
        "mpx.inspect._doctor",
        "what this machine or cluster offers, and which precision",
    ),
    "report": (
        "mpx.inspect._report",
        "which operation runs in which precision",
    ),
    "memory": (
        "mpx.inspect._memory",
        "the bytes of a model under each option",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m mpx", description="Mixed-precision training for JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        # The others are not imported: their options are not needed.
        if name in given[:1]:
            importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(given)
    return importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
