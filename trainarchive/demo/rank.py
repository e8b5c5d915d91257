"""A pretend rank: writes like a training process does, and keeps the digests of what it wrote.

Run as ``python rank.py HABIT TRUTH``: only the standard library, as a user's script would be.
``TRUTH`` is a file outside the node's directories; it gets one line of JSON a written file:
``{"path": ..., "size": ..., "sha256": ...}``.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

STEPS = 60
PAUSE_S = 0.05


class Told:
    """A file whose digest is kept while it is written."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._sum = hashlib.sha256()
        self._size = 0

    def say(self, text: str | bytes) -> None:
        """Write at once, as an unbuffered logger does."""
        raw = text.encode() if isinstance(text, str) else text
        self._file.write(raw)
        self._file.flush()
        self._sum.update(raw)
        self._size += len(raw)

    def truth(self) -> str:
        """Return the line for ``TRUTH``."""
        return json.dumps({"path": os.fspath(self.path), "size": self._size, "sha256": self._sum.hexdigest()})


def stdout() -> Told:
    """Return this process's own stdout, a file that belongs to this rank alone."""
    return Told(Path("/proc/self/fd/1").readlink(), sys.stdout.buffer)


def open_told(path: Path) -> Told:
    """Open a file of the rank's own making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Told(path, path.open("wb"))


def train(out: Told, rank: str) -> None:
    """Plain lines, a loss a step."""
    for step in range(STEPS):
        out.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank={rank} step={step} loss={8.0 / (step + 1):.6f} lr=3.0e-4\n")
        time.sleep(PAUSE_S)


def burst(out: Told, rank: str) -> None:
    """Talk much: some megabytes every now and then, as debug output does."""
    line = f"rank={rank} grad_norm=0.731942 param=transformer.h.17.attn.c_proj.weight mean=-0.000193 std=0.019983\n"
    for part in range(STEPS // 3):
        out.say(f"dump {part}\n" + line * 8000)
        time.sleep(PAUSE_S)


def bars(out: Told, rank: str) -> None:
    """Progress bars: carriage returns, colours, no line end until the epoch is over."""
    for epoch in range(3):
        for step in range(STEPS // 3):
            out.say(f"\rEpoch {epoch}: \x1b[32m{step * 5:3d}%\x1b[0m |{'█' * step:<20}| rank {rank} {step / 7:.2f}it/s")
            time.sleep(PAUSE_S)
        out.say("\n")


def fleeting(directory: Path, rank: str) -> Told:
    """Write a file that is deleted right after its last byte."""
    out = open_told(directory / f"fleeting rank {rank} ünïcode.log")
    for step in range(20):
        out.say(f"soon gone, line {step}\n")
        time.sleep(PAUSE_S)
    out.say("the very last line before unlink\n")
    out.path.unlink()
    return out


def nccl(pattern: str) -> Told:
    """Write what NCCL would, where NCCL_DEBUG_FILE says."""
    name = pattern.replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
    out = open_told(Path(name))
    out.say(f"{os.uname().nodename}:{os.getpid()}:{os.getpid()} [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n")
    return out


def fail(out: Told, rank: str) -> None:
    """Die as a rank dies that has run out of GPU memory."""
    for step in range(STEPS // 2):
        out.say(f"rank={rank} step={step} loss={8.0 / (step + 1):.6f}\n")
        time.sleep(PAUSE_S)
    out.say(
        "Traceback (most recent call last):\n"
        '  File "train.py", line 212, in <module>\n'
        "    loss.backward()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. "
        "GPU 0 has a total capacity of 79.10 GiB of which 1.12 GiB is free.\n"
    )


def error_json(path: Path) -> Told:
    """Leave what torchrun's @record leaves."""
    out = open_told(path)
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
    out.say(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}))
    return out


def main() -> int:
    """Follow the habit that the command line names."""
    habit, truth = sys.argv[1], Path(sys.argv[2])
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "?"))
    own = Path(os.environ["TRAINARCHIVE_DIR"])
    written: list[Told] = []
    status = 0
    if habit == "shared":
        # Many ranks share this file, each with its prefix; whoever started them knows its digest.
        for step in range(STEPS):
            os.write(1, f"[rank{rank}]: step {step} loss {8.0 / (step + 1):.6f}\n".encode())
            time.sleep(PAUSE_S)
    else:
        out = stdout()
        written.append(out)
        written.append(nccl(os.environ["NCCL_DEBUG_FILE"]))
        if habit == "fail":
            fail(out, rank)
            written.append(error_json(Path(os.environ["TORCHELASTIC_ERROR_FILE"])))
            status = 1
        elif habit == "burst":
            burst(out, rank)
        elif habit == "bars":
            bars(out, rank)
            written.append(fleeting(own, rank))
        else:
            train(out, rank)
    truth.write_text("".join(one.truth() + "\n" for one in written))
    return status


if __name__ == "__main__":
    sys.exit(main())
