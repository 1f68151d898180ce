"""`python -m mpx memory`: the memory of a training step in each precision."""

import argparse

from mpx.inspect._call_command import add_call, load_call, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_call(parser)
    parser.add_argument("--target", help="the GPU: h200, or here")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the prediction; returns the exit status."""
    from mpx.inspect._memory import memory

    func, arguments = load_call(args.call)
    show(memory(func, *arguments, target=args.target), as_json=args.json)
    return 0
