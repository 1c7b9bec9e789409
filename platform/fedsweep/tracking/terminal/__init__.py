"""How far a run or a sweep is, for people at a terminal and for pipes."""
