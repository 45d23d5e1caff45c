# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one engine on this machine: forked processes, each with an ``LLM`` of its own, joined by gloo.

``distributed_executor_backend="external_launcher"`` is what makes it cheap: a rank is a fork that has imported vLLM already.
"""

import faulthandler
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from pathlib import Path

LAUNCHED = {"distributed_executor_backend": "external_launcher"}


def run_ranks(count, work, seconds=240):
    """``[work(rank) for rank in range(count)]``, each in a fork of this process, which must hold no engine.

    It should have had one, though: what that imported is not imported again by every rank.

    A rank that waits for a collective that another one never joins is ended after ``seconds``.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()  # threads of a process group do not survive a fork
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(count):
            Path(meeting, f"rank{rank}").symlink_to(Path(meeting, "all"))
        started = [_start(rank, count, f"file://{meeting}/rank{rank}", work, 0.9 * seconds) for rank in range(count)]
        try:
            results = _receive([pipe for _, pipe in started], end)
        finally:
            for process, _ in started:
                process.join(2)
                process.kill()
                process.join()
    failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
    assert not failed, "\n".join(failed)
    return [result for result, _ in results]


def _receive(pipes, end):
    """(result, error) of every rank; when one fails, the others are not waited for: they wait for it themselves."""
    results = dict.fromkeys(pipes, (None, "still waiting"))
    waiting = list(pipes)
    while waiting and (ready := multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))):
        for pipe in ready:
            waiting.remove(pipe)
            try:
                results[pipe] = pipe.recv()
            except EOFError:
                results[pipe] = None, "ended without a result"
            if results[pipe][1]:
                end = min(end, time.monotonic() + 3)
    return [results[pipe] for pipe in pipes]


def _start(rank, count, meeting, work, patience):
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def run():
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ.update({name: str(value) for name, value in sizes.items()})
        # Unequal names of one file: vLLM's CPU build then takes gloo, not shared memory, whose waiting ranks spin.
        ExecutorWithExternalLauncher._distributed_args = lambda _: (meeting, rank, rank)
        faulthandler.dump_traceback_later(patience)  # where a rank waits
        try:
            theirs.send((work(rank), None))
        except Exception:  # noqa: BLE001  # the parent reports it
            theirs.send((None, traceback.format_exc()[-3000:]))
        os._exit(0)  # no clean-up of what belongs to the parent

    process = fork.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def stay_idle(llm, rounds):
    """A data-parallel rank without requests: dummy batches while another one serves ``rounds`` batches; returns how many."""
    steps = 0
    for _ in range(rounds):
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            steps += 1
    return steps
