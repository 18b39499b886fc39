"""The reasoning job: tasks of the package reasoning-gym, and a mixture-of-experts model that reads them character by character."""

PACKAGE = "reasoning_gym"
INSTALL = "--task reasoning needs the package reasoning-gym; install it with: pip install 'swapq[gym]'"
