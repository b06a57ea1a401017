"""Old package, see `moved`."""

from multirole.old_names.moved import import_moved

import_moved(__name__)
