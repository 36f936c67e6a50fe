"""``python -m dataserver``: the same as the ``dataserver`` command."""

import sys

from dataserver.cli import main

if __name__ == "__main__":
    sys.exit(main())
