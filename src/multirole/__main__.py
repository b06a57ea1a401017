"""Run the command line of the study, `python -m multirole_study`, under the name that it had before 0.3."""

import runpy
import sys
from importlib.util import find_spec

if find_spec("multirole_study") is None:
    sys.exit(
        "The command line belongs to the package multirole_study, which is not installed. Install multirole from its repository."
    )
runpy.run_module("multirole_study", run_name="__main__", alter_sys=True)
