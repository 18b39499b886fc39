"""The arithmetic demonstration: a tiny model, its task, its supervised start, and what is shown of a run."""
