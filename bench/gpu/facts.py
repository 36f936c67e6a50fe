"""What the GPU machine is, as one JSON line; and cuDNN's description of the device, for planning without it."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

from renaissance.backend.cuda.device import open_device


def main() -> None:
    from cupy.cuda import runtime

    with open_device(0) as device:
        facts = {
            "python": platform.python_version(),
            "driver": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(),
            "cores": len(os.sched_getaffinity(0)),
            **device.facts(),
        }
    print(json.dumps(facts))
    if len(sys.argv) > 1:
        import cudnn

        Path(sys.argv[1]).write_text(cudnn.create_device_properties(0).serialize())


if __name__ == "__main__":
    main()
