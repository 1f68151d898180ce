"""`python -m mpx report`: which operations of a function run in which precision."""

import argparse

from mpx.inspect._call_command import add_call, load_call, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_call(parser)
    parser.add_argument("--target", help="compile for this GPU: h200, or here")
    parser.add_argument("--devices", type=int, default=1, help="how many of these")
    parser.add_argument("--forward", action="store_true", help="leave the gradient out")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit status."""
    from mpx.inspect._report import report

    func, arguments = load_call(args.call)
    backward = False if args.forward else None
    options = {"target": args.target, "devices": args.devices, "backward": backward}
    show(report(func, *arguments, **options), as_json=args.json)
    return 0
