"""Checkpoints: the tensors of a converted model under checkpoint names, and the files they are written to."""
