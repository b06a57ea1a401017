"""Old package, see `moved`."""

from multirole.moved import import_moved

import_moved(__name__)
