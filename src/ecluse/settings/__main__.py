import sys

from ecluse.settings import reference

sys.stdout.write(reference())
