# SPDX-License-Identifier: Apache-2.0
"""Makes this folder's data modules importable (pytest's importlib mode leaves sys.path alone), and settles how to search."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent))

# How long an example takes is the machine's affair: two suites share its cores in `make test`.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
