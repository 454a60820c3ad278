"""Install the release monitor in a Python process that a test starts: Python imports this file from PYTHONPATH."""

import os
import sys
from pathlib import Path

if "PBMVFL_TEST_VIOLATIONS" in os.environ:
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from support import release_monitor  # noqa: F401  (installs itself)

    sys.path.pop()
