"""URLs in settings: which are known, and what is wrong with one. Never repeats it: it may hold a password."""

import os
from urllib.parse import unquote_to_bytes, urlsplit

SCHEMES = {
    "log": ("redis", "rediss", "unix"),
    "broker": ("redis", "rediss", "redis+socket", "sentinel"),
    "store": ("file", "memory"),
}
"""What the ``url`` of a section may begin with: what redis-py, kombu and ``trainarchive.store`` know."""

NOT_BUILT = {"store": "s3"}
"""Schemes that are reserved."""

_SOCKETS = ("unix", "redis+socket")


def problem(section: str, url: str) -> str:
    """Say what is wrong with the ``url`` of a section, as far as its text tells; empty: nothing."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES[section]:
        built = separator and scheme == NOT_BUILT.get(section)
        return f"{scheme}:// is not built yet" if built else "no URL of a kind that is known"
    if scheme == "sentinel":
        return ""  # several, with ; between them: kombu reads them
    try:
        parts = urlsplit(url)
        _ = parts.port
        if scheme == "file":
            directory(url)
    except ValueError as error:
        # What the library says of a port repeats it, and it may be the half of a password with a / or # in it.
        return str(error) if isinstance(error, UnusableError) else "no URL: is what / # @ : mean in it written as %XX?"
    if scheme in _SOCKETS and not parts.path.startswith("/"):
        return f"a {scheme}:// URL needs the absolute path of a socket"
    return ""


def known(section: str) -> str:
    """Return the kinds of URL that a section may have, as a hint."""
    return f"known: {', '.join(f'{name}://' for name in SCHEMES[section])}"


class UnusableError(ValueError):
    """A ``file://`` URL that names no directory; the text says why."""


def directory(url: str) -> str:
    """Return the path in a ``file://`` URL; raise UnusableError, or ValueError for what is no URL."""
    parts = urlsplit(url)
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.startswith("/"):
        raise UnusableError("a file:// URL needs three slashes and an absolute path")
    if parts.query or parts.fragment:
        raise UnusableError("? and # in the path of a file:// URL are written %3F and %23")
    if "\0" in path:
        raise UnusableError("NUL cannot be in a path")
    return path
