"""Ctrl-C while a script still imports what it needs, which takes half a second: it ends, without a traceback.

    import renaissance.cli.quiet_start  # first of all imports

In a script whose main function is run by ``run_command``. Until then the signal does what it does to any other program;
from then on it is a KeyboardInterrupt, so that daemons are stopped and checkpoints named.
"""

from renaissance.cli.interrupts import end_quietly

end_quietly()
