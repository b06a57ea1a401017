"""Run the command line, which belongs to the study (`multirole_study`), or say how to install it."""

import sys
from importlib import import_module

from multirole.extras import needed_by


def main() -> int:
    """Run the study's command line; exit with advice if the study or a package that it requires is not installed."""
    try:
        with needed_by("The command `multirole`"):
            command_line = import_module("multirole_study.__main__")
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    code: int = command_line.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
