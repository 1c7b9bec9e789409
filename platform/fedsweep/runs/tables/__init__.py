"""The parquet tables of a run: who makes their rows, which columns they have, and how large they may be."""
