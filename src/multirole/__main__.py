"""Run the command line, which belongs to the study (`multirole_study`), or say how to install it."""

import sys
from importlib import import_module


def main() -> int:
    """Run the study's command line; exit with advice if the study or a package that it requires is not installed."""
    try:
        command_line = import_module("multirole_study.__main__")
    except ModuleNotFoundError as error:
        sys.exit(
            f"The command `multirole` belongs to the study of the paper, which needs {error.name}, and that is not installed. "
            "Run `pip install '.[study]'` in a clone of the repository. The library alone has no commands."
        )
    code: int = command_line.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
