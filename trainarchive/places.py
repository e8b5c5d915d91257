"""Where the files that come with trainarchive are: hooks and configuration, in a wheel or in a checkout."""

from pathlib import Path

from trainarchive.errors import NotFoundError

_PACKAGE = Path(__file__).parent


def shipped(name: str) -> Path:
    """Return the path of ``slurm/...`` or ``config/...``; raise NotFoundError where the installation is broken."""
    for root in (_PACKAGE / "shipped", _PACKAGE.parent):
        path = root / name
        if path.exists():
            return path
    raise NotFoundError("this file should have come with trainarchive", where=name, hint="install trainarchive again")
