"""``python -m kronscope`` is the command line."""

from __future__ import annotations

from kronscope.cli import main

if __name__ == "__main__":
    main()
