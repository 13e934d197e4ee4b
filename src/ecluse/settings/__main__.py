"""``python -m ecluse.settings``: print docs/configuration.md."""

import sys

from ecluse.settings import reference

sys.stdout.write(reference())
