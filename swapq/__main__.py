"""``python -m swapq`` is the command line."""

from swapq.cli import main

main()
