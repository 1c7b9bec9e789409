"""The progress of a run or a sweep, for people at a terminal and for pipes."""
