# SPDX-License-Identifier: Apache-2.0
"""Two results of ``evidence.py --parts tests``, of an earlier and a later commit, as one.

    python tests/gpu/merge_tests.py OLDER NEWER OUT

A test keeps its latest outcome; every row names its commit, and the earlier provenance stands inside the later one.
"""

import json
import sys
from pathlib import Path


def merged(older, newer):
    """The content of both files as one, in the order of the older."""
    rows = {}
    for found in (older, newer):
        commit = found["provenance"]["commit"]
        for row in found["rows"]:
            rows[row["test"]] = row | {"commit": row.get("commit", commit)}
    states = older["provenance"].get("states", {}) | newer["provenance"].get("states", {})
    provenance = newer["provenance"] | {"states": states, "older": older["provenance"]}
    return {"provenance": provenance, "rows": list(rows.values())}


if __name__ == "__main__":
    older, newer, out = map(Path, sys.argv[1:4])
    out.write_text(json.dumps(merged(*(json.loads(path.read_text()) for path in (older, newer))), indent=1) + "\n")
