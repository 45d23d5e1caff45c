# SPDX-License-Identifier: Apache-2.0
"""Everything that is to be shown on a GPU, in one command: kernel benchmarks, sanitizer, tests, soak; JSON files in one folder.

    python tests/gpu/evidence.py --out evidence --parallel 6 [--parts kernels,tests] [--target T --draft D] [--again]

Each piece of work is a child process with a time limit of its own. What is timed runs alone and first; the rest runs several at a
time, the most telling first. A piece that is done is not done again (``--again`` does), and files grow as pieces end, so the run
may be stopped (``--time-limit``) and continued, at the same commit: what was found at another is forgotten, and code that is not
committed counts as another each time. A piece whose tests were all skipped is not done, and no failure either. Parts: kernels ->
kernels.json, sweep -> block_attention_sweep.json, soak -> soak.json, sanitizer -> sanitizer.json, tests -> gpu_tests.json;
``state.json`` knows what is done, and ``log.txt`` has the last lines of what failed. Exits 1 where anything did, or did not run.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
HERE, BENCHMARKS = ROOT / "tests" / "gpu", ROOT / "kernels" / "benchmarks"
PARTS = ("kernels", "sweep", "soak", "sanitizer", "tests")
TIMED = ("kernels", "sweep")
TOOLS = ("memcheck", "racecheck", "initcheck")
PYTEST = [
    "-m",
    "pytest",
    "-c",
    os.devnull,
    "--rootdir",
    str(ROOT),
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-p",
    "outcomes",
    "--tb=short",
    "--show-capture=no",  # compilers log thousands of lines, and only the last of a log are kept: a failure's traceback
]
GROUPS = {  # a process each, by value; what its tests need is in their docstrings
    "speculator": ["tests/gpu/test_speculator_gpu.py"],
    "acceptance": ["tests/gpu/test_acceptance_gpu.py"],
    "planner, grammars, adapters, adaptive": ["tests/gpu/test_runner_modes_gpu.py", "-k", "planned or adapters or adaptive"],
    "backends": ["tests/gpu/test_draft_backends_gpu.py", "-k", "auto"],
    "aux, full decode only": ["tests/gpu/test_aux_buffer_gpu.py", "-k", "FULL_DECODE_ONLY"],
    "small head": ["tests/gpu/test_small_head_gpu.py"],
    "FlashInfer kernels": ["tests/gpu/test_flashinfer_gpu.py"],
    "kernels": ["tests/kernels"],
    "aux, full and piecewise": ["tests/gpu/test_aux_buffer_gpu.py", "-k", "FULL_AND_PIECEWISE"],
    "fp8 caches": ["tests/gpu/test_draft_backends_gpu.py", "-k", "fp8"],
    "probabilistic, sleep": ["tests/gpu/test_runner_modes_gpu.py", "-k", "probabilistic or sleep"],
}
LEAST = 15  # seconds below which nothing is started
LIMITS = {"kernels": 200, "sweep": 120, "sanitizer": 240, "tests": 420, "soak": 560}
_ERRORS = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)")
_LAUNCHES = re.compile(r"(\d+) launches of \d+ kernels")
_KERNELS = re.compile(r"^kernels: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One child process."""

    part: str
    name: str
    command: list[str]

    @property
    def key(self):
        return f"{self.part}: {self.name}"


