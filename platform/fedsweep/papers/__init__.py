"""The papers' own kinds of tables, measures, figures and commands; by name in :mod:`fedsweep.papers.registry`."""
