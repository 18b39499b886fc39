"""One test for each public fault (the number in its name) that concerns the library without an engine, and the kind around it."""
