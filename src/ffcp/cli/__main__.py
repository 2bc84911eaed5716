"""``python -m ffcp.cli`` is the ``ffcp`` command."""

from ffcp.cli import main

if __name__ == "__main__":
    main()
