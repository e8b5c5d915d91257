"""The story, told step by step while it happens."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainarchive import manifest
from trainarchive.demo.node import Node, PretendJob, Rank, await_process, wait_for
from trainarchive.demo.truth import Verdict, compare, digest_of, told
from trainarchive.errors import TrainarchiveError
from trainarchive.run import RunKey
from trainarchive.settings import Settings
from trainarchive.store import open_store

GOOD, BAD = 101, 102
RANKS_S = 60.0
ARCHIVE_S = 90.0
READY_S = 30.0


class Story:
    """``tell`` runs it all below ``home``, which must be new."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._home = settings.home
        self._say = say
        self._truth = self._home / "truth"
        self._nodes = [Node(name, self._home / "nodes" / name, self._home) for name in ("n1", "n2")]
        self._worker: subprocess.Popen[bytes] | None = None

    def tell(self) -> Verdict:
        """Run the story; return what came of it."""
        try:
            self._start()
            for job_id, run in ((GOOD, self._good_job), (BAD, self._bad_job)):
                (self._truth / str(job_id)).mkdir(parents=True)
                run(self._job(job_id))
            for job_id in (GOOD, BAD):
                self._await_manifest(job_id)
            self._stop_collectors()
            gone = sum(node.wipe() for node in self._nodes)
            self._say(f"both nodes are wiped: {gone} files are gone, nothing is left below {self._home / 'nodes'}")
            return self._fetch_and_compare()
        finally:
            self._stop_collectors()
            self._stop_worker()

    # -- the parts -------------------------------------------------------------------------

    def _start(self) -> None:
        environment = os.environ | {"TRAINARCHIVE_HOME": os.fspath(self._home)}
        with (self._home / "worker.log").open("ab") as log:
            command = [sys.executable, "-m", "trainarchive", "worker"]
            self._worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        for node in self._nodes:
            node.start_collector()
        worker_log = self._home / "worker.log"
        await_process(self._worker, worker_log, lambda: b"ready" in worker_log.read_bytes(), READY_S)
        for node in self._nodes:
            node.await_collector(READY_S)
        self._say("started: a worker with its embedded Redis, and a collector on each of the pretend nodes n1 and n2")

    def _stop_collectors(self) -> None:
        for node in self._nodes:
            node.stop_collector()

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            try:
                self._worker.wait(READY_S)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()
            self._worker = None

    def _job(self, job_id: int) -> PretendJob:
        return PretendJob(job_id, "n[1-2]", 2, os.fspath(self._nodes[0].scratch))

    def _path_of_truth(self, job: PretendJob, node: Node, name: str) -> Path:
        return self._truth / str(job.job_id) / f"{node.name}.{name}"

    # -- the jobs --------------------------------------------------------------------------

    def _good_job(self, job: PretendJob) -> None:
        n1, n2 = self._nodes
        for node in self._nodes:
            node.prolog(job)
        self._say(
            f"job {job.job_id}: prologs ran on n1 and n2; six ranks start: a file each, progress bars, "
            "a torchrun directory, one file for ranks 3 and 4 together, files deleted after their last byte"
        )
        shared = n2.scratch / "all-ranks.out"
        ranks = [
            self._start_rank(n1, job, Rank(0, 0, "plain", "logs/rank 0.out")),
            self._start_rank(n1, job, Rank(1, 1, "bars", "logs/rank1.out")),
            self._start_rank(n1, job, Rank(2, 2, "burst", "torchrun/none_d3m0d3m0/attempt_0/2/stdout.log")),
            self._start_rank(n2, job, Rank(3, 0, "shared", shared.name)),
            self._start_rank(n2, job, Rank(4, 1, "shared", shared.name)),
            self._start_rank(n2, job, Rank(5, 2, "bars", "logs/rank5.out")),
        ]
        statuses = wait_for(ranks, RANKS_S)
        # Two ranks share this file: its digest is the launcher's to know.
        line = digest_of(shared)
        self._path_of_truth(job, n2, "shared").write_text(
            f'{{"path": "{line.path}", "size": {line.size}, "sha256": "{line.sha256}"}}\n'
        )
        for node in self._nodes:
            node.epilog(job, "0:0")
        self._say(f"job {job.job_id}: all ranks ended with {statuses}; epilogs ran")

    def _bad_job(self, job: PretendJob) -> None:
        n1, n2 = self._nodes
        for node in self._nodes:
            node.prolog(job)
        self._say(f"job {job.job_id}: prologs ran; rank 1, on n2, is going to fail")
        ranks = [
            self._start_rank(n1, job, Rank(0, 0, "plain", f"logs/{job.job_id}.rank0.out")),
            self._start_rank(n2, job, Rank(1, 0, "fail", f"logs/{job.job_id}.rank1.out")),
        ]
        statuses = wait_for(ranks, RANKS_S)
        for node in self._nodes:
            node.epilog(job, "1:0")
        self._say(f"job {job.job_id}: ranks ended with {statuses}; epilogs ran with exit code 1:0")

    def _start_rank(self, node: Node, job: PretendJob, rank: Rank) -> subprocess.Popen[bytes]:
        return node.start_rank(job, rank, self._path_of_truth(job, node, f"rank{rank.number}"))

    # -- the end ---------------------------------------------------------------------------

    def _await_manifest(self, job_id: int) -> None:
        store = open_store(self._settings)
        run = RunKey("demo", job_id)
        deadline = time.monotonic() + ARCHIVE_S
        while time.monotonic() < deadline:
            newest = manifest.newest(store, run)
            if newest is not None and newest.complete:
                size = sum(part.size for part in newest.parts)
                text = sum(generation.size for entry in newest.sources for generation in entry.generations)
                self._say(
                    f"job {job_id} is archived as {newest.state}: {len(newest.sources)} files, "
                    f"{text:,} bytes, {size:,} in the store"
                )
                return
            time.sleep(0.2)
        raise TrainarchiveError(
            f"job {job_id} was not archived within {ARCHIVE_S:.0f} s",
            where=os.fspath(self._home),
            hint="see worker.log there",
        )

    def _fetch_and_compare(self) -> Verdict:
        verdicts = []
        for job_id in (GOOD, BAD):
            out = self._home / "fetched" / str(job_id)
            self._command("fetch", str(job_id), "-o", os.fspath(out))
            verdicts.append(compare(told(self._truth / str(job_id)), out))
        self._command("show", str(BAD))
        self._last_words()
        return Verdict(
            sum(one.files for one in verdicts),
            sum(one.bytes for one in verdicts),
            tuple(problem for one in verdicts for problem in one.problems),
        )

    def _last_words(self) -> None:
        """Show what the failed rank said last: from the archive, for its node is gone."""
        (path,) = (self._home / "fetched" / str(BAD)).glob("n2/**/*rank1.out")
        self._say(f"the last lines of job {BAD}'s rank 1, which ran on the wiped node n2:")
        for line in path.read_text().splitlines()[-4:]:
            self._say(f"    {line}")

    def _command(self, *words: str) -> None:
        self._say(f"$ trainarchive {' '.join(words)}")
        command = [sys.executable, "-m", "trainarchive", "--home", os.fspath(self._home), *words]
        done = subprocess.run(command, check=False, timeout=RANKS_S)
        if done.returncode != 0:
            raise TrainarchiveError(f"ended with status {done.returncode}", where=f"trainarchive {' '.join(words)}")
