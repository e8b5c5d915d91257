"""``python -m trainarchive``: the same as the ``trainarchive`` command."""

from trainarchive.cli import main

if __name__ == "__main__":
    main()
