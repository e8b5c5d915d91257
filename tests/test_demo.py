"""The story as a whole, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_demo_ends_with_identical_bytes(tmp_path: Path) -> None:
    """Hooks, collectors, worker, archive, wiped nodes, fetch: and what is left can be asked by hand."""
    home = tmp_path / "demo"
    done = _run("demo", "--home", os.fspath(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("identical")
    assert "Traceback" not in done.stderr
    assert not (home / "nodes" / "n1").exists()
    listed = json.loads(_run("--home", os.fspath(home), "ls", "--json").stdout)
    assert {run["state"] for run in listed["runs"]} == {"COMPLETED", "FAILED"}


def test_the_demo_spares_what_it_did_not_make(tmp_path: Path) -> None:
    """A directory with other things in it is refused, and left as it is."""
    (tmp_path / "thesis.tex").write_text("years of work")
    done = _run("demo", "--home", os.fspath(tmp_path))
    assert done.returncode == 1
    assert "give another --home" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trainarchive", *words], capture_output=True, text=True, check=False)
