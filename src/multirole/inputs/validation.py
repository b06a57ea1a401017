"""Old module, see `multirole.moved`. Its functions are in `adapters`, `problems` and `reward_functions`."""

from multirole.inputs.adapters import *
from multirole.inputs.problems import *
from multirole.inputs.reward_functions import *