class Evidence:
    """Runs jobs and keeps their results, as rows {part, job, state, seconds, ..}, in ``state.json`` and in the parts' files."""

    def __init__(self, out, options):
        from vllm_dflash.bench.record import provenance

        self.out, self.options, self.lock = out, options, threading.Lock()
        self.deadline = time.monotonic() + options.time_limit
        self.compiling, self.compiled = threading.Lock(), False
        out.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "tests/gpu/evidence.py", "--parts", options.parts, "--parallel", str(options.parallel)])
        self.origin = provenance(command=command)
        state = out / "state.json"
        found = json.loads(state.read_text()) if state.exists() else {}
        commit = self.origin["commit"]
        known = commit != "unknown" and not commit.endswith("-dirty")
        self.rows = {key: row for key, row in found.items() if known and row.get("commit") == commit}

    def is_done(self, job):
        return not self.options.again and self.rows.get(job.key, {}).get("state") == "done"

    def run(self, job):
        if self.is_done(job):
            return
        if job.part == "sanitizer":
            self.compile_once()
        begin = time.monotonic()
        limit = min(LIMITS[job.part], self.deadline - begin)
        if limit < LEAST:
            return
        say(f"start       {job.key}")
        with tempfile.TemporaryDirectory() as folder:
            outcomes, log = Path(folder, "outcomes"), Path(folder, "log")
            code = self.call(job, outcomes, log, limit)
            text = log.read_text(encoding="utf-8", errors="replace")
            tests = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
        state = "done" if code == 0 else "out of time" if code is None else "failed"
        if state == "done" and tests and all(test["outcome"] == "skipped" for test in tests):
            state = "skipped"
        row = {"part": job.part, "job": job.name, "state": state, "seconds": round(time.monotonic() - begin, 1), "tests": tests}
        row |= {"commit": self.origin["commit"], **(sanitizer_figures(text) if job.part == "sanitizer" else {})}
        if state == "done" and row.get("errors", 0) != 0:  # None: the tool did not run
            row["state"] = state = "failed"
        say(f"{state:11} {job.key}, {row['seconds']:.0f} s")
        self.keep(job, row, text)

    def compile_once(self):
        """Fill Triton's cache: under the sanitizer, compiling takes minutes."""
        with self.compiling:
            if not self.compiled:
                limit = max(1.0, min(LIMITS["sanitizer"], self.deadline - time.monotonic()))
                command = ["timeout", f"{limit:.0f}", sys.executable, str(BENCHMARKS / "sanitize.py")]
                subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
                self.compiled = True

    def call(self, job, outcomes, log, limit):
        """Exit code, or None where the limit ended it."""
        paths = [str(HERE), str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": "2"} | dict(os.environ)  # several at a time share the cores
        environment |= {"DFLASH_OUTCOMES": str(outcomes), "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        for variable, folder in (("DFLASH_TARGET", self.options.target), ("DFLASH_DRAFT", self.options.draft)):
            environment |= {variable: str(folder)} if folder else {}
        with log.open("w") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            try:
                child = subprocess.Popen(job.command, cwd=ROOT, env=environment, **streams, start_new_session=True)
            except OSError as error:
                file.write(f"{job.command[0]}: {error.strerror}\n")
                return 127
            try:
                return child.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)  # its own session: engines of it go too
                child.wait()
                return None

    def keep(self, job, row, text):
        from vllm_dflash.bench.record import save

        with self.lock:
            self.rows[job.key] = row
            (self.out / "state.json").write_text(json.dumps(self.rows, indent=1) + "\n")
            if row["state"] not in ("done", "skipped"):
                with (self.out / "log.txt").open("a", encoding="utf-8") as file:
                    file.write(f"==== {job.key}: {row['state']}\n{without_paths(text[-6000:])}\n")
            every = list(self.rows.values())
            groups = [found for found in every if found["part"] == "tests"]
            tests = [
                {"group": found["job"], **test, "reason": without_paths(test.get("reason", ""))}
                for found in groups
                for test in found["tests"]
            ]
            if tests:
                states = {"states": {found["job"]: found["state"] for found in groups}}
                save(self.out / "gpu_tests.json", tests, self.origin | states)
            keys = ("state", "seconds", "errors", "launches", "kernels")
            tools = [found for found in every if found["part"] == "sanitizer"]
            runs = [{"tool": found["job"], **{key: found[key] for key in keys if key in found}} for found in tools]
            if runs:
                more = {"script": "kernels/benchmarks/sanitize.py", "compute_sanitizer": tool_version()}
                save(self.out / "sanitizer.json", runs, self.origin | more)


def without_paths(text):
    """Where files lay on the machine that ran says nothing to a reader."""
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+(?=[\w.@+-]+)", "", text.replace(str(ROOT) + os.sep, ""))


def sanitizer_figures(text):
    """Errors (or hazards), launches and kernels that the output tells."""
    errors, launches, kernels = _ERRORS.findall(text), _LAUNCHES.search(text), _KERNELS.search(text)
    found = {"errors": sum(int(a or b) for a, b in errors) if errors else None}
    if launches and kernels:
        found |= {"launches": int(launches[1]), "kernels": kernels[1].split(", ")}
    return found


def tool_version():
    try:
        said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return "compute-sanitizer is not installed"
    return (said.strip().splitlines() or ["?"])[-1]


def jobs_of(part, options):
    python, out = sys.executable, options.out
    if part == "kernels":
        extra = ["--thorough"] if options.thorough else []
        return [Job(part, "benchmarks", [python, str(BENCHMARKS / "run_all.py"), str(out / "kernels.json"), *extra])]
    if part == "sweep":
        script = BENCHMARKS / "sweep_block_attention.py"
        return [Job(part, "block attention", [python, str(script), "--json", str(out / "block_attention_sweep.json")])]
    if part == "sanitizer":
        script = str(BENCHMARKS / "sanitize.py")
        return [Job(part, tool, ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", python, script]) for tool in TOOLS]
    if part == "tests":
        return [Job(part, name, [python, *PYTEST, *arguments]) for name, arguments in GROUPS.items()]
    # Less than what is left for all, by the start of an engine among others: so it ends by itself, and judges what it has.
    limit = max(60.0, min(420.0, options.time_limit - 170.0))
    models = ["--target", str(options.target), "--draft", str(options.draft)] if options.target else []
    return [
        Job(
            part,
            "demo pair",
            [python, str(HERE / "soak_demo_pair.py"), "--out", str(out / "soak.json"), "--time-limit", str(limit), *models],
        )
    ]


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def table(rows):
    """A line per piece, and the tests that did not pass."""
    for row in rows:
        tests = row["tests"]
        passed = sum(test["outcome"] == "passed" for test in tests)
        facts = f"{passed} of {len(tests)} tests passed" if tests else ""
        if "errors" in row:
            facts = f"{row['errors']} errors, {row.get('launches', 0)} launches of {len(row.get('kernels', []))} kernels"
        say(f"{row['state']:12} {row['seconds']:6.0f} s  {row['part']:10} {row['job']:40} {facts}")
        for test in tests:
            if test["outcome"] == "failed":
                say(f"             failed: {test['test']}: {without_paths(test.get('reason', ''))[:160]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", default="", help="pieces whose name contains one of these, separated by commas")
    parser.add_argument("--parallel", type=int, default=4, help="untimed pieces at a time; each may hold an engine (6 GiB)")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all; what has not ended then is ended")
    parser.add_argument("--target", type=Path, help="folders of the demo pair where it is not prepared on this machine")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--thorough", action="store_true", help="every size of the kernel benchmarks")
    parser.add_argument("--again", action="store_true", help="also what is done")
    options = parser.parse_args()
    options.out = options.out.resolve()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: found {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    evidence = Evidence(options.out, options)
    wanted = options.only.split(",")
    jobs = [job for part in PARTS if part in parts for job in jobs_of(part, options) if any(name in job.name for name in wanted)]
    for job in jobs:
        if job.part in TIMED:
            evidence.run(job)
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(evidence.run, [job for job in jobs if job.part not in TIMED]))
    missing = {"state": "not run", "seconds": 0.0, "tests": []}
    rows = [evidence.rows.get(job.key, missing | {"part": job.part, "job": job.name}) for job in jobs]
    table(rows)
    return 1 if any(row["state"] not in ("done", "skipped") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
