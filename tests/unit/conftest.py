# SPDX-License-Identifier: Apache-2.0
"""Makes the shared data modules of this folder importable; pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
