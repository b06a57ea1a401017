"""Code for programs that tests start: it runs a command line of `multirole` in the program's own process."""

RUN_COMMAND = """
import contextlib, io, json, os, sys

def run_command(main, line):
    sys.argv, printed = ["multirole", *line.split()], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main()
        except SystemExit as error:
            code = error.code
    return code, printed.getvalue()
"""
"""Defines `run_command(main, line)`, which returns the exit code and what was printed."""
